"""What the callback costs at each training step: seconds inside its events over the seconds of the rest of the fit.

    python benchmarks/overhead.py [--net resnet18|lenet] [--steps 1000] [--device cpu] [--only agp global ...] [--peer] [--json]

A row is one fit of `--steps` steps with the default cadence. The events are timed one by one from outside, by a wrapper around the callback's `__call__`, so that both figures of a ratio are
of the same fit and what else the machine does falls on both. A round ends with each row once; `--repeats` rounds, medians. `--peer` adds rows of
fasterai's callback, if it is installed: its gradual schedules make an update at each step, so that fewer steps (`--steps 100`) give the same ratio."""
import argparse
import json
import statistics
import time

import torch
from fastai.basics import Callback, DataLoaders, Learner, TfmdDL, noop
from fastai.callback.progress import ProgressCallback
from torch import nn
from torchvision.models import resnet18

from sparsify.algorithm import Static
from sparsify.callback import SparsifyCallback
from sparsify.dynamic import SET, RigL
from sparsify.schedule import agp, cos, iterative, one_shot

SCHEDULES = dict(one_shot=one_shot, iterative=iterative, agp=agp, cos=cos)


class Same:
    "One batch, again and again: loading data is not what is measured"
    def __init__(self, batch, n): self.batch,self.n = batch,n
    def __len__(self): return self.n
    def __getitem__(self, i): return self.batch


def lenet(): return nn.Sequential(nn.Flatten(), nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10))

NETS = dict(resnet18=lambda: (resnet18(num_classes=10), torch.randn(16, 3, 64, 64), torch.randint(0, 10, (16,)), nn.Conv2d),
            lenet=lambda: (lenet(), torch.randn(64, 1, 28, 28), torch.randint(0, 10, (64,)), nn.Linear))


def learner(net, steps, device):
    torch.manual_seed(0)
    model,x,y,kind = NETS[net]()
    x,y = x.to(device),y.to(device)
    dl = TfmdDL(Same((x, y), steps), bs=None, num_workers=0, device=torch.device(device))
    learn = Learner(DataLoaders(dl, TfmdDL(Same((x, y), 1), bs=None, num_workers=0)), model.to(device), loss_func=nn.CrossEntropyLoss())
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn,kind


class Meter(Callback):
    "Seconds inside the events of other callbacks, and which of the steps had an update"
    order = 200
    def __init__(self, cb, device):
        self.total,self.updates,self.device = 0.,[],device
        if cb is None: return
        call = type(cb).__call__
        def timed(cb, name):
            start = time.perf_counter()
            before = getattr(getattr(cb, 'sparsifier', None), 'updates', 0)
            try: return call(cb, name)
            finally:      # RigL ends its step with an exception
                spent = time.perf_counter()-start
                self.total += spent
                if name in ('before_batch', 'before_step', 'after_step') and getattr(cb.sparsifier, 'updates', 0)!=before: self.updates.append(spent)
        cb.__class__ = type(type(cb).__name__, (type(cb),), dict(__call__=timed, __module__=type(cb).__module__))


def run(net, steps, device, make):
    "Milliseconds a step outside and inside the callback, and milliseconds an update"
    learn,kind = learner(net, steps, device)
    cb = make(kind)
    meter = Meter(cb, device)
    start = time.perf_counter()
    learn.fit(1, 1e-3, cbs=[cb] if cb else [])
    if device=='cuda': torch.cuda.synchronize()
    whole = time.perf_counter()-start
    return dict(step_ms=1e3*(whole-meter.total)/steps, inside_ms=1e3*meter.total/steps, ratio=meter.total/(whole-meter.total),
                updates=len(meter.updates), update_ms=1e3*statistics.median(meter.updates) if meter.updates else 0.)


def rows(context):
    for name,schedule in SCHEDULES.items():
        yield f'{name} {context}',lambda kind,s=schedule: SparsifyCallback(.9, context=context, schedule=s, layer_type=kind)


def peer_rows():
    "The same of fasterai's callback"
    import fasterai.core.schedule as theirs
    from fasterai.core.criteria import large_final
    from fasterai.sparse.sparsify_callback import SparsifyCallback as Theirs
    for name in SCHEDULES:
        yield f'fasterai {name} global',lambda kind,s=getattr(theirs, name): Theirs(.9, 'weight', 'global', large_final, s, layer_type=kind)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--net', choices=NETS, default='resnet18')
    p.add_argument('--steps', type=int, default=1000)
    p.add_argument('--repeats', type=int, default=1)
    p.add_argument('--device', default='cpu')
    p.add_argument('--only', nargs='*', help='rows with one of these in the name')
    p.add_argument('--peer', action='store_true', help="rows of fasterai's callback")
    p.add_argument('--json', action='store_true')
    args = p.parse_args()
    kinds = dict([('no callback', lambda kind: None), *rows('local'), *rows('global'),
                  *[(f'{a.__name__} erk', lambda kind, a=a: SparsifyCallback(algorithm=a(.9), layer_type=kind)) for a in (SET, RigL)],
                  ('masks that stay', lambda kind: SparsifyCallback(algorithm=Static(.9, context='local', init='topk'), layer_type=kind)), *(peer_rows() if args.peer else ())])
    if args.only: kinds = {k: v for k,v in kinds.items() if any(o in k for o in args.only)}
    found = {k: [] for k in kinds}
    run(args.net, 5, args.device, lambda kind: None)      # warm
    for _ in range(args.repeats):
        for k,make in kinds.items(): found[k].append(run(args.net, args.steps, args.device, make))
    table = [dict(row=k, **{c: statistics.median(r[c] for r in rs) for c in rs[0]}) for k,rs in found.items()]
    if args.json: print(json.dumps(dict(torch=torch.__version__, threads=torch.get_num_threads(), net=args.net, steps=args.steps, rows=table), indent=1))
    else:
        print(f"{args.net}, {args.steps} steps, torch {torch.__version__}, {torch.get_num_threads()} threads, {args.device}, medians of {args.repeats}")
        print(f"{'':20} {'step ms':>9} {'inside ms':>10} {'ratio':>7} {'updates':>8} {'update ms':>10}")
        for r in table: print(f"{r['row']:20} {r['step_ms']:9.2f} {r['inside_ms']:10.3f} {r['ratio']:7.4f} {r['updates']:8.0f} {r['update_ms']:10.2f}")


if __name__=='__main__': main()
