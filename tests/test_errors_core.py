"What a caller can get wrong in the core: refused before a weight changes, with the value and what to do instead"
import copy, math, re, warnings
from contextlib import contextmanager
import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.utils.prune as torch_prune
from torch.nn.utils import parametrizations, parametrize, spectral_norm, weight_norm
from sparsify.context import Units, as_context, erk, global_, uniform_compensated
from sparsify.criteria import check_criterion, large_final, movement, needs, score
from sparsify.granularity import Blocks, Grouped, NM, add_granularity, as_granularity, check_granularity
from sparsify.masks import as_init, drop, grow, kth_largest, n_kept, n_pruned, nm_mask, topk_mask, topk_masks, unpack_bits, zero_
from sparsify.sparsifier import Masks, Sparsifier
from sparsify.targets import as_fraction, find_targets, spread

NAN = math.nan

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(4,8,3), nn.BatchNorm2d(8), nn.Conv2d(8,8,3), nn.Flatten(), nn.Linear(8,10))

def bits(model): return {k: v.numpy().tobytes() for k,v in model.state_dict().items()}

def short(o): return re.sub(r' at 0x\w+', '', str(o))[:60]

def says(e, words):
    "Every word is in the message"
    for w in words if isinstance(words, tuple) else (words,): assert re.search(w, str(e.value)), f'{w!r} is not in: {e.value}'

@contextmanager
def refused(model, error, words, sp=None):
    "The block raises `error` with all `words`, and neither weights nor masks, counters, memory or references have changed"
    look = lambda: (bits(model), sp and ({k: m.clone().numpy().tobytes() for k,m in sp.masks.items()}, sp.updates, sp.seed, dict(sp.memory), sp.round_to,
                    sp.context, sp.min_keep, {(n, k): r.numpy().tobytes() for n,v in sp.refs.items() for k,r in v.items()}))
    before = look()
    with pytest.raises(error) as e: yield
    says(e, words)
    assert look()==before

# ---- masks

@pytest.mark.parametrize('call,words', [
    (lambda: n_pruned(10, 1.5), ('1.5', 'fraction in')), (lambda: n_pruned(10, -.1), ('-0.1', 'fraction in')),
    (lambda: n_pruned(10, NAN), ('nan', 'fraction in')), (lambda: n_pruned(10, math.inf), 'inf'), (lambda: n_pruned(-3, .5), ('-3', '0 or more')),
    (lambda: n_kept(8, .5, 1, 0), ('round_to is 0', '1 or more')), (lambda: n_kept(8, .5, 1, -4), 'round_to is -4'),
    (lambda: n_kept(8, .5, 1, 2.), 'round_to is 2.0'), (lambda: n_kept(8, .5, 1, True), 'round_to is True'), (lambda: n_kept(8, 2), '2'),
    (lambda: topk_mask(torch.ones(8), 9), ('n_keep is 9', 'from 0 to 8', 'n_kept')), (lambda: topk_mask(torch.ones(8), -1), 'n_keep is -1'),
    (lambda: topk_mask(torch.ones(8), 2.), 'n_keep is 2.0'), (lambda: topk_mask(torch.ones(8), True), 'n_keep is True'),
    (lambda: topk_mask(torch.ones(2,4), 5, dim=-1), ('n_keep is 5', 'from 0 to 4')), (lambda: topk_masks([torch.ones(3), torch.ones(2)], 6), 'from 0 to 5'),
    (lambda: topk_mask(torch.tensor([1.,NAN,NAN]), 1), ('2 of 3 scores are NaN', 'Look for NaN')),
    (lambda: topk_mask(torch.full((2,2), NAN), 1, dim=-1), '4 of 4'), (lambda: kth_largest([torch.ones(3)], 0), ('k is 0', 'from 1 to 3')),
    (lambda: kth_largest([torch.ones(3)], 4), 'k is 4'), (lambda: kth_largest([], 1), 'k is 1'),
    (lambda: drop(torch.ones(3), torch.ones(4, dtype=torch.bool), 1), (r'\(3,\)', r'\(4,\)')), (lambda: drop(torch.ones(3), torch.ones(3), 1), 'bool mask'),
    (lambda: drop(torch.ones(3), torch.ones(3, dtype=torch.bool), 4), 'n_keep is 4'),
    (lambda: drop(torch.tensor([1.,NAN]), torch.tensor([True,True]), 1), 'NaN'), (lambda: grow(torch.ones(3), torch.ones(3), 1), 'bool mask'),
    (lambda: grow(torch.ones(3), torch.zeros(3, dtype=torch.bool), -1), 'n_keep is -1'),
    (lambda: grow(torch.ones(2,3), torch.zeros(2,3, dtype=torch.bool), 4, dim=-1), ('n_keep is 4', 'from 0 to 3')),
    (lambda: nm_mask(torch.ones(8,3), 2, 4), ('3 entries', '4 does not divide')), (lambda: nm_mask(torch.ones(8,4), 5, 4), '5:4'),
    (lambda: nm_mask(torch.ones(8,4), -1, 4), '-1:4'), (lambda: nm_mask(torch.ones(8,4), 0, 0), '0:0'),
    (lambda: as_init('zzz'), ("'zzz'", 'random, topk, from_zeros, checkerboard')), (lambda: as_init(3), '3'),
    (lambda: as_init(lambda w,s,shaper=None,device=None: torch.ones(3))(torch.ones(2,2), .5), (r'\(3,\)', r'\(2, 2\)')),
    (lambda: unpack_bits(torch.zeros(2, dtype=torch.uint8), (17,)), ('2 values', '3 bytes')),
    (lambda: unpack_bits(torch.zeros(2), (16,)), ('float32', '2 bytes')),
    (lambda: zero_(torch.ones(3), torch.ones(4, dtype=torch.bool)), (r'\(4,\)', r'\(3,\)'))],
    ids=lambda o: None if callable(o) else str(o[0] if isinstance(o, tuple) else o))
