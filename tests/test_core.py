"`Sparsifier` with a plain torch loop: every criterion, granularity, context, kind of layer and sparsity, and properties on random weights"
import inspect, math
from collections import Counter
from fractions import Fraction
from functools import cache
import numpy as np
import pytest
import torch
import torch.nn as nn
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from sparsify import criteria
from sparsify.context import er_densities
from sparsify.criteria import large_final, small_final
from sparsify.granularity import Blocks, Grouped, NM, as_granularity, granularity_names
from sparsify.masks import drop, grow, kth_largest, n_kept, n_pruned, pack_bits, topk_mask, topk_masks, unpack_bits, zero_
from sparsify.sparsifier import Sparsifier

def examples(n): return settings(max_examples=n, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))

LEVELS = (0, .01, .29, .5, .9, .99)
CONTEXTS = ('local', 'global', 'er', 'erk')
CRITERIA = {n: f for n in criteria.__all__ for f in [getattr(criteria, n)] if next(iter(inspect.signature(f).parameters))=='w'}
INTS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}
KINDS = dict(  # two layers of different shapes, so that units differ in size
    conv1d   =lambda: (nn.Conv1d(4, 6, 3), nn.Conv1d(6, 4, 2)),
    conv2d   =lambda: (nn.Conv2d(4, 5, (2,3)), nn.Conv2d(8, 3, 2)),
    conv3d   =lambda: (nn.Conv3d(2, 4, 2), nn.Conv3d(4, 3, (1,2,2))),
    transpose=lambda: (nn.ConvTranspose2d(4, 3, 2), nn.ConvTranspose2d(3, 4, 3)),
    grouped  =lambda: (nn.Conv2d(8, 8, 2, groups=2), nn.Conv2d(8, 4, 3, groups=4)),
    depthwise=lambda: (nn.Conv2d(6, 6, 3, groups=6), nn.Conv2d(6, 12, 2, groups=6)),
    linear   =lambda: (nn.Linear(8, 6), nn.Linear(6, 4)))
EXTRA = (Blocks(2, 2), Grouped('out', 2), NM(2, 4), NM(1, 2))
GRID = [(k, g) for k in KINDS for g in [*granularity_names(KINDS[k]()[0]), *EXTRA, (0,1)]]

# ---- what is expected, worked out without the library: loops, fractions and one stable sort

def model_of(kind, seed=0):
    "Two layers of whole numbers from -3 to 3: scores are exact, and full of ties"
    net,rng = nn.Sequential(*KINDS[kind]()),np.random.default_rng(seed)
    for p in net.parameters(): p.data.copy_(torch.from_numpy(rng.integers(-3, 4, p.shape)))
    return net

def best(scores, alive, k):
    "Indices of the `k` highest of the living, of equals the lower"
    return sorted(np.flatnonzero(alive).tolist(), key=lambda i: (-scores[i], i))[:k]

def best_per_row(scores, alive, k, rows):
    "Bool: the `k` best living units of each row"
    keep,n = np.zeros(len(scores), bool),len(scores)//rows
    for r in range(0, len(scores), n): keep[[r+i for i in best(scores[r:r+n], alive[r:r+n], k)]] = True
    return keep

def best_globally(scores, alive, sizes, budget, least=1):
    "Bool for each layer: the lowest of all layers go, the last unit of a layer never, until the next would exceed `budget` weights"
    keep,gone = [np.ones(len(s), bool) for s in scores],0
    order = sorted((bool(alive[l][i]), scores[l][i], -l, -i) for l in range(len(scores)) for i in range(len(scores[l])))
    for l,i in [(-l, -i) for *_,l,i in order]:
        if gone+sizes[l]>budget: break
        if keep[l].sum()<=least: continue
        keep[l][i],gone = False,gone+sizes[l]
    return keep

def densities(shapes, kept, kernel):
    "Erdős-Rényi by the book, in fractions: `kept` of all weights, layers that would pass 1 dense"
    raw = [Fraction(sum(d), math.prod(d)) for s in shapes for d in [s if kernel else s[:2]]]
    n,dense = [math.prod(s) for s in shapes],set()
    while len(dense)<len(n):
        free = [i for i in range(len(n)) if i not in dense]
        eps = Fraction(kept-sum(n[i] for i in dense), sum(raw[i]*n[i] for i in free))
        top = max(raw[i] for i in free)
        if eps*top<=1: return [Fraction(1) if i in dense else eps*raw[i] for i in range(len(n))]
        dense |= {i for i in free if raw[i]==top}
    return [Fraction(1)]*len(n)

