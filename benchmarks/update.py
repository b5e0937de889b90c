"""One update of the masks of ResNet-50 (25.5 million weights), from weights to applied masks, and the optimizer state cleared after it, against what else takes such a time.

    python benchmarks/update.py [--repeats 7] [--device cpu] [--only global ...] [--json]

A pass is `torch.abs(w, out=buffer)` over the same weights, `kthvalue` is `torch.kthvalue` over the pooled magnitudes, `prune` is `torch.nn.utils.prune.global_unstructured` on a copy of
the model. All are measured in this process, in turns; medians. The share in the second column is what is pruned already when the update starts; it prunes two hundredths more."""
import argparse
import copy
import json
import statistics
import time
from functools import partial

import torch
from torch import nn
from torch.nn.utils import prune
from torchvision.models import resnet50

from sparsify.optimizer import forget
from sparsify.sparsifier import Sparsifier

KINDS = dict(weight=(nn.Conv2d, nn.Linear), kernel=nn.Conv2d, filter=nn.Conv2d)


def seconds(f, device):
    start = time.perf_counter()
    f()
    if device=='cuda': torch.cuda.synchronize()
    return time.perf_counter()-start


def torch_prune(model, amount):
    "Seconds of torch's own global pruning of a dense copy to `amount`"
    model = copy.deepcopy(model)
    layers = [(m, 'weight') for m in model.modules() if isinstance(m, KINDS['weight'])]
    return partial(prune.global_unstructured, layers, prune.L1Unstructured, amount=amount)


def measure(context, granularity, pruned, step=.02, repeats=7, device='cpu', theirs=True):
    "Medians of an update from `pruned` to `pruned+step`, and of the others before it"
    torch.manual_seed(0)
    model = resnet50(weights=None).to(device)
    sp = Sparsifier(model, granularity, context, layer_type=KINDS[granularity])
    if pruned: sp.sparsify_model(pruned)
    masks,weights = dict(sp.masks),{k: t.param.detach().clone() for k,t in sp.targets.items()}
    opt = torch.optim.SGD(model.parameters(), lr=.1, momentum=.9)
    for p in model.parameters(): opt.state[p]['momentum_buffer'] = torch.zeros_like(p)
    bufs = {k: torch.empty_like(w) for k,w in weights.items()}
    sp.held = True      # as in a fit, where the weights obey the masks at every update
    shares,n,found,changed = sp.shares_of(pruned+step),sum(w.numel() for w in weights.values()),{},[]

    def update(): changed[:] = sp.update(shares)
    def state(): forget(opt, [(sp.targets[k].param, sp.masks[k]) for k in changed], look=False)
    def one_pass():
        for k,w in weights.items(): torch.abs(w, out=bufs[k])
    for i in range(repeats+1):
        for k,t in sp.targets.items():
            t.param.data.copy_(weights[k])
            sp.masks[k] = masks[k]
        todo = {'pass': one_pass}
        if theirs:
            pooled = torch.cat([w.abs().flatten() for w in weights.values()])
            todo |= {'kthvalue': partial(pooled.kthvalue, round((pruned+step)*n)), 'prune': torch_prune(model, pruned+step)}
        todo |= dict(update=update, state=state)
        took = {k: seconds(f, device) for k,f in todo.items()}
        if context=='global' and granularity=='weight': assert sum(int((~m).sum()) for m in sp.masks.values())==round((pruned+step)*n)
        for k,v in took.items() if i else (): found.setdefault(k, []).append(1e3*v)
    return dict(context=context, granularity=granularity, pruned=pruned, weights=n, **{f'{k}_ms': statistics.median(v) for k,v in found.items()})


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--repeats', type=int, default=7)
    p.add_argument('--device', default='cpu')
    p.add_argument('--only', nargs='*', help='rows with one of these in context or granularity')
    p.add_argument('--json', action='store_true')
    args = p.parse_args()
    plan = [('global', 'weight', s) for s in (0., .5, .9)]+[('local', 'weight', s) for s in (0., .9)]+[('local', g, 0.) for g in ('kernel', 'filter')]
    rows = [measure(c, g, s, repeats=args.repeats, device=args.device, theirs=c=='global') for c,g,s in plan if not args.only or {c, g} & set(args.only)]
    if args.json: return print(json.dumps(dict(torch=torch.__version__, threads=torch.get_num_threads(), device=args.device, rows=rows), indent=1))
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.device}, ResNet-50, medians of {args.repeats}")
    print('context granularity pruned    weights  update ms  state ms  passes of both  kthvalue/update  prune/both')
    for r in rows:
        both = r['update_ms']+r['state_ms']
        times = [f"{r[k]/t:.2f}" if k in r else '' for k,t in (('kthvalue_ms', r['update_ms']), ('prune_ms', both))]
        print(f"{r['context']:7} {r['granularity']:11} {r['pruned']:6.2f} {r['weights']:10d} {r['update_ms']:10.1f} {r['state_ms']:9.1f} {both/r['pass_ms']:15.1f} "
              f"{times[0]:>16} {times[1]:>11}")


if __name__=='__main__': main()