def test_masks(call, words):
    with pytest.raises(ValueError) as e: call()
    says(e, words)

def test_first_mask_that_is_no_tensor():
    with pytest.raises(TypeError, match='list.*bool tensor is needed'): as_init(lambda w,s,shaper=None,device=None: [True])(torch.ones(1), .5)

def test_what_is_refused_is_not_zeroed():
    t = torch.ones(3)
    with pytest.raises(ValueError): zero_(t, torch.zeros(4, dtype=torch.bool))
    assert t.tolist()==[1,1,1]

# ---- granularity

@pytest.mark.parametrize('call,error,words', [
    (lambda: as_granularity('fliter', (2,2,3,3)), ValueError, ("'fliter'", "did you mean 'filter'", 'kernel')),
    (lambda: as_granularity('zzz', (2,2,3,3)), ValueError, ("'zzz'", 'weight, .*kernel')),
    (lambda: as_granularity('filter', (2,2), nn.Linear(2,2)), ValueError, ('a Linear has no granularity', 'weight, column, row, layer')),
    (lambda: as_granularity('plane', (2,2,3,3), nn.Conv2d(2,2,3)), ValueError, 'a Conv2d'),
    (lambda: as_granularity('row', (2,)*6), ValueError, ('6 dimensions', 'weight, layer')),
    (lambda: as_granularity(5, (2,2)), TypeError, ('5', 'a tuple of dimensions')), (lambda: as_granularity(None, (2,2)), TypeError, 'None'),
    *[(lambda d=d: as_granularity(d, (2,3)), ValueError, (re.escape(str(d)), r'\(2, 3\)', 'from 0 to 1')) for d in ((2,), (-1,), (0,0), (True,), (0.,), ('a',))],
    (lambda: Blocks(0,1), ValueError, '0x1'), (lambda: Blocks(2,1.5), ValueError, '2x1.5'), (lambda: Blocks(True,1), ValueError, 'Truex1'),
    (lambda: Blocks(3,2).bind((2,4)), ValueError, ('3x2', r'\(2, 4\)', 'divide')), (lambda: Blocks(1,1).bind((4,)), ValueError, r'\(4,\)'),
    (lambda: Grouped('up', 2), ValueError, ("'up'", "'in' or 'out'")), (lambda: Grouped('in', 0), ValueError, ('0', '1 or more')),
    (lambda: Grouped('in', 2.), ValueError, '2.0'), (lambda: Grouped('in', True), ValueError, 'True'),
    (lambda: Grouped('in', 3).bind((3,4)), ValueError, '3 does not divide dimension 1'),
    (lambda: Grouped('out', 4).bind((3,4)), ValueError, '4 does not divide dimension 0'),
    (lambda: Grouped('in', 3).bind((4,3), nn.ConvTranspose1d(4,3,1)), ValueError, '3 does not divide dimension 0'),
    (lambda: Grouped('in', 1).bind((4,)), ValueError, 'dimension 1'), (lambda: NM(3,2), ValueError, ('3:2', '0 < N <= M')),
    (lambda: NM(0,4), ValueError, '0:4'), (lambda: NM(2.,4), ValueError, '2.0:4'), (lambda: NM(2,True), ValueError, '2:True'),
    (lambda: NM(2,4).bind((8,3,3,3)), ValueError, '4 does not divide dimension 1'),
    (lambda: add_granularity('row', {nn.Conv2d: (0,)}), ValueError, ("'row'", 'new name')),
    (lambda: add_granularity('vector', {nn.Conv2d: (0,)}), ValueError, "'vector'"), (lambda: add_granularity(3, {nn.Conv2d: (0,)}), ValueError, '3'),
    (lambda: add_granularity('new', {}), TypeError, 'dict of layer types'),
    (lambda: add_granularity('new', {'conv': (0,)}), TypeError, ("'conv'", r'nn\.Conv2d')),
    (lambda: add_granularity('new', [(0,)]), TypeError, 'dict of layer types'), (lambda: check_granularity('kernal'), ValueError, "did you mean 'kernel'"),
    (lambda: check_granularity(2), TypeError, '2'),
    (lambda: as_granularity('filter', (1,2,3,3)).reduce(torch.ones(1,2,3,3), 'median'), ValueError, ("'median'", 'mean, sum, max'))])