def feasible(sp, s, context):
    "Whether every layer can keep a unit (whole layers as units may go)"
    g,least = list(sp.grans.values()),0 if sp.granularity=='layer' else 1
    if context=='global' and any(o.rows>1 for o in g): return False
    return context=='local' or round(s*sum(o.rows*o.n*o.size for o in g))<=sum((o.rows*o.n-least)*o.size for o in g)

def needs(f): return getattr(f, 'needs', ())

def near_half(x):
    "Such a fraction, worked out from shapes, may round either way"
    return abs(float(x)%1-.5)<1e-6

def wanted(sp, s, context, scores, alive):
    "The units that have to live, by layer; for er and erk the counts are checked here and the best of that many expected"
    g,pruned = list(sp.grans.values()),round(s*sum(o.rows*o.n*o.size for o in sp.grans.values()))
    least = [sp.granularity.n if isinstance(sp.granularity, NM) else 1 for o in g]
    if context=='global': return best_globally(scores, alive, [o.size for o in g], pruned, 0 if sp.granularity=='layer' else 1)
    if context=='local': kept = [max(l, o.n-round(s*o.n)) for l,o in zip(least, g)]
    else:
        d = densities([o.shape for o in g], sum(math.prod(o.shape) for o in g)-pruned, context=='erk')
        if all(o.size*o.rows==1 for o in g):
            kept = [int(m.sum()) for m in sp.masks.values()]
            assert sum(kept)==sum(o.n for o in g)-pruned and min(kept)>=1
            real = [float(x*o.n) for x,o in zip(d, g)]
            if min(real)>=1: assert all(abs(k-r)<1 for k,r in zip(kept, real))
        else: kept = [int(o.active(m).sum())//o.rows if near_half((1-x)*o.n) else max(l, o.n-round((1-x)*o.n))
                      for l,o,x,m in zip(least, g, d, sp.masks.values())]
    return [best_per_row(u, a, k, o.rows) for u,a,k,o in zip(scores, alive, kept, g)]

def ids(g):
    "The unit of each weight, in flat order"
    return g.expand(torch.arange(g.rows*g.n).view(g.rows, g.n)).flatten().numpy()

def unit_scores(sp, f, name, unit, w, **given):
    "Exact means of a unit's scores, from the criterion in float64"
    if 'generator' in needs(f): return sp.scores(name).flatten().double().numpy()
    s = f(w.double(), **{k: given[k][name].double() for k in needs(f)})
    return np.bincount(unit, s.flatten().numpy())/sp.grans[name].size

def bits(t): return t.detach().contiguous().view(INTS[t.dtype]).numpy()

def check_held(sp):
    "W == W*M, to the bit: what is pruned is +0.0, here and in the biases and BatchNorms that follow"
    for k,t,m in sp.all_masks():
        assert m.dtype==torch.bool and m.shape==t.param.shape and not bits(t.param)[~m.numpy()].any(), k

def sgd_step(net, sp, velocity, rng):
    "SGD with momentum .5 on gradients that are whole numbers, masked as a loop without fastai has to"
    grads = {k: torch.from_numpy(rng.integers(-2, 3, p.shape)).float() for k,p in net.named_parameters()}
    for k,t,m in sp.all_masks(): zero_(grads[k], m)
    for k,p in net.named_parameters():
        velocity[k] = grads[k]+.5*velocity.get(k, 0)
        p.data -= velocity[k]
    sp.apply_masks()

def run(kind, granularity, context, name):
    "Sparsity rises through all levels, a step after each: counts, units, which of them, nesting and the invariant"
    net,f,rng,velocity = model_of(kind),CRITERIA[name],np.random.default_rng(1),{}
    sp = Sparsifier(net, granularity, context, f, layer_type=nn.Module)
    unit,init = {k: ids(g) for k,g in sp.grans.items()},{k: t.param.detach().clone() for k,t in sp.targets.items()}
    prev = dict(init)
    for s in LEVELS:
        old = dict(sp.masks)
        alive = [np.bincount(unit[k], m.numpy().ravel())>0 for k,m in old.items()]
        scores = [unit_scores(sp, f, k, unit[k], t.param.detach(), init=init, previous=prev) for k,t in sp.targets.items()]
        if not feasible(sp, s, context):
            before = [bits(p).copy() for p in net.parameters()]
            with pytest.raises(ValueError, match='min_keep|balanced groups'): sp.sparsify_model(s)
            assert all((bits(p)==b).all() for p,b in zip(net.parameters(), before)) and all(m is old[k] for k,m in sp.masks.items())
            continue
        sp.sparsify_model(s)
        for (k,m),keep in zip(sp.masks.items(), wanted(sp, s, context, scores, alive)):
            got = m.numpy().ravel()
            assert (got==keep[unit[k]]).all(), f'{name}, sparsity {s}, {k}: {got.sum()} kept'
            assert not (got & ~old[k].numpy().ravel()).any(), f'{name}, sparsity {s}, {k}: not nested'
            if m is not old[k]: prev[k] = sp.targets[k].param.detach().clone()
        check_held(sp)
        sgd_step(net, sp, velocity, rng)
        check_held(sp)

