"""How time and memory of a global update grow with the number of weights, from one million to two hundred.

    python benchmarks/growth.py [--sizes 1 5 25 100 200] [--device cpu] [--plot growth.png] [--json]

Each size is a stack of Linear layers of 1024×1024. `peak` is the memory that an update takes beyond what there was before it, in bytes a weight: the high-water mark of the resident set, which Linux
resets on request. `histograms` is `kth_magnitude`, the exact threshold with half a megabyte whatever the size, and `bracket` the one that an update takes."""
import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch import nn

from sparsify.masks import kth_magnitude, topk_masks
from sparsify.sparsifier import Sparsifier


def resident(field):
    "A line of /proc/self/status, in bytes"
    return 1024*int(next(o.split()[1] for o in Path('/proc/self/status').read_text().splitlines() if o.startswith(field)))


def peak(f, device):
    "What `f` took at most, in bytes"
    if device=='cuda':
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        f()
        return torch.cuda.max_memory_allocated()-before
    Path('/proc/self/clear_refs').write_text('5')
    before = resident('VmRSS')
    f()
    return max(0, resident('VmHWM')-before)


def seconds(f, device):
    start = time.perf_counter()
    f()
    if device=='cuda': torch.cuda.synchronize()
    return time.perf_counter()-start


def measure(millions, repeats=3, device='cpu'):
    torch.manual_seed(0)
    layers = max(1, round(millions*1e6/1024**2))
    net = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(layers)]).to(device)
    ws = [m.weight.detach() for m in net]
    n = sum(w.numel() for w in ws)
    sp = Sparsifier(net, context='global', layer_type=nn.Linear).sparsify_model(.5)
    sp.held = True
    times,peaks = [],[]
    for i in range(repeats):
        peaks.append(peak(lambda: times.append(seconds(lambda: sp.sparsify_model(.5+.02*(i+1)), device)), device))
    k = n//4
    flat = [w.flatten() for w in ws]
    def median(f): return statistics.median(seconds(f, device) for _ in range(repeats))
    histograms,masks = median(lambda: kth_magnitude(flat, k)),median(lambda: topk_masks(flat, k, magnitude=True, clean=True))
    return dict(weights=n, update_s=statistics.median(times), ns_a_weight=1e9*statistics.median(times)/n, peak_bytes_a_weight=max(peaks)/n,
                histograms_s=histograms, masks_s=masks, mask_bytes=sum(m.numel() for m in sp.masks.values()))


def plot(rows, file):
    "Time against size, both logarithmic, with a line of slope 1"
    import matplotlib
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    n,t = [r['weights'] for r in rows],[r['update_s'] for r in rows]
    fig,ax = plt.subplots(figsize=(5, 3.4), constrained_layout=True)
    ax.loglog(n, [t[-1]*x/n[-1] for x in n], color='.7', label='in proportion to the weights')
    ax.loglog(n, t, 'o-', color='C0', label='update')
    ax.loglog(n, [r['histograms_s'] for r in rows], 's--', color='C1', label='threshold by histograms')
    ax.set(xlabel='weights', ylabel='seconds', title='A global update')
    ax.legend(frameon=False)
    fig.savefig(file, dpi=110)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--sizes', type=float, nargs='*', default=[1, 5, 25, 100, 200], help='millions of weights')
    p.add_argument('--device', default='cpu')
    p.add_argument('--plot', help='a file for a picture')
    p.add_argument('--json', action='store_true')
    args = p.parse_args()
    rows = [measure(s, device=args.device) for s in args.sizes]
    if args.plot: plot(rows, args.plot)
    if args.json: return print(json.dumps(dict(torch=torch.__version__, threads=torch.get_num_threads(), rows=rows), indent=1))
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    print('    weights  update s  ns a weight  peak bytes a weight  histograms s  bracket and masks s')
    for r in rows:
        print(f"{r['weights']:11d} {r['update_s']:9.3f} {r['ns_a_weight']:12.2f} {r['peak_bytes_a_weight']:20.2f} {r['histograms_s']:13.3f} {r['masks_s']:20.3f}")


if __name__=='__main__': main()