def test_granularity(call, error, words):
    with pytest.raises(error) as e: call()
    says(e, words)

# ---- criteria

@pytest.mark.parametrize('call,error,words', [
    (lambda: needs('gradient'), ValueError, ("'gradient'", 'init, previous')),
    (lambda: check_criterion('large_final'), TypeError, ("'large_final'", 'such as large_final')), (lambda: check_criterion(None), TypeError, 'None'),
    (lambda: score(lambda w: 3., torch.ones(2)), TypeError, ('float', 'tensor of scores')),
    (lambda: score(lambda w: None, torch.ones(2)), TypeError, 'NoneType'), (lambda: score(lambda w: w.numpy(), torch.ones(2)), TypeError, 'ndarray'),
    (lambda: score(lambda w: w.sum(), torch.ones(2)), ValueError, (r'\(\)', r'\(2,\)')),
    (lambda: score(lambda w: w.flatten(), torch.ones(2,2)), ValueError, (r'\(4,\)', r'\(2, 2\)'))])
def test_criteria(call, error, words):
    with pytest.raises(error) as e: call()
    says(e, words)

def test_criterion_that_wants_too_much():
    f = lambda w: w
    f.needs = 'hessian'
    with pytest.raises(ValueError, match="'hessian'.*init, previous, generator"): check_criterion(f)

# ---- context

def units(**shapes): return {k: Units(k, s, math.prod(s), 1, 1, math.prod(s), lambda: torch.arange(1.*math.prod(s))) for k,s in shapes.items()}