@cache
def fits(kind, granularity):
    "Whether some layer of this kind has two units or more of this granularity"
    n = 0
    for m in KINDS[kind]():
        try: g = as_granularity(granularity, m.weight.shape, m)
        except ValueError: continue
        n += g.n*g.rows>1 or granularity=='layer'
    return n

def plan():
    "Single weights meet every criterion in every kind and context; every other granularity meets each criterion somewhere"
    cells = [(k, g, c) for k,g in GRID for c in CONTEXTS if fits(k, g) and (g!='layer' or c=='global')]
    share,used = Counter(str(g) for _,g,_ in cells),Counter()
    for k,g,c in cells:
        n = len(CRITERIA) if g=='weight' else math.ceil(len(CRITERIA)/share[str(g)])
        names = sorted(CRITERIA, key=lambda o: (used[str(g), o], used[k, o], used[c, o]))[:n]
        used.update((o, name) for o in (str(g), k, c) for name in names)
        yield pytest.param(k, g, c, names, id=f'{k}-{g}-{c}'.replace(' ', ''))

quiet = pytest.mark.filterwarnings('ignore:not pruned', 'ignore:nothing is left', 'ignore:.*leaves', 'ignore:the graph')

@quiet
@pytest.mark.parametrize('kind,granularity,context,names', plan())
def test_grid(kind, granularity, context, names):
    for name in names: run(kind, granularity, context, name)

@pytest.mark.parametrize('kind,granularity', [o for o in GRID if not fits(*o)], ids=str)
def test_nothing_to_prune(kind, granularity):
    "Where no layer has two units the model is refused, whatever the context"
    for context in CONTEXTS:
        with pytest.raises(ValueError, match='nothing is left to prune'): Sparsifier(model_of(kind), granularity, context, layer_type=nn.Module)

def test_plan_is_complete():
    met = {(str(p.values[1]), n) for p in plan() for n in p.values[3]}
    assert met=={(str(g), n) for k,g in GRID if fits(k, g) for n in CRITERIA} and len(CRITERIA)>=14

# ---- a real loop, and what a loop may do to the model

def trained(net, sp, x, steps=2, opt=None):
    "Train with torch's own SGD, momentum and weight decay; zeros are checked after every step"
    opt = opt or torch.optim.SGD(net.parameters(), lr=.1, momentum=.9, weight_decay=.01)
    for _ in range(steps):
        opt.zero_grad()
        net(x).square().mean().backward()
        for k,t,m in sp.all_masks(): zero_(t.param.grad, m)
        for k,t,m in sp.all_masks(): assert not t.param.grad[~m].any(), k
        opt.step()
        sp.apply_masks()
        check_held(sp)
    return opt

LOOPS = dict(
    conv1d   =lambda: (nn.Sequential(nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 4, 2)), (2,4,9)),
    conv2d   =lambda: (nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 2)), (2,4,7,7)),
    conv3d   =lambda: (nn.Sequential(nn.Conv3d(2, 6, 2), nn.BatchNorm3d(6), nn.ReLU(), nn.Conv3d(6, 4, (1,2,2))), (2,2,4,4,4)),
    transpose=lambda: (nn.Sequential(nn.ConvTranspose2d(4, 6, 2, groups=2), nn.BatchNorm2d(6), nn.ReLU(), nn.ConvTranspose2d(6, 4, 3)), (2,4,5,5)),
    depthwise=lambda: (nn.Sequential(nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 4, 1)), (2,4,7,7)),
    linear   =lambda: (nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 6)), (4,8)))

