"""Has anything become slower or larger? Fails if a ratio is more than 20 % worse than the recorded one.

    python benchmarks/guard.py             # measure and compare with benchmarks/recorded.json
    python benchmarks/guard.py --record    # measure and record, on the machine that later compares

Every figure is a ratio of two times of one process, or a size, so a slower machine changes it little; another kind of machine (more cores, CUDA) records its own. A ratio that looks worse is measured
up to twice more and the best counts, since noise only adds. Takes about four minutes; run it by hand or at night, on a machine that does nothing else."""
import argparse
import json
import platform
import sys
from pathlib import Path

import torch

import growth
import memory
import overhead
import update
from sparsify.algorithm import Static
from sparsify.callback import SparsifyCallback
from sparsify.schedule import agp

RECORDED = Path(__file__).with_name('recorded.json')


def of_update(pruned):
    "Passes of an update with the state cleared, and shares of it in what torch's own pruning and one `kthvalue` take"
    def measured(device):
        r = update.measure('global', 'weight', pruned, repeats=5, device=device)
        both = r['update_ms']+r['state_ms']
        return {f'update at {pruned:.0%}, in passes': both/r['pass_ms'], f'update at {pruned:.0%} ÷ torch prune': both/r['prune_ms'],
                f'update at {pruned:.0%} ÷ kthvalue': r['update_ms']/r['kthvalue_ms']}
    return measured


def of_steps(net, steps, name, make):
    "Time inside the callback over the rest of the fit"
    return lambda device: {f'{name}, {net}, {steps} steps': overhead.run(net, steps, device, make)['ratio']}


def of_memory(device):
    r = memory.measure()
    return {'bytes kept a weight': r['kept_bytes_a_weight'], 'bits of a file a weight': r['file_bits_a_weight']}


def of_growth(device):
    small,large = (growth.measure(m, device=device) for m in (2, 50))
    return {'seconds a weight, 50 M ÷ 2 M': large['ns_a_weight']/small['ns_a_weight'], 'peak bytes a weight at 50 M': large['peak_bytes_a_weight']}


def gradual(kind): return SparsifyCallback(.9, context='global', schedule=agp, layer_type=kind)

def fixed(kind): return SparsifyCallback(algorithm=Static(.9, context='local', init='topk'), layer_type=kind)


PLAN = [*map(of_update, (0., .5, .9)), of_steps('lenet', 1000, 'agp global', gradual), of_steps('lenet', 1000, 'masks that stay', fixed),
        of_steps('resnet18', 100, 'agp global', gradual), of_steps('resnet18', 100, 'masks that stay', fixed), of_memory, of_growth]


def worse(found, recorded, limit):
    "Figures that are worse than recorded by more than `limit`"
    return [k for k,v in found.items() if k in recorded and v>recorded[k]*(1+limit)]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--record', action='store_true', help='write the figures instead of comparing them')
    p.add_argument('--limit', type=float, default=.2)
    p.add_argument('--device', default='cpu')
    args = p.parse_args()
    recorded = {} if args.record else json.loads(RECORDED.read_text())['figures']
    found = {}
    for f in PLAN:
        new = f(args.device)
        for _ in range(2):
            if args.record or worse(new, recorded, args.limit): new = {k: min(v, new[k]) for k,v in f(args.device).items()}
        found |= new
        for k,v in new.items(): print(f"{k:45} {v:9.4f}" + ('' if args.record else f"   recorded {recorded[k]:9.4f}" if k in recorded else '   not recorded'), flush=True)
    if args.record:
        where = dict(machine=platform.machine(), threads=torch.get_num_threads(), device=args.device, torch=torch.__version__, python=platform.python_version())
        RECORDED.write_text(json.dumps(dict(where=where, figures={k: round(v, 4) for k,v in found.items()}), indent=1)+'\n')
        return
    bad = worse(found, recorded, args.limit)
    missing = sorted(set(recorded)-set(found))
    if bad or missing: sys.exit('\n'.join([f"worse by more than {args.limit:.0%}: {k}, {found[k]:.4f} instead of {recorded[k]:.4f}" for k in bad]+[f"not measured any more: {k}" for k in missing]))


if __name__=='__main__': main()