@pytest.mark.parametrize('call,words', [
    (lambda: as_context('globl'), ("'globl'", "did you mean 'global'", 'local, global, uniform, uniform_compensated, er, erk')),
    (lambda: as_context('zzz'), ("'zzz'", 'local, global, uniform, uniform_compensated, er, erk')), (lambda: as_context(None), ('None', 'local')), (lambda: as_context(5), '5'),
    (lambda: global_(units(a=(4,), b=(4,)), {'a': .5, 'b': .4}), (r'0\.4, 0\.5', "context='local'")),
    (lambda: global_.check(units(a=(4,), b=(4,)), {'a': .9, 'b': .9}), ('0.9', '7 of 8', 'only 6', '0.75 at most', 'min_keep=0')),
    (lambda: global_(units(a=(4,)), {'a': .5}, 1, 2), ('round_to', "context='local'")),
    (lambda: erk(units(a=(4,2), b=(4,3)), {'a': .5, 'b': .5}, 1, 2), ('round_to', "context='local'")),
    (lambda: uniform_compensated(units(a=(8,), b=(4,)), {'a': .5, 'b': .5}), ("'a'", '8 of 12', 'leaves 6', '0.2500 at most', "'erk'")),
    (lambda: erk.check(units(a=(2,2), b=(2,2)), {'a': .99, 'b': .99}), ('8 of 8', '0.75 at most'))])
def test_context(call, words):
    with pytest.raises(ValueError) as e: call()
    says(e, words)

# ---- targets

@pytest.mark.parametrize('x', [150, -10, -1e-9, 100.001, NAN, math.inf, -math.inf])
def test_fraction_out_of_range(x):
    with pytest.raises(ValueError, match=f'warmth is {re.escape(str(x))}.*0.9 for 90 %'): as_fraction(x, 'warmth')

@pytest.mark.parametrize('x', [True, np.True_, 'a', '0.5', None, [.5], 1j, torch.tensor(.5)], ids=repr)
def test_fraction_that_is_no_number(x):
    with pytest.raises(TypeError, match=f'{re.escape(repr(x))}.*a number is needed'): as_fraction(x)

@pytest.mark.parametrize('kwargs,error,words', [
    (dict(layer_type=nn.LSTM), ValueError, ('no LSTM layer', r"Conv2d \('0', '2'\)", r'layer_type=nn\.Conv2d')),
    (dict(layer_type='zzz'), ValueError, ("'zzz'", 'Layers with weights: 0, 2, 4')), (dict(layer_type='0.wieght'), ValueError, "Near names: '0.weight'"),
    (dict(layer_type='re:('), ValueError, (r"'re:\('", 'not a regular expression')), (dict(layer_type='re:zz'), ValueError, "'re:zz' matches no weight"),
    (dict(layer_type='zz*'), ValueError, r"'zz\*' matches no weight"), (dict(layer_type='1'), ValueError, "'1' matches no weight"),
    (dict(layer_type=lambda n,p: False), ValueError, 'matches no weight'), (dict(layer_type=None), TypeError, ('None', r'nn\.Conv2d')),
    (dict(layer_type=int), TypeError, 'int'), (dict(layer_type=[nn.Conv2d, 3]), TypeError, '3'), (dict(layer_type=[]), ValueError, 'empty'),
    (dict(exclude='zzz'), ValueError, ('exclude', "'zzz'", 'Layers with weights')), (dict(exclude=5), TypeError, '5'),
    (dict(exclude='0.wieght'), ValueError, "exclude.*'0.weight'"), (dict(within=nn.Conv2d(1,1,1)), ValueError, ('Conv2d', 'submodule')),
    (dict(sparsity={}), ValueError, 'empty dict'), (dict(sparsity={'zzz': .5}), ValueError, "'zzz' matches no weight"),
    (dict(sparsity={'0': .5, '2.wieght': .5}), ValueError, "Near names: .*'2.weight'"),
    (dict(sparsity={'0': 150}), ValueError, ("sparsity of '0' is 150", '0.9 for 90 %')), (dict(sparsity={'0': 'a'}), TypeError, "sparsity of '0' is 'a'"),
    (dict(sparsity={'0': None}), TypeError, 'None'), (dict(sparsity={'0': True}), TypeError, 'True'), (dict(sparsity=150), ValueError, '150'),
    (dict(sparsity=NAN), ValueError, 'nan'), (dict(sparsity='a'), TypeError, "'a'"), (dict(sparsity=[.5]), TypeError, r'\[0.5\]')], ids=short)
def test_targets(kwargs, error, words):
    model = net()
    for make in (lambda: Sparsifier(model, **kwargs), lambda: spread(**{'sparsity': None, 'model': model, **kwargs})):
        with refused(model, error, words): make()