@pytest.mark.parametrize('kind', LOOPS)
def test_loop(kind):
    "Momentum built up before an update moves nothing that the update prunes; masks nest; dead outputs stay dead, BatchNorm and all"
    torch.manual_seed(0)
    net,shape = LOOPS[kind]()
    x,whole = torch.randn(shape),'row' if kind=='linear' else 'filter'
    layers = (nn.modules.conv._ConvNd, nn.Linear)
    for granularity in ('weight', whole):
        sp = Sparsifier(net, granularity, layer_type=layers)
        opt = trained(net, sp, x)
        for s in (.3, .6, .8):
            old = dict(sp.masks)
            sp.sparsify_model(s)
            check_held(sp)
            assert not any((m & ~old[k]).any() for k,m in sp.masks.items())
            for k,g in sp.grans.items(): assert int((~g.active(sp.masks[k])).sum())==min(round(s*g.n), g.n-1)
            trained(net, sp, x, 2, opt)
    first = net[0](x), net[1](net[0](x)), net[1].eval()(net[0](x))
    dead = ~sp.outputs('0.weight')
    assert dead.any() and all(not y[:,dead].any() for y in first)

@pytest.mark.parametrize('dtype', INTS, ids=str)
@pytest.mark.parametrize('granularity,context', [('weight','local'), ('weight','global'), ('filter','local'), ('kernel','global'), (NM(2,4),'local')], ids=str)
@quiet
def test_dtypes(dtype, granularity, context):
    "Half, bfloat16 and double weights keep their type and their exact count, through a step as well"
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 4, 3)).to(dtype)
    kinds = {k: v.dtype for k,v in net.state_dict().items()}
    sp = Sparsifier(net, granularity, context)
    sp.sparsify_model(.5)
    zeros = [int((m.weight==0).sum()) for m in net]
    assert sum(zeros)==288 and (context=='global' or zeros==[144, 144])
    for p in net.parameters(): p.data -= 1
    sp.apply_masks()
    check_held(sp)
    assert {k: v.dtype for k,v in net.state_dict().items()}==kinds and sp.sparsity==sum(zeros)/576

def test_dtype_changed_later():
    "A model cast after its sparsifier was made is scored, masked and remembered as it is now"
    for criterion in CRITERIA.values():
        net = nn.Sequential(nn.Linear(10, 10))
        sp = Sparsifier(net, criteria=criterion, layer_type=nn.Linear).sparsify_model(.2)
        net.half(); sp.sparsify_model(.5)
        net.double(); sp.sparsify_model(.7)
        assert int((net[0].weight==0).sum())==70 and net[0].weight.dtype==torch.float64
        check_held(sp)

@pytest.mark.parametrize('layout', ['channels_last', 'transposed', 'strided'])
def test_layouts(layout):
    "Weights that are not contiguous are pruned by their logical index, in place, and stay as they were laid out"
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(4, 6, 3, bias=False))
    w = net[0].weight.detach().clone()
    base = dict(channels_last=lambda: w.to(memory_format=torch.channels_last), transposed=lambda: w.permute(3,2,1,0).contiguous().permute(3,2,1,0),
                strided=lambda: w.repeat_interleave(2, 0)[::2])[layout]()
    net[0].weight = nn.Parameter(base)
    stride = base.stride()
    sp = Sparsifier(net).sparsify_model(.5)
    order = sorted(range(216), key=lambda i: (-w.abs().flatten()[i], i))
    assert sorted(sp.masks['0.weight'].flatten().nonzero().flatten().tolist())==sorted(order[:108])
    assert net[0].weight.stride()==stride and net[0].weight.data_ptr()==base.data_ptr() and torch.equal(net[0].weight, w*sp.masks['0.weight'])
    check_held(sp)

# ---- properties

def rounded(kind, x):
    "Values of a kind, from standard normal ones"
    return dict(normal=lambda: x, int4=lambda: (x*3).round().clip(-8, 7)/8, bf16=lambda: torch.from_numpy(x).float().bfloat16().float().numpy(),
                constant=lambda: np.full_like(x, .5), zeros=lambda: np.zeros_like(x), signed_zeros=lambda: np.copysign(0., x), huge=lambda: np.sign(x)*3.4e38,
                tiny=lambda: x*1e-42, infinite=lambda: np.where(np.abs(x)>1, np.sign(x)*np.inf, x.round()),
                mixed=lambda: x.round()*10.**(x*8).round())[kind]().astype(np.float32)

