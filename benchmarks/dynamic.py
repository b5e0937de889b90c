"""Static masks, SET and RigL from scratch, paired over seeds: on digits, and on a task whose teacher is a sparse network.

    python benchmarks/dynamic.py [--task digits|teacher] [--sparsity .98] [--seeds 5] [--epochs 30] [--json]

Each seed gives all of them the same first weights, the same first mask (drawn by `erk`) and the same batches. `gain` is the mean difference to the static mask and its standard error over seeds;
accuracy is of the last epoch, never of the best one. digits: 1347 images of scikit-learn to train on, 450 to validate, an MLP 64-300-100-10. teacher: an MLP 64-64-10 with 5 % of its weights labels
4096 normal inputs by its largest output (each class about as often: its outputs are standardized), and a student 64-256-10 learns from them; 2048 others validate. The teacher's connections are known, so that
the share of them among the student's first layer's inputs could be; what is printed is accuracy."""
import argparse
import json
import statistics
import warnings

import torch
from fastai.basics import DataLoaders, Learner, accuracy, noop
from fastai.callback.all import ProgressCallback
from fastai.data.load import DataLoader
from sklearn.datasets import load_digits
from torch import nn

from sparsify.algorithm import Static
from sparsify.callback import SparsifyCallback
from sparsify.dynamic import SNFS, SET, RigL

ALGORITHMS = dict(static=Static, set=SET, rigl=RigL, snfs=SNFS)


def mlp(*sizes): return nn.Sequential(*[m for a,b in zip(sizes, sizes[1:]) for m in (nn.Linear(a, b), nn.ReLU())][:-1])


def digits():
    "Pixels over 16, minus their mean; labels; sizes of the network"
    x,y = map(torch.tensor, load_digits(return_X_y=True))
    x = (x.float()/16-.3)/.38
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return x[order],y[order],1347,(64, 300, 100, 10)


def teacher():
    "Inputs, the labels of a network with 5 % of its weights, sizes of the student"
    g = torch.Generator().manual_seed(1)
    w1,w2 = (torch.randn(a, b, generator=g)*(torch.rand(a, b, generator=g)<.05) for a,b in ((64, 64), (64, 10)))
    x = torch.randn(6144, 64, generator=g)
    out = (x@w1).relu()@w2
    return x,((out-out.mean(0))/out.std(0).clamp_min(1e-6)).argmax(1),4096,(64, 256, 10)


TASKS = dict(digits=digits, teacher=teacher)


def score(task, name, sparsity, seed, epochs):
    "Accuracy after the last epoch"
    x,y,n,sizes = TASKS[task]()
    torch.manual_seed(seed)
    train,valid = ([(a, b) for a,b in zip(*o)] for o in ((x[:n], y[:n]), (x[n:], y[n:])))
    dls = DataLoaders(DataLoader(train, bs=64, shuffle=True, drop_last=True), DataLoader(valid, bs=512))
    dls.train.rng.seed(seed)
    learn = Learner(dls, mlp(*sizes), loss_func=nn.CrossEntropyLoss(), metrics=accuracy)
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    cb = SparsifyCallback(algorithm=ALGORITHMS[name](sparsity), layer_type=nn.Linear, seed=seed) if name!='dense' else None
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', '.*updates every')
        learn.fit_one_cycle(epochs, 1e-2, cbs=cb)
    if cb: assert sum(int((~m).sum()) for m in cb.sparsifier.masks.values())==round(sparsity*sum(m.numel() for m in cb.sparsifier.masks.values()))
    return float(learn.recorder.values[-1][list(learn.recorder.metric_names).index('accuracy')-1])


def compare(task, sparsity, seeds, epochs):
    "`{name: {mean, error, gain, gain_error}}`"
    found = {k: [score(task, k, sparsity, seed, epochs) for seed in range(seeds)] for k in ('dense', *ALGORITHMS)}
    def mean(v): return statistics.mean(v),statistics.stdev(v)/len(v)**.5 if len(v)>1 else float('nan')
    rows = {}
    for k,v in found.items():
        (m,e),(g,ge) = mean(v),mean([a-b for a,b in zip(v, found['static'])])
        rows[k] = dict(accuracy=m, error=e, gain=g, gain_error=ge)
    return rows


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--task', choices=TASKS, default='digits')
    p.add_argument('--sparsity', type=float, default=.98)
    p.add_argument('--seeds', type=int, default=5)
    p.add_argument('--epochs', type=int, default=30)
    p.add_argument('--json', action='store_true')
    args = p.parse_args()
    rows = compare(args.task, args.sparsity, args.seeds, args.epochs)
    if args.json: return print(json.dumps(dict(torch=torch.__version__, **vars(args), rows=rows), indent=1))
    print(f"{args.task} at {args.sparsity:.0%}, {args.epochs} epochs, {args.seeds} seeds, torch {torch.__version__}")
    print('            accuracy  std. error   gain on static  std. error')
    for k,r in rows.items(): print(f"{k:10} {r['accuracy']:9.4f} {r['error']:11.4f} {r['gain']:16.4f} {r['gain_error']:11.4f}")


if __name__=='__main__': main()