@pytest.mark.parametrize('model,words', [
    (lambda: nn.Sequential(nn.ReLU()), ('no Conv2d layer', 'Sequential has no weights')),
    (lambda: nn.Sequential(nn.Linear(2,2)), ('no Conv2d layer', r"Linear \('0'\)", r'layer_type=nn\.Linear')),
    (lambda: nn.LayerNorm(4), 'LayerNorm has no weights')])
def test_nothing_matches_by_default(model, words):
    with pytest.raises(ValueError) as e: Sparsifier(model())
    says(e, words)

def test_container_of_other_types():
    "A container that holds none of the type says what it holds"
    model = nn.ModuleDict(dict(head=nn.Sequential(nn.Linear(4,4), nn.Embedding(3,4)), conv=nn.Conv2d(1,2,3)))
    with refused(model, ValueError, ("'head' holds no Conv2d", r"Linear \('head.0'\)", 'layer_type')): Sparsifier(model, sparsity={'head': .5})

class Odd(nn.Module):
    "Parameters that cannot be sparse, and one that can"
    def __init__(self):
        super().__init__()
        self.scalar,self.empty,self.w = nn.Parameter(torch.tensor(2.)),nn.Parameter(torch.zeros(0,3)),nn.Parameter(torch.randn(3,3))
        self.complex,self.whole = nn.Parameter(torch.ones(2,2, dtype=torch.complex64)),nn.Parameter(torch.ones(3,3, dtype=torch.int32), requires_grad=False)

@pytest.mark.parametrize('name,words', dict(
    scalar='single unit', empty='empty', complex=('complex64', 'floating'), whole=('int32', 'floating'), nothing='matches no weight').items())
def test_parameters_that_cannot_be_sparse(name, words):
    "Refused when named, else skipped with one warning that names them all"
    model = Odd()
    with refused(model, ValueError, words): Sparsifier(model, layer_type=name)
    with pytest.warns(UserWarning, match='not pruned: empty: .*; complex: .*; whole: .*; scalar: ') as seen: sp = Sparsifier(model, layer_type=lambda n,p: True)
    assert len(seen)==1 and list(sp.masks)==['w']

@pytest.mark.parametrize('wrap,words', [
    (lambda l: weight_norm(l), 'remove_weight_norm'), (lambda l: spectral_norm(l), 'remove_spectral_norm'),
    (lambda l: torch_prune.l1_unstructured(l, 'weight', .5), r'prune\.remove'), (lambda l: parametrizations.weight_norm(l), 'remove_parametrizations'),
    (lambda l: parametrizations.spectral_norm(l), 'remove_parametrizations'),
    (lambda l: parametrize.register_parametrization(l, 'weight', nn.Identity()), 'remove_parametrizations'),
    (lambda l: nn.LazyLinear(4), 'run a batch through')],
    ids=['weight_norm', 'spectral_norm', 'prune', 'new_weight_norm', 'new_spectral_norm', 'parametrization', 'lazy'])
@pytest.mark.filterwarnings('ignore:.*weight_norm', 'ignore:.*spectral_norm', 'ignore:Lazy')
def test_weights_that_are_computed(wrap, words):
    "Skipped by name among others, refused when named or alone, with what to do first"
    model = nn.Sequential(nn.Linear(4,4), wrap(nn.Linear(4,4)))
    with pytest.raises(ValueError) as e: Sparsifier(model, layer_type='1')
    says(e, words)
    with pytest.raises(ValueError, match='nothing is left'): Sparsifier(nn.Sequential(model[1]), layer_type=nn.Linear)
    with pytest.warns(UserWarning, match='not pruned: .*1.weight'): assert list(Sparsifier(model, layer_type=nn.Linear).masks)==['0.weight']

# ---- the sparsifier is made