VALUES = st.sampled_from(['normal', 'int4', 'bf16', 'constant', 'zeros', 'signed_zeros', 'huge', 'tiny', 'infinite', 'mixed'])
SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=5).map(tuple)
SEEDS = st.integers(0, 2**16)

def values(kind, shape, seed): return torch.from_numpy(rounded(kind, np.random.default_rng(seed).standard_normal(shape)))

@examples(80)
@given(st.lists(st.tuples(SHAPES, VALUES), min_size=1, max_size=4), SEEDS, st.floats(0, 1))
def test_topk_is_a_stable_sort(tensors, seed, share):
    "Several tensors compete; of equal scores the earlier tensor and the lower index is kept"
    scores = [values(v, shape, seed+i) for i,(shape,v) in enumerate(tensors)]
    flat = np.concatenate([s.numpy().ravel() for s in scores])
    k = round(share*flat.size)
    keep = np.zeros(flat.size, bool)
    keep[best(flat, np.ones(flat.size), k)] = True
    got = topk_masks(scores, k)
    assert np.concatenate([m.numpy().ravel() for m in got]).tolist()==keep.tolist() and [m.shape for m in got]==[s.shape for s in scores]
    if k: assert kth_largest(scores, k)==sorted(flat.tolist(), reverse=True)[k-1]

@pytest.mark.parametrize('kind', ['normal', 'int4', 'bf16', 'constant', 'zeros', 'signed_zeros', 'huge', 'tiny', 'infinite', 'mixed'])
@pytest.mark.parametrize('share', [0, .001, .3, .9, .999, 1])
def test_ranking_by_magnitude_is_ranking_the_magnitudes(kind, share):
    "In many pieces, among all and among some, float32 and float64 together: as if the magnitudes had been stored"
    tensors = [values(kind, (700,500), 1), values(kind, (3,5,7), 2).double(), values(kind, (300,), 3)]
    sizes,flat = [t.numel() for t in tensors],np.concatenate([np.abs(t.double().numpy()).ravel() for t in tensors])
    chosen = np.random.default_rng(0).random(flat.size)<.4
    for among in (None, chosen):
        count = np.ones(flat.size, bool) if among is None else among
        k = round(share*count.sum())
        keep = np.zeros(flat.size, bool)
        keep[np.argsort(-np.where(count, flat, -1), kind='stable')[:k]] = True
        parts = None if among is None else [torch.from_numpy(a).view(t.shape) for a,t in zip(np.split(among, np.cumsum(sizes)[:-1]), tensors)]
        got = topk_masks(tensors, k, parts, magnitude=True)
        assert np.array_equal(np.concatenate([m.numpy().ravel() for m in got]), keep)

@examples(80)
@given(st.integers(1, 5), st.integers(1, 6), st.booleans(), VALUES, SEEDS, st.floats(0, 1))
def test_topk_rows(rows, n, first, kind, seed, share):
    "Each row, or column, keeps its own best"
    s,k = values(kind, (rows, n), seed),round(share*n)
    got = topk_mask(s.T.contiguous(), k, dim=0).T if first else topk_mask(s, k, dim=-1)
    for row,m in zip(s.numpy(), got): assert sorted(m.nonzero().flatten().tolist())==sorted(best(row, np.ones(n), k))

@examples(80)
@given(SHAPES, VALUES, SEEDS, st.floats(0, 1), st.floats(0, 1), st.booleans())
def test_drop_and_grow(shape, kind, seed, live, share, nan):
    "`drop` keeps the best of the living, `grow` adds the best of the others, and never a NaN; where there is nothing to do nothing changes"
    rng = np.random.default_rng(seed)
    s,m = values(kind, shape, seed),torch.from_numpy(rng.random(shape)<live)
    flat,alive,k = s.numpy().ravel(),m.numpy().ravel(),round(share*m.numel())
    hide = lambda where: s.masked_fill(where & nan, torch.nan)      # what does not matter may be NaN
    down,up = drop(hide(~m), m, k),grow(hide(m), m, k)
    assert sorted(down.flatten().nonzero().flatten().tolist())==sorted(best(flat, alive, min(k, alive.sum())))
    new = best(flat, ~alive, max(k-alive.sum(), 0))
    assert sorted(up.flatten().nonzero().flatten().tolist())==sorted(np.flatnonzero(alive).tolist()+new)
    holes = s.masked_fill(torch.from_numpy(rng.random(shape)<.5), torch.nan)
    grown = grow(holes, m, k)
    assert not (grown & ~m & holes.isnan()).any() and not (m & ~grown).any()
    assert int(grown.sum())==max(int(m.sum()), min(k, int((m | ~holes.isnan()).sum())))

