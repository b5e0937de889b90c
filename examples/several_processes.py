"""Trains a sparse network on several processes, one a GPU, on the handwritten digits that come with scikit-learn.

    torchrun --nproc_per_node=2 examples/several_processes.py
    accelerate launch --multi_gpu --num_processes 2 examples/several_processes.py

To try it out without GPUs (of accelerate's options `--multi_gpu` starts the processes; its own `--cpu` starts a single one):

    torchrun --nproc_per_node=2 examples/several_processes.py --cpu
    accelerate launch --multi_gpu --num_processes 2 examples/several_processes.py --cpu

It needs accelerate: from the root of the repository, `pip install -e '.[distrib]'`.
Started by plain `python`, it trains in one process."""
import argparse
import os

import torch
import torch.distributed as dist
from fastai.basics import DataLoaders, Learner, accuracy, default_device, rank_distrib
from fastai.distributed import DistributedDL
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

from sparsify.callback import SparsifyCallback


def digits(bs=64):
    "1437 digits to train on and 360 to validate on, split alike in all processes"
    x,y = load_digits(return_X_y=True)
    x = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8)/16
    parts = random_split(TensorDataset(x, torch.tensor(y)), [1437, 360], torch.Generator().manual_seed(0))
    return DataLoaders.from_dsets(*parts, bs=bs)


def cnn():
    "Three convolutions, 60 kB of weights"
    return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1, stride=2),
                         nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1, stride=2), nn.BatchNorm2d(32), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def use_device(cpu):
    "Give each process its own GPU, or none"
    default_device(not cpu)
    if not cpu: torch.cuda.set_device(int(os.environ.get('LOCAL_RANK', 0)))
    else: DistributedDL._broadcast = broadcast


def broadcast(self, t, rank):
    "fastai's own sends the order of the items by way of `.cuda()`, which NCCL needs: without a GPU that fails, and gloo needs none"
    t = torch.LongTensor(t)
    dist.broadcast(t, rank)
    return t.tolist()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--cpu', action='store_true', help='train on the CPU')
    p.add_argument('--epochs', type=int, default=8)
    p.add_argument('--sparsity', type=float, default=.9)
    args = p.parse_args()
    use_device(args.cpu)
    learn = Learner(digits(), cnn(), loss_func=nn.CrossEntropyLoss(), metrics=accuracy)
    with learn.distrib_ctx(sync_bn=not args.cpu, cpu=args.cpu):      # a synchronized BatchNorm needs a GPU
        learn.fit(args.epochs, 1e-2, cbs=SparsifyCallback(args.sparsity))
    if not rank_distrib(): print(learn.sparsify.report().to_string(index=False))
    if dist.is_initialized():
        dist.barrier()      # nobody leaves while others still listen
        dist.destroy_process_group()


if __name__=='__main__': main()