@pytest.mark.parametrize('kwargs,error,words', [
    (dict(granularity='zzz'), ValueError, ("'zzz'", 'filter')), (dict(granularity='fliter'), ValueError, "did you mean 'filter'"),
    (dict(granularity='plane'), ValueError, ('0.weight', 'a Conv2d has no')), (dict(granularity=5), TypeError, '5'),
    (dict(granularity=None), TypeError, 'None'), (dict(granularity='filter', layer_type=nn.Linear), ValueError, ('4.weight', 'a Linear has no', 'row')),
    (dict(granularity=(0,9)), ValueError, ('nothing is left', r'\(0, 9\)', 'from 0 to 3')), (dict(granularity=(0,1,2,3)), ValueError, 'single unit'),
    (dict(granularity=Blocks(3,3)), ValueError, ('nothing is left', '3x3')),
    (dict(granularity=Grouped('in', 3), layer_type='0'), ValueError, ('0.weight', '3 does not divide dimension 1')),
    (dict(granularity='layer'), ValueError, ("'layer'", "context='global'")), (dict(granularity='layer', context='erk'), ValueError, "context='global'"),
    (dict(context='zzz'), ValueError, ("'zzz'", 'local, global, uniform, uniform_compensated, er, erk')), (dict(context='Global'), ValueError, ("'Global'", "did you mean 'global'")),
    (dict(context=None), ValueError, 'None'), (dict(criteria='large_final'), TypeError, ("'large_final'", 'a function')),
    (dict(criteria=None), TypeError, 'None'), (dict(nm=5), TypeError, ('nm is 5', 'True')), (dict(nm='2:4'), TypeError, "'2:4'"),
    (dict(nm=True, granularity='filter'), ValueError, ('nm=True', "'filter'")), (dict(nm=True, layer_type=nn.LSTM), ValueError, 'no LSTM'),
    (dict(min_keep=-1), ValueError, ('min_keep is -1', '0 or more')), (dict(min_keep=1.5), ValueError, '1.5'), (dict(min_keep=True), ValueError, 'True'),
    (dict(min_keep=None), ValueError, 'None'), (dict(sparsity={'0': .5}, context='global'), ValueError, "context='local' with a dict")], ids=short)
def test_sparsifier(kwargs, error, words):
    model = net()
    with refused(model, error, words): Sparsifier(model, **kwargs)

# ---- a sparsity that cannot be had

@pytest.mark.parametrize('kwargs,ask,error,words', [
    *[({}, x, ValueError, (f'sparsity is {x}', '0.9 for 90 %')) for x in (150, -.5, NAN, math.inf)],
    *[({}, x, TypeError, 'a number is needed') for x in (True, 'half', None, [.5])], ({}, {}, ValueError, 'empty dict'),
    ({}, {'zzz': .5}, ValueError, "'zzz' matches no weight"), ({}, {'0.wieght': .5}, ValueError, "Near names: '0.weight'"),
    ({}, {'0': 150}, ValueError, "sparsity of '0' is 150"), ({}, {'4': .5}, ValueError, ("'4.weight' is no target", '0.weight, 2.weight')),
    (dict(context='global'), {'0': .5}, ValueError, "context='local' with a dict"),
    (dict(context='global'), .9999, ValueError, ('0.9999', '864 of 864', 'min_keep=1', '0.9976 at most')),
    (dict(context='erk'), .9999, ValueError, '0.9976 at most'),
    (dict(context='global', granularity='filter'), .95, ValueError, ('0.95', '0.875 at most', 'min_keep=0')),
    (dict(context='uniform_compensated'), {'0': .5, '2': .6}, ValueError, "context='local'"),
    (dict(context='global', nm=True), .5, ValueError, ('balanced groups', "context='local'")),
    (dict(context='global', granularity=Grouped('in', 2)), .5, ValueError, ('0.weight', 'balanced groups')),
    (dict(context='global', round_to=2), .5, ValueError, ('round_to', "context='local'")), (dict(round_to=0), .5, ValueError, 'round_to is 0'),
    (dict(round_to=2.5), .5, ValueError, 'round_to is 2.5'), (dict(granularity='filter', reduce='median'), .5, ValueError, ("'median'", 'mean, sum, max')),
    (dict(context=lambda u,s,*a: {k: 2.5 for k in u}), .5, ValueError, ('n_keep is 2.5', 'whole number')),
    (dict(context=lambda u,s,*a: {k: 10**6 for k in u}), .5, ValueError, 'n_keep is 1000000'),
    (dict(criteria=lambda w: w.sum()), .5, ValueError, (r'\(\)', r'\(8, 4, 3, 3\)')), (dict(criteria=lambda w: 1.), .5, TypeError, 'float'),
    (dict(criteria=lambda w: w*NAN), .5, ValueError, ('0.weight', '288 of 288 scores are NaN', 'criterion')),
    (dict(criteria=lambda w: w*NAN, context='global', granularity='kernel'), .5, ValueError, ('0.weight', 'NaN')),
    (dict(criteria=lambda w: 1/0), .5, ZeroDivisionError, 'division')], ids=short)