LAYERS = st.one_of(
    st.builds(lambda i,o,k: nn.Conv1d(i, o, k), *[st.integers(1, 5)]*2, st.integers(1, 3)),
    st.builds(lambda i,o,k: nn.Conv2d(i, o, k), *[st.integers(1, 5)]*2, st.integers(1, 3)),
    st.builds(lambda i,o: nn.Conv3d(i, o, 2), *[st.integers(1, 3)]*2),
    st.builds(lambda i,o,k: nn.ConvTranspose2d(i, o, k), *[st.integers(1, 4)]*2, st.integers(1, 3)),
    st.builds(lambda c,m: nn.Conv2d(c, c*m, 2, groups=c), st.integers(1, 4), st.integers(1, 3)),
    st.builds(lambda i,o: nn.Linear(i, o), *[st.integers(1, 8)]*2))

@quiet
@examples(100)
@given(st.lists(st.tuples(LAYERS, VALUES, st.sampled_from(list(INTS))), min_size=1, max_size=3), SEEDS, st.sampled_from(['weight', 'row', (0,), (1,)]),
       st.sampled_from(CONTEXTS), st.lists(st.floats(0, 1), min_size=1, max_size=3), st.sampled_from([large_final, small_final]))
def test_any_network(layers, seed, granularity, context, levels, criterion):
    "Random shapes, types, values and sparsities: exact counts, the invariant, unchanged types, nested masks"
    for i,(m,v,d) in enumerate(layers): m.weight.data = values(v, m.weight.shape, seed+i).to(d)
    net = nn.Sequential(*[m for m,_,_ in layers])
    try: sp = Sparsifier(net, granularity, context, criterion, layer_type=nn.Module)
    except ValueError as e:
        assert 'single unit' in str(e) and all(as_granularity(granularity, m.weight.shape, m).n==1 for m,_,_ in layers)
        return
    dtypes,total = [t.param.dtype for t in sp.targets.values()],sum(g.n*g.size for g in sp.grans.values())
    for s in sorted(levels):
        old = dict(sp.masks)
        if s<1 and not feasible(sp, s, context):
            with pytest.raises(ValueError, match='min_keep'): sp.sparsify_model(s)
            continue
        sp.sparsify_model(s)
        kept = {k: int(g.active(m).sum()) for (k,g),m in zip(sp.grans.items(), sp.masks.values())}
        if s==1: assert not any(kept.values())
        elif context=='local': assert kept=={k: max(1, g.n-round(s*g.n)) for k,g in sp.grans.items()}
        else:
            gone = total-sum(kept[k]*g.size for k,g in sp.grans.items())
            if context=='global': assert round(s*total)-max(g.size for g in sp.grans.values())<gone<=round(s*total)
            elif all(g.size==1 for g in sp.grans.values()): assert gone==round(s*total)
            assert min(kept.values())>=1
        for k,t in sp.targets.items(): assert int(sp.masks[k].sum())==kept[k]*sp.grans[k].size and not (sp.masks[k] & ~old[k]).any()
        check_held(sp)
    assert dtypes==[t.param.dtype for t in sp.targets.values()]

@examples(60)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 3), st.sampled_from([*granularity_names(), (0,), (2,1),
       *[o(*p) for o,*ps in [(Blocks, (1,1), (2,3)), (Grouped, ('in',1), ('out',1), ('in',2), ('out',3)), (NM, (1,1), (1,2))] for p in ps]]), SEEDS)
def test_expand_undoes_reduce(o, i, k, granularity, seed):
    "A weight that is constant in each unit comes back as it was, and units are all of one size"
    try: g = as_granularity(granularity, (o,i,k,k))
    except ValueError: assume(False)
    units = torch.from_numpy(np.random.default_rng(seed).integers(-9, 9, (g.rows, g.n))).double()
    w = g.expand(units)
    assert w.shape==(o,i,k,k) and torch.equal(g.reduce(w).reshape(g.rows, g.n), units)
    assert np.bincount(ids(g)).tolist()==[g.size]*(g.rows*g.n)

