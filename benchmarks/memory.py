"""What sparse training keeps in memory and adds to a checkpoint, on ResNet-18.

    python benchmarks/memory.py [--json]

`kept` is counted from the tensors that are alive and are neither the model's nor the optimizer's, `file` from the sizes of two checkpoints, with and without a callback at work."""
import argparse
import gc
import json
import tempfile
from pathlib import Path

import torch
from fastai.basics import DataLoaders, Learner, noop
from fastai.callback.progress import ProgressCallback
from torch import nn
from torchvision.models import resnet18

from sparsify.callback import SparsifyCallback
from sparsify.criteria import movement


def learner(folder):
    torch.manual_seed(0)
    batch = (torch.randn(2, 3, 64, 64), torch.randint(0, 10, (2,)))
    learn = Learner(DataLoaders([batch]*8, [batch]), resnet18(num_classes=10), loss_func=nn.CrossEntropyLoss(), path=folder)
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn


def alive(): return {id(o): o for o in gc.get_objects() if isinstance(o, torch.Tensor) and not o.is_sparse}


def measure(**kwargs):
    "Bytes kept and bytes of a file, beyond those of a run without a callback, for each weight that is made sparse"
    with tempfile.TemporaryDirectory() as folder:
        plain,learn = learner(folder),learner(folder)
        plain.fit(1)
        gc.collect()
        before = set(alive())
        learn.fit(1)
        learn.opt = None
        cb = SparsifyCallback(.9, **kwargs)
        gc.collect()
        known = set(alive())-before
        learn.fit(1, cbs=cb)
        gc.collect()
        own = {id(p) for p in learn.model.parameters()} | {id(p.grad) for p in learn.model.parameters()} | {id(b) for b in learn.model.buffers()}
        state = {id(v) for s in learn.opt.state.values() for v in s.values() if isinstance(v, torch.Tensor)}
        new = [o.untyped_storage() for k,o in alive().items() if k not in before | known | own | state]
        kept = sum({o.data_ptr(): o.nbytes() for o in new}.values())
        n = sum(m.numel() for m in cb.sparsifier.masks.values())
        for l,name in ((plain, 'plain'), (learn, 'sparse')): l.save(name, with_opt=False)
        size = {name: (Path(folder)/'models'/f'{name}.pth').stat().st_size for name in ('plain', 'sparse')}
    return dict(weights=n, kept_bytes=kept, kept_bytes_a_weight=kept/n, file_bytes=size['sparse']-size['plain'],
                file_bits_a_weight=8*(size['sparse']-size['plain'])/n)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--json', action='store_true')
    args = p.parse_args()
    rows = {'magnitude': measure(), 'movement (remembers the initial weights)': measure(criteria=movement)}
    if args.json: return print(json.dumps(rows, indent=1))
    print(f"{'criterion':42} {'weights':>9} {'kept bytes a weight':>20} {'file, bits a weight':>20}")
    for k,r in rows.items(): print(f"{k:42} {r['weights']:9d} {r['kept_bytes_a_weight']:20.3f} {r['file_bits_a_weight']:20.3f}")


if __name__=='__main__': main()
