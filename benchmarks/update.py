"""One global update of the masks of ResNet-50 (25.5 million weights), from weights to applied masks, against one `torch.kthvalue` over the same scores.

    python benchmarks/update.py [--repeats 7] [--json]

Both are measured in this process, in turns; medians. The share in the first column is what is pruned already when the update starts."""
import argparse
import json
import statistics
import time
from functools import partial

import torch
from torch import nn
from torchvision.models import resnet50

from sparsify.sparsifier import Sparsifier


def seconds(f):
    start = time.perf_counter()
    f()
    return time.perf_counter()-start


def measure(pruned, step=.02, repeats=7):
    "Medians of an update from `pruned` to `pruned+step`, and of `kthvalue` on the pooled scores before it"
    torch.manual_seed(0)
    sp = Sparsifier(resnet50(weights=None), context='global', layer_type=(nn.Conv2d, nn.Linear))
    if pruned: sp.sparsify_model(pruned)
    masks,weights = dict(sp.masks),{k: t.param.detach().clone() for k,t in sp.targets.items()}
    sp.held = True      # as in a fit, where the weights obey the masks at every update
    shares,ours,theirs = sp.shares_of(pruned+step),[],[]
    n = sum(w.numel() for w in weights.values())
    for i in range(repeats+1):
        for k,t in sp.targets.items():
            t.param.data.copy_(weights[k])
            sp.masks[k] = masks[k]
        pooled = torch.cat([w.abs().flatten() for w in weights.values()])
        b = seconds(partial(pooled.kthvalue, round((pruned+step)*n)))
        del pooled
        a = seconds(lambda: sp.update(shares))
        assert sum(int((~m).sum()) for m in sp.masks.values())==round((pruned+step)*n)
        if i: ours.append(a); theirs.append(b)
    a,b = statistics.median(ours),statistics.median(theirs)
    return dict(pruned=pruned, to=pruned+step, weights=n, update_ms=1e3*a, kthvalue_ms=1e3*b, ratio=a/b, update_range=[1e3*min(ours), 1e3*max(ours)])


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--repeats', type=int, default=7)
    p.add_argument('--json', action='store_true')
    args = p.parse_args()
    rows = [measure(s, repeats=args.repeats) for s in (0., .5, .9)]
    if args.json: print(json.dumps(dict(torch=torch.__version__, threads=torch.get_num_threads(), rows=rows), indent=1))
    else:
        print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {rows[0]['weights']} weights, medians of {args.repeats}")
        print('pruned before   update ms   kthvalue ms   ratio')
        for r in rows: print(f"{r['pruned']:13.2f} {r['update_ms']:11.1f} {r['kthvalue_ms']:13.1f} {r['ratio']:7.3f}")


if __name__=='__main__': main()