@examples(100)
@given(st.integers(0, 10**6), st.integers(0, 100))
def test_counts_are_nearest(n, percent):
    "Against whole numbers alone; an exact half may only go to a neighbour"
    k,r = divmod(n*percent, 100)
    assert n_pruned(n, percent/100) in ({k} if r<50 else {k+1} if r>50 else {k, k+1})
    assert n_kept(n, percent/100, 0)==n-n_pruned(n, percent/100)

def test_counts_of_every_percent():
    for n in range(201):
        counts = [n_pruned(n, p/100) for p in range(101)]
        assert counts==sorted(counts) and counts[0]==0 and counts[-1]==n and counts[50]==round(Fraction(n, 2))
        assert all(2*abs(100*c-n*p)<=100 for p,c in enumerate(counts))

@examples(60)
@given(st.lists(SHAPES.filter(lambda s: len(s)>1), min_size=1, max_size=5), st.floats(0, 1), st.booleans(), st.sampled_from([.5, 1., 2.]))
def test_er_densities_share_the_budget(shapes, s, kernel, power):
    "The weighted mean is what was asked, nothing passes 1, and among layers below 1 density over raw density is the same"
    d = list(er_densities(dict(enumerate(shapes)), s, kernel, power).values())
    n = [math.prod(o) for o in shapes]
    assert sum(a*b for a,b in zip(d, n))==pytest.approx(sum(n)-round(s*sum(n)), abs=1e-6) and all(-1e-12<=x<=1 for x in d)
    raw = [(sum(o)/math.prod(o))**power for t in shapes for o in [t if kernel else t[:2]]]
    eps = [x/r for x,r in zip(d, raw) if x<1]
    if eps: assert max(eps)-min(eps)<1e-9*max(1, max(eps)) and all(min(eps)*r>=1-1e-9 for x,r in zip(d, raw) if x==1)