@pytest.mark.parametrize('start', [0, .25])
def test_sparsify_model(kwargs, ask, error, words, start):
    "Whether nothing or a quarter is pruned already: no weight, mask, reference or counter moves"
    model,kwargs = net(),dict(kwargs)
    broken = {k: kwargs.pop(k) for k in ('criteria', 'round_to', 'reduce', 'context') if k in kwargs and (k!='context' or callable(kwargs[k]))}
    sp = Sparsifier(model, **kwargs)
    if start and not isinstance(sp.granularity, (NM, Grouped)): sp.sparsify_model(start)
    for k,v in broken.items(): setattr(sp, k, v)
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', '2:4 leaves')
        with refused(model, error, words, sp): sp.sparsify_model(ask)

@pytest.mark.parametrize('granularity,context', [
    ('weight','local'), ('weight','global'), ('filter','local'), ('filter','global'), (NM(2,4),'local')], ids=short)
@pytest.mark.filterwarnings('ignore:.*leaves')
def test_nan_in_the_last_layer(granularity, context):
    "The layer is named, and layers before it have lost nothing"
    model = net()
    model[2].weight.data[3,1,0,0] = NAN
    sp = Sparsifier(model, granularity, context)
    with refused(model, ValueError, ('2.weight', '1 of 576 scores are NaN', '1 of its weights'), sp): sp.sparsify_model(.5)
    model[2].weight.data[3,1,0,0] = 1.
    assert sp.sparsify_model(.5).sparsity==.5

def test_criterion_that_fails_at_the_second_layer():
    model = net()
    def f(w):
        if w.shape[1]==8: raise KeyError('second')
        return w.abs()
    for context in ('local', 'global'):
        sp = Sparsifier(model, context=context, criteria=f)
        with refused(model, KeyError, 'second', sp): sp.sparsify_model(.5)

@pytest.mark.parametrize('layer,words', [
    ('zzz', ("'zzz'", '0.weight, 2.weight')), ('4', "'4' is no target"), (5, '5 is no target'), (nn.Conv2d(1,1,1), 'is no target')], ids=short)
def test_sparsify_layer(layer, words):
    model = net()
    sp = Sparsifier(model, context='global')
    with refused(model, ValueError, words, sp): sp.sparsify_layer(layer, .5)
    for s in (150, NAN, -1):
        with refused(model, ValueError, str(s), sp): sp.sparsify_layer('0', s)
    with refused(model, TypeError, "'a'", sp): sp.sparsify_layer('0', 'a')

@pytest.mark.parametrize('init,error,words', [
    ('zzz', ValueError, ("'zzz'", 'from_zeros')), (3, ValueError, '3'), (lambda w,s,shaper=None,device=None: [1], TypeError, 'list'),
    (lambda w,s,shaper=None,device=None: w[0]>0, ValueError, r'\(4, 3, 3\).*\(8, 4, 3, 3\)'),
    (lambda w,s,shaper=None,device=None: 1/0 if w.shape[1]==8 else w>0, ZeroDivisionError, 'division')])
def test_init_masks(init, error, words):
    model = net()
    sp = Sparsifier(model)
    with refused(model, error, words, sp): sp.init_masks(init, sp.shares_of(.5))

# ---- masks and state from outside