@examples(60)
@given(SHAPES, st.floats(0, 1), SEEDS)
def test_bits_there_and_back(shape, share, seed):
    m = torch.from_numpy(np.random.default_rng(seed).random(shape)<share)
    packed = pack_bits(m)
    assert packed.dtype==torch.uint8 and packed.numel()==-(-m.numel()//8) and torch.equal(unpack_bits(packed, shape), m)
    assert [int(packed[i//8])>>i%8&1 for i in range(m.numel())]==m.flatten().int().tolist()

@quiet
@examples(40)
@given(st.floats(0, 1), st.floats(0, 1), SEEDS, VALUES)
def test_sparsity_that_falls(high, low, seed, kind):
    "Less than what is pruned brings back the difference, as zeros, and never takes a living weight"
    assume(low<high)
    net = nn.Sequential(nn.Linear(9, 7, bias=False))
    net[0].weight.data = values(kind, (7, 9), seed)
    sp = Sparsifier(net, layer_type=nn.Linear).sparsify_model(high)
    old,w = sp.masks['0.weight'],net[0].weight.detach().clone()
    sp.sparsify_model(low)
    assert int(sp.masks['0.weight'].sum())==max(1, 63-round(low*63)) and not (old & ~sp.masks['0.weight']).any() and torch.equal(net[0].weight, w)

@quiet
@examples(60)
@given(st.sampled_from([o for o in GRID if fits(*o) and o[1]!='layer' and not isinstance(o[1], (Grouped, NM))]), st.sampled_from(CONTEXTS), st.integers(0, 3),
       st.booleans(), st.lists(st.sampled_from([*LEVELS, .7, 1.]), min_size=2, max_size=5), SEEDS)
def test_up_and_down(cell, context, least, first, levels, seed):
    "Sparsity rises and falls at will, from random first masks or from none: each level is met as if it were the first, and what can stay does"
    net,rng = model_of(cell[0], seed),np.random.default_rng(seed)
    sp = Sparsifier(net, cell[1], context, min_keep=least, layer_type=nn.Module)
    g,total = sp.grans,sum(o.n*o.size for o in sp.grans.values())
    for i,s in enumerate(levels):
        old,most = dict(sp.masks),sum((o.n-min(o.n, least))*o.size for o in g.values())
        if context!='local' and s<1 and round(s*total)>most:
            with pytest.raises(ValueError, match=f'min_keep={least}'): sp.sparsify_model(s)
            continue
        sp.init_masks('random', sp.shares_of(s)) if first and not i else sp.sparsify_model(s)
        kept,was = [{k: int(o.active(m[k]).sum()) for k,o in g.items()} for m in (sp.masks, old)]
        gone,size = sum(int((~m).sum()) for m in sp.masks.values()),max(o.size for o in g.values())
        if s==1: assert gone==total
        elif context=='local': assert kept=={k: min(o.n, max(least, o.n-round(s*o.n))) for k,o in g.items()}
        elif context=='global': assert round(s*total)-size<gone<=round(s*total)
        elif size==1: assert gone==round(s*total)
        if s<1: assert all(kept[k]>=min(least, o.n) for k,o in g.items())
        for k,o in g.items(): assert int(sp.masks[k].sum())==kept[k]*o.size and int((sp.masks[k] & old[k]).sum())==min(kept[k], was[k])*o.size
        for p in net.parameters(): p.data += torch.from_numpy(rng.integers(-2, 3, p.shape))
        sp.apply_masks()
        check_held(sp)

# ---- many values: a threshold is found through a sample, and is that of a full sort

MANY = 4*2**15

def big(kind, n=MANY+1000, seed=0):
    "More values than are sorted directly"
    x = np.random.default_rng(seed).standard_normal(n)
    rare = np.where(np.arange(n)%9973==0, 1+np.abs(x), 0.)
    own = dict(rare=lambda: rare, sorted=lambda: np.sort(x), reverse=lambda: -np.sort(x), steps=lambda: np.arange(n)//(n//3)*1., neg_infinite=lambda: np.where(x<1, -np.inf, x))
    return torch.from_numpy((own[kind]() if kind in own else rounded(kind, x)).astype(np.float32))

@pytest.mark.parametrize('kind', [
    'normal', 'int4', 'bf16', 'constant', 'zeros', 'signed_zeros', 'infinite', 'neg_infinite', 'tiny', 'huge', 'rare', 'sorted', 'reverse', 'steps'])
def test_big_threshold(kind):
    "Every place where duplicates begin or end is hit, and both ends; the mask is that of a stable sort"
    x = big(kind)
    scores = [x[:70_001].view(-1, 1), x[70_001:70_001].view(0, 3), x[70_001:70_003], x[70_003:].clone()]
    n = x.numel()
    order = np.argsort(-x.numpy(), kind='stable')
    ranked = x.numpy()[order]
    edges = np.flatnonzero(ranked[1:]!=ranked[:-1])+1
    ks = {1, 2, n//100, n//3, n//2, 9*n//10, n-1, n, *[int(e)+d for e in edges[::max(1, len(edges)//3)][:3] for d in (0, 1)]}
    for k in ks:
        assert kth_largest(scores, k)==ranked[k-1]
        keep = np.zeros(n, bool)
        keep[order[:k]] = True
        assert np.array_equal(np.concatenate([m.numpy().ravel() for m in topk_masks(scores, k)]), keep), k

@pytest.mark.parametrize('context', ['local', 'global'])
@pytest.mark.parametrize('kind', ['int4', 'normal'])
def test_big_layers(kind, context):
    "Two layers, updated as sparsity rises: what stays is what a stable sort of all, or of each, keeps"
    net = nn.Sequential(nn.Linear(500, 300, bias=False), nn.Linear(400, 350, bias=False))
    for i,m in enumerate(net): m.weight.data = big(kind, m.weight.numel(), i).view_as(m.weight)
    w = [m.weight.detach().abs().numpy().ravel() for m in net]
    sp = Sparsifier(net, context=context, layer_type=nn.Linear)
    for s in (.29, .9, .99):
        sp.sparsify_model(s)
        pools = [np.concatenate(w)] if context=='global' else w
        keep = [np.zeros(p.size, bool) for p in pools]
        for p,k in zip(pools, keep): k[np.argsort(-p, kind='stable')[:p.size-round(s*p.size)]] = True
        assert np.array_equal(np.concatenate(keep), np.concatenate([m.numpy().ravel() for m in sp.masks.values()])), s
    check_held(sp)

@pytest.mark.parametrize('dtype', INTS, ids=str)
def test_zero_in_pieces(dtype):
    "Tensors longer than a piece, NaN, infinities and minus zero: kept bits stay as they are, the others become those of +0.0"
    t = torch.tensor([1., -2., math.nan, math.inf, -math.inf, -0., 3e-5]).to(dtype).repeat(80_001)
    m = torch.from_numpy(np.random.default_rng(0).random(t.numel())<.5)
    want = np.where(m.numpy(), bits(t), 0)
    assert zero_(t, m) is t and np.array_equal(bits(t), want) and t.numel()>2**19