@pytest.mark.parametrize('name,mask,error,words', [
    ('zzz', torch.ones(8,4,3,3, dtype=torch.bool), KeyError, ('zzz', '0.weight, 2.weight')),
    ('0.weight', torch.ones(8,4,3, dtype=torch.bool), ValueError, ('0.weight', r'\(8, 4, 3, 3\)')),
    ('0.weight', torch.ones(8,4,3,3), ValueError, 'bool tensor'), ('0.weight', [True], ValueError, 'bool tensor'),
    ('0.weight', None, ValueError, 'bool tensor')], ids=short)
def test_masks_at_the_door(name, mask, error, words):
    model = net()
    sp = Sparsifier(model)
    with refused(model, error, words, sp): sp.masks[name] = mask
    with refused(model, error, words, sp): sp.set_masks({name: mask})
    assert isinstance(sp.masks, Masks) and name in ('zzz', *sp.masks)

@pytest.mark.parametrize('change,words', [
    (lambda s: None, 'no state'), (lambda s: {}, 'no state'), (lambda s: {**s, 'version': 2}, 'version 1'),
    (lambda s: {**s, 'masks': {}}, ('other parameters', '0.weight, 2.weight')),
    (lambda s: {**s, 'masks': {**s['masks'], '7.weight': s['masks']['0.weight']}}, ('7.weight is on one side only')),
    (lambda s: {**s, 'masks': {k: s['masks']['0.weight'] for k in s['masks']}}, ("'2.weight'", r'\(8, 4, 3, 3\)', r'\(8, 8, 3, 3\)')),
    (lambda s: {**s, 'masks': {k: dict(v, bits=v['bits'][:-1]) for k,v in s['masks'].items()}}, '35 values.*36 bytes'),
    (lambda s: {**s, 'masks': {k: dict(v, bits=v['bits'].int()) for k,v in s['masks'].items()}}, 'int32'),
    (lambda s: {**s, 'refs': {}}, ("remembers nothing", "'init'")), (lambda s: {**s, 'refs': {**s['refs'], 'previous': s['refs']['init']}}, 'previous')])
def test_load_state_dict(change, words):
    model = net()
    state = Sparsifier(net(), criteria=movement).sparsify_model(.75).state_dict()
    sp = Sparsifier(model, criteria=movement).sparsify_model(.25)
    with refused(model, ValueError, words, sp): sp.load_state_dict(change(copy.copy(state)))
    sp.load_state_dict(state)
    assert sp.sparsity==.75

def test_state_of_another_model():
    model = net()
    sp = Sparsifier(model).sparsify_model(.25)
    other = Sparsifier(nn.Sequential(nn.Linear(4,4)), layer_type=nn.Linear).state_dict()
    with refused(model, ValueError, '0.weight|2.weight', sp): sp.load_state_dict(other)

@pytest.mark.parametrize('kind', ['on_mask', 'on_target'])
def test_hooks(kind):
    sp = Sparsifier(net())
    for hook in (3, None, 'x'):
        with pytest.raises(TypeError, match=f'{hook!r}.*a function'): getattr(sp, kind)(hook)

def test_hook_that_raises():
    "The masks are in place and applied when hooks are called: what a hook raises leaves a network that holds"
    model = net()
    sp = Sparsifier(model)
    handle = sp.on_mask(lambda *a: 1/0)
    with pytest.raises(ZeroDivisionError): sp.sparsify_model(.5)
    assert sp.sparsity==.5 and [int((model[i].weight==0).sum()) for i in (0,2)]==[144,288]
    handle.remove()
    assert sp.sparsify_model(.75).sparsity==.75

def test_nothing_left_is_a_warning():
    model = net()
    with pytest.warns(UserWarning, match='nothing is left of 0, 2'): Sparsifier(model).sparsify_model(1.)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        Sparsifier(net()).sparsify_model(.99)

def test_percentages_warn_once_each():
    for ask in (50, {'0': 50}):
        with pytest.warns(FutureWarning, match='50') as seen: sp = Sparsifier(net()).sparsify_model(ask)
        assert len(seen)==1 and int((sp.model[0].weight==0).sum())==144

def test_find_targets_says_what_it_skipped():
    targets,skipped = find_targets(Odd(), layer_type=[Odd])
    assert list(targets)==['w'] and set(skipped)=={'empty','complex','whole'} and large_final(targets['w'].param).shape==(3,3)
