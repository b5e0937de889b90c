"The pruning functions of torch row by row (T-01..T-92), against torch's own, both ways across, masks as files, and faults at every step."
import copy
import io
import pickle
import sys
import warnings

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.utils.prune as TP
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

import sparsify.prune as P
from helpers import datasets, learner, net, quiet, same, snapshot
from sparsify.algorithm import Static
from sparsify.callback import SparsifyCallback
from sparsify.criteria import movement
from sparsify.sparsifier import Sparsifier

INF = float('inf')
fast = settings(max_examples=60, deadline=None, derandomize=True)


def linear(values=((1, 2, 3, 4), (-4, -3, -2, -1))):
    "A Linear layer without a bias, with these weights"
    w = tensor(values, dtype=torch.float32)
    m = nn.Linear(w.shape[1], w.shape[0], bias=False)
    m.weight.data.copy_(w)
    return m


def state(m):
    "All that `apply` and `remove` may not leave half changed, by identity, with the order"
    return ([(n, id(o), list(o._parameters.items()), list(o._buffers.items()), list(o._forward_pre_hooks.items()), set(o._non_persistent_buffers_set),
              {k: v for k, v in vars(o).items() if not isinstance(v, (dict, list, set))}, [id(p) for p in vars(o).get('_flat_weights', ())],
              [list(h) for h in o._forward_pre_hooks.values() if isinstance(h, TP.PruningContainer)]) for n, o in m.named_modules()],
            {k: v.nan_to_num(99) for k, v in m.state_dict().items()})


def unchanged(before, m):
    now = state(m)
    for (n, *a), (_, *b) in zip(before[0], now[0]):
        for x, y in zip(a, b):
            if isinstance(x, dict): assert x.keys() == y.keys() and all(x[k] is y[k] or x[k] == y[k] for k in x), n
            else: assert repr(x) == repr(y) if not isinstance(x, list) else len(x) == len(y) and all(
                p is q or isinstance(p, (int, list)) and p == q or isinstance(p, tuple) and p[0] == q[0] and p[1] is q[1] for p, q in zip(x, y)), n
    assert same(before[1], now[1])


METHODS = {'Identity': (), 'L1Unstructured': (2,), 'LnStructured': (1, 2, 0), 'RandomStructured': (1, 0), 'RandomUnstructured': (2,),
           'CustomFromMask': (tensor([[0., 1, 1], [1, 0, 1]]),), 'PruningContainer': None}


def made(name):
    "A method of this class, by itself"
    if name == 'PruningContainer': return P.PruningContainer(P.L1Unstructured(2))
    return getattr(P, name)(*METHODS[name])


def applied(name):
    "A module that this class prunes, and what `apply` returned"
    m = nn.Linear(3, 2)
    if name == 'PruningContainer': return m, P.PruningContainer.apply(m, 'weight', P.L1Unstructured(2))
    return m, getattr(P, name).apply(m, 'weight', *METHODS[name])


# ---- A. functions

@pytest.mark.parametrize('f', [P.compute_nparams_to_prune, P._compute_nparams_toprune])
def test_T01_int_amount(f): assert [f(*o) for o in ((10, 15), (1, 15), (0, 15))] == [10, 1, 0]


@pytest.mark.parametrize('amount,n,want', [(.4, 17, 7), (1.0, 15, 15), (.5, 5, 2), (.35, 10, 4), (0., 3, 0), (np.float32(.5), 7, 4)])
def test_T02_float_amount(amount, n, want): assert P.compute_nparams_to_prune(amount, n) == want


@pytest.mark.parametrize('f', [P.validate_pruning_amount, P._validate_pruning_amount])
def test_T03_validate(f):
    with pytest.raises(ValueError, match='at most 19'): f(20, 19)
    for o in (19, 20), (1, 1), (.3, 0): f(*o)


def test_T04_identity():
    m = nn.Linear(2, 3)
    x, twin = torch.randn(4, 2), copy.deepcopy(m)
    P.identity(m, 'bias')
    assert torch.equal(m.bias_mask, torch.ones(3)) and torch.equal(m(x), twin(x))
    m(x).pow(2).sum().backward(); twin(x).pow(2).sum().backward()
    assert torch.equal(m.bias_orig.grad, twin.bias.grad) and torch.equal(m.weight.grad, twin.weight.grad)


def test_T05_custom_from_mask():
    m = P.custom_from_mask(nn.Linear(5, 3), name='bias', mask=tensor([0, 1, 0]))
    assert torch.equal(m.bias_mask, tensor([0., 1., 0.])) and m.bias_mask.dtype == torch.float32
    assert list(m.state_dict()) == ['weight', 'bias_orig', 'bias_mask']
    for bad, kind in ((tensor([0, 2, 0]), ValueError), ([0, 1, 0], TypeError)):
        with pytest.raises(kind): P.custom_from_mask(nn.Linear(5, 3), 'bias', bad)


def test_T06_l1_unstructured():
    m = P.l1_unstructured(linear(), 'weight', 2)
    assert m.weight.tolist() == [[0, 2, 3, 4], [-4, -3, -2, 0]]


def test_T07_l1_scores():
    scores = tensor([[4., 2, 1, 3], [-3, -1, -2, -4]])
    for m in P.l1_unstructured(linear(), 'weight', 2, importance_scores=scores), P.l1_unstructured(linear(), 'weight', 2, scores):
        assert m.weight_mask.tolist() == [[1, 1, 0, 1], [1, 0, 1, 1]] and m.weight.tolist() == [[1, 2, 0, 4], [-4, 0, -2, -1]]


def test_T08_l1_twice():
    m = P.l1_unstructured(linear(), 'weight', 2)
    first = m.weight_mask.clone()
    P.l1_unstructured(m, 'weight', 2)
    assert (m.weight_mask == 0).sum() == 4 and not m.weight_mask[first == 0].any()
    assert m.weight.tolist() == [[0, 0, 3, 4], [-4, -3, 0, 0]]


def test_T09_keys():
    m = P.l1_unstructured(nn.Linear(2, 3), 'weight', amount=.2)
    assert list(m.state_dict()) == ['bias', 'weight_orig', 'weight_mask']


def conv312():
    "Conv2d(3, 1, 2): channel 1 has the smallest length; then column 0 the smallest sum"
    m = nn.Conv2d(3, 1, 2, bias=False)
    m.weight.data.copy_(tensor([[[[1., 1], [1, 4]], [[2, -.5], [.5, 0]], [[-1, 5], [2, 1]]]]))
    return m


def test_T10_ln_structured():
    m = P.ln_structured(conv312(), 'weight', amount=1, n=2, dim=1)
    want = torch.ones(1, 3, 2, 2)
    want[:, 1] = 0
    assert torch.equal(m.weight_mask, want)
    P.ln_structured(m, 'weight', amount=1, n=1, dim=-1)       # columns sum to 5 and 11
    want[..., 0] = 0
    assert torch.equal(m.weight_mask, want)


@pytest.mark.parametrize('n', [1, 2, 0, INF, -INF, 'fro', 'nuc'])
def test_T11_norms(n):
    torch.manual_seed(0)
    w = torch.rand(3, 5, 4)+.1
    w[:, 3] *= .01
    def kept(t): return int((P.LnStructured(1, n, dim=1).prune(t) != 0).sum())
    if n == 'nuc':
        assert kept(w) == 48
        assert P.LnStructured(1, n, dim=0).prune(tensor([[3., 4], [4.5, 0]])).tolist() == [[3, 4], [0, 0]]
        with pytest.raises(ValueError, match='no matrix'): P.ln_structured(nn.Conv2d(5, 3, 2), 'weight', 1, 'nuc', 1)
    else: assert kept(w) == kept(w.view(3, 5, 2, 2)) == 48
    if n not in (0,): assert not P.LnStructured(1, n, dim=1).prune(w)[:, 3].any()


@pytest.mark.parametrize('n', ['foo', None, True, float('nan')])
def test_T11_bad_norm(n):
    with pytest.raises(ValueError, match='order of a norm'): P.LnStructured(1, n)


def test_T12_ln_scores():
    m = nn.Conv2d(3, 1, 2, bias=False)
    scores = tensor([[[[.1, .1], [.1, .1]], [[2., 1], [1, 2]], [[3, 3], [3, 3]]]])
    P.ln_structured(m, 'weight', 1, 2, 1, importance_scores=scores)
    assert m.weight_mask[0].flatten(1).sum(1).tolist() == [0, 4, 4]


def test_T13_random_structured():
    m = P.random_structured(nn.Linear(5, 3), 'weight', amount=3, dim=1)
    assert (m.weight.detach().abs().sum(0) == 0).sum() == 3


def test_T14_random_unstructured():
    m = P.random_unstructured(nn.Linear(2, 3), 'weight', amount=1)
    assert (m.weight_mask == 0).sum() == 1
    m, seen = nn.Linear(4, 4), []
    for amount in (4, 4, .5):
        P.random_unstructured(m, 'weight', amount)
        seen.append(int((m.weight_mask == 0).sum()))
    assert seen == [4, 8, 12]


def two(): return linear(), linear([[.5, 1.5, -2]])
def pairs(*ms): return [(m, 'weight') for m in ms]


def test_T15_global():
    a, b = two()
    assert P.global_unstructured(pairs(a, b), P.L1Unstructured, amount=4) is None
    assert a.weight.tolist() == [[0, 2, 3, 4], [-4, -3, -2, 0]] and b.weight.tolist() == [[0, 0, -2]]


@pytest.mark.parametrize('amount,want', [(10, 10), (.25, 11)])
def test_T16_global_amount(amount, want):
    ms = nn.Linear(10, 4), nn.Linear(4, 1)
    P.global_unstructured(pairs(*ms), P.L1Unstructured, amount=amount)
    assert sum(int((m.weight_mask == 0).sum()) for m in ms) == want


def test_T17_global_scores():
    a, b = two()
    scores = {(a, 'weight'): tensor([[8., 7, 6, 5], [1, 2, 3, 4]]), (b, 'weight'): tensor([[9., 0, 10]])}
    P.global_unstructured(pairs(a, b), P.L1Unstructured, importance_scores=scores, amount=3)
    assert a.weight_mask.tolist() == [[1, 1, 1, 1], [0, 0, 1, 1]] and b.weight_mask.tolist() == [[1, 0, 1]]
    a, b = two()
    P.global_unstructured(pairs(a, b), P.L1Unstructured, importance_scores={(b, 'weight'): tensor([[9., 8, 7]])}, amount=3)
    assert a.weight_mask.tolist() == [[0, 1, 1, 1], [1, 1, 0, 0]] and b.weight_mask.tolist() == [[1, 1, 1]]
    with pytest.warns(UserWarning, match='not among the parameters'):
        P.global_unstructured(pairs(*two()), P.L1Unstructured, importance_scores={(a, 'weight'): a.weight}, amount=3)


def test_T18_global_again():
    a, b = two()
    for n in (4, 3): P.global_unstructured(pairs(a, b), P.L1Unstructured, amount=n)
    assert sum(int((m.weight_mask == 0).sum()) for m in (a, b)) == 7
    assert a.weight.tolist() == [[0, 0, 3, 4], [-4, -3, 0, 0]] and b.weight.tolist() == [[0, 0, 0]]    # the three of magnitude 2


def test_T19_global_not_iterable():
    with pytest.raises(TypeError, match='iterable'): P.global_unstructured(5, P.L1Unstructured, amount=1)
    for bad in ([nn.Linear(2, 2)], [('weight',)]):
        with pytest.raises(TypeError): P.global_unstructured(bad, P.L1Unstructured, amount=1)
    for bad in ([], pairs(*[linear()]*2)):
        with pytest.raises(ValueError): P.global_unstructured(bad, P.L1Unstructured, amount=1)


def test_T20_global_generator():
    (a, b), (c, d) = two(), two()
    P.global_unstructured(pairs(a, b), P.L1Unstructured, amount=4)
    P.global_unstructured((o for o in pairs(c, d)), P.L1Unstructured, amount=4)
    assert torch.equal(a.weight_mask, c.weight_mask) and torch.equal(b.weight_mask, d.weight_mask)
    m = nn.Sequential(*two())
    m[1].register_buffer('weight_mask', None)
    m[1].weight_orig = 1                                      # the name is taken: the second layer fails
    before = state(m)
    with pytest.raises(KeyError): P.global_unstructured(pairs(*m), P.L1Unstructured, amount=4)
    unchanged(before, m)


def test_T21_global_scores_not_dict():
    with pytest.raises(TypeError, match='dict'): P.global_unstructured(pairs(*two()), P.L1Unstructured, importance_scores=[1], amount=1)


def test_T22_global_structured():
    for bad in (P.LnStructured, TP.LnStructured):
        with pytest.raises(TypeError, match='structured'): P.global_unstructured(pairs(*two()), bad, amount=1, n=2)
    with pytest.raises(TypeError, match='pruning_method'): P.global_unstructured(pairs(*two()), P.l1_unstructured, amount=1)


def threshold(base):
    class Threshold(base):
        PRUNING_TYPE = 'unstructured'
        def __init__(self, t): self.t = t
        def compute_mask(self, t, default_mask): return default_mask*(t.abs() > self.t)
    return Threshold


@pytest.mark.parametrize('base', [P.BasePruningMethod, TP.BasePruningMethod])
def test_T23_global_own_method(base):
    a, b = two()
    P.global_unstructured(pairs(a, b), threshold(base), t=1.75)
    assert a.weight.tolist() == [[0, 2, 3, 4], [-4, -3, -2, 0]] and b.weight.tolist() == [[0, 0, -2]]


@pytest.mark.parametrize('lib', [P, TP])
def test_T24_is_pruned(lib):
    m = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    assert not P.is_pruned(m) and not TP.is_pruned(m)
    lib.l1_unstructured(m[0][0], 'weight', 1)
    assert P.is_pruned(m) and TP.is_pruned(m)
    TP.remove(m[0][0], 'weight')
    assert not P.is_pruned(m) and not TP.is_pruned(m)


def test_T25_remove():
    m = nn.Linear(3, 2)
    old = m.weight
    P.l1_unstructured(m, 'weight', 3)
    w = m.weight.detach().clone()
    assert P.remove(m, 'weight') is m
    assert m.weight is old and isinstance(m.weight, nn.Parameter) and torch.equal(m.weight, w)
    assert not P.is_pruned(m) and list(m.state_dict()) == ['weight', 'bias'] and not hasattr(m, 'weight_orig') and not hasattr(m, 'weight_mask')


def test_T26_remove_unpruned():
    m = nn.Linear(3, 2)
    with pytest.raises(ValueError, match='not pruned'): P.remove(m, 'weight')
    P.remove(P.identity(m, 'weight'), 'weight')
    with pytest.raises(ValueError, match='not pruned'): P.remove(m, 'weight')


@pytest.mark.parametrize('f,args', [(P.identity, ()), (P.custom_from_mask, (torch.ones(3, 4),)), (P.l1_unstructured, (2,)), (P.random_unstructured, (2,)),
                                    (P.random_structured, (1, 0)), (P.ln_structured, (1, 2, 0))])
def test_T27_same_module(f, args):
    m = nn.Linear(4, 3)
    assert f(m, 'weight', *args) is m


def test_T28_one_and_all():
    assert [int((P.l1_unstructured(linear(), 'weight', o).weight_mask == 0).sum()) for o in (1, 1., 0, 0.)] == [1, 8, 0, 0]


def test_T29_constructor():
    for bad, kind in (('a', TypeError), (1.1, ValueError), (20., ValueError), (-10, ValueError), (float('nan'), ValueError), (True, TypeError)):
        for c in (P.L1Unstructured, P.RandomUnstructured, P.RandomStructured, lambda a: P.LnStructured(a, 2), P._validate_pruning_amount_init):
            with pytest.raises(kind): c(bad)
    for ok in (.34, 1500, 0, 0., 1, 1., np.int64(3), np.float32(.5)): P._validate_pruning_amount_init(ok)


def test_T30_reparametrization():
    m = P.l1_unstructured(nn.Linear(3, 2), 'weight', 2)
    assert isinstance(m.weight_orig, nn.Parameter) and m.weight.shape == m.weight_orig.shape == m.weight_mask.shape
    assert [k for k, _ in m.named_parameters()] == ['bias', 'weight_orig'] and [k for k, _ in m.named_buffers()] == ['weight_mask']
    assert 'weight' in vars(m) and not isinstance(m.weight, nn.Parameter) and torch.equal(m.weight, m.weight_orig*m.weight_mask)


def test_T31_each_forward():
    m, x = P.l1_unstructured(linear(), 'weight', 2), torch.eye(4)
    with torch.no_grad(): m.weight_orig.fill_(7)
    assert m(x).T.tolist() == [[0, 7, 7, 7], [7, 7, 7, 0]] and m.weight.tolist() == [[0, 7, 7, 7], [7, 7, 7, 0]]
    m.weight = torch.zeros(2, 4)                              # set by anyone, in any way
    assert m(x).T.tolist() == [[0, 7, 7, 7], [7, 7, 7, 0]]


def test_T32_gradient():
    m = linear()
    opt, first = torch.optim.SGD(m.parameters(), .5), next(m.parameters())
    P.l1_unstructured(m, 'weight', 2)
    m(torch.ones(1, 4)).sum().backward()
    assert torch.equal(m.weight_orig.grad, m.weight_mask) and next(m.parameters()) is first
    opt.step()
    assert m.weight.tolist() == [[0, 1.5, 2.5, 3.5], [-4.5, -3.5, -2.5, 0]]
    P.remove(m, 'weight')
    assert next(m.parameters()) is first and m.weight.tolist() == [[0, 1.5, 2.5, 3.5], [-4.5, -3.5, -2.5, 0]]


def test_T33_rollback(monkeypatch):
    m = nn.Linear(3, 2)
    before = state(m)
    def fail(*a, **k): raise RuntimeError('in compute_mask')
    monkeypatch.setattr(P.L1Unstructured, 'compute_mask', fail)
    with pytest.raises(RuntimeError, match='in compute_mask'): P.l1_unstructured(m, 'weight', 1)
    unchanged(before, m)
    assert [k for k, _ in m.named_parameters()] == ['weight', 'bias']


def test_T34_pickle():
    m, x = P.l1_unstructured(nn.Sequential(nn.Linear(3, 2))[0], 'weight', 2), torch.randn(4, 3)
    f = io.BytesIO()
    torch.save(m, f); f.seek(0)
    for twin in pickle.loads(pickle.dumps(m)), torch.load(f, weights_only=False):
        assert torch.equal(twin.weight, m.weight) and same(m.state_dict(), twin.state_dict()) and TP.is_pruned(twin) and torch.equal(twin(x), m(x))
        twin(x).sum().backward()
        assert torch.equal(twin.weight_orig.grad != 0, twin.weight_mask != 0) and m.weight_orig.grad is None
    other = P.identity(nn.Linear(3, 2), 'weight')
    other.load_state_dict(m.state_dict())
    assert torch.equal(other(x), m(x)) and torch.equal(other.weight, m.weight)
    P.remove(m, 'weight')
    plain = nn.Linear(3, 2)
    plain.load_state_dict(m.state_dict())
    assert torch.equal(plain(x), m(x)) and torch.equal(pickle.loads(pickle.dumps(m)).weight, m.weight)


@pytest.mark.parametrize('forward', [False, True])
def test_T35_deepcopy(forward):
    m, x = nn.Sequential(nn.Linear(3, 2), nn.ReLU()), torch.randn(4, 3)
    P.l1_unstructured(m[0], 'weight', 2); P.l1_unstructured(m[0], 'weight', 1)
    if forward: m(x).sum().backward(); m(x)
    twin = copy.deepcopy(m)
    assert torch.equal(twin(x), m(x)) and torch.equal(twin[0].weight, m[0].weight) and same(twin.state_dict(), m.state_dict())
    old = m[0].weight.detach().clone()
    twin[0].zero_grad()
    twin(x).sum().backward()
    with torch.no_grad(): twin[0].weight_orig.fill_(3)
    assert torch.equal(m[0].weight, old) and (twin[0].weight == 3).sum() == 3 and twin[0].weight_orig.grad is not None
    assert list(twin[0]._forward_pre_hooks.values())[0] is not list(m[0]._forward_pre_hooks.values())[0]
    P.remove(twin[0], 'weight')
    assert P.is_pruned(m) and not P.is_pruned(twin)


def test_T36_rnn():
    def n(m): return sum(isinstance(p, nn.Parameter) for p in m._flat_weights)
    m, x = nn.LSTM(32, 32), torch.randn(2, 1, 32)
    keys = list(m.state_dict())
    P.l1_unstructured(m, 'weight_ih_l0', .5)
    assert n(m) == 3
    m(x)[0].sum().backward()
    with torch.no_grad(): m.weight_ih_l0_orig.mul_(2)
    twin, y = nn.LSTM(32, 32), m(x)[0]
    twin.load_state_dict({k: getattr(m, k).detach() for k in keys})
    assert torch.equal(twin(x)[0], y)
    P.remove(m, 'weight_ih_l0')
    assert n(m) == 4 and torch.equal(m(x)[0], y) and list(m.state_dict()) == keys and all(p is getattr(m, k) for k, p in zip(m._flat_weights_names, m._flat_weights))
    for lib in P, TP:
        lib.l1_unstructured(m, 'weight_ih_l0', .5); lib.l1_unstructured(m, 'bias_hh_l0', 3)
        P.remove(m, 'weight_ih_l0'); P.remove(m, 'bias_hh_l0')
        assert list(m.state_dict()) == keys


# ---- B. the base

def test_T37_abstract():
    with pytest.raises(TypeError): P.BasePruningMethod()
    m = linear()
    threshold(P.BasePruningMethod).apply(m, 'weight', 2.5)
    assert m.weight.tolist() == [[0, 0, 3, 4], [-4, -3, 0, 0]]
    assert issubclass(P.BasePruningMethod, TP.BasePruningMethod) and issubclass(P.PruningContainer, TP.PruningContainer)


def test_T38_apply():
    m = linear()
    h = P.L1Unstructured.apply(m, 'weight', 2)
    assert isinstance(h, P.L1Unstructured) and h in m._forward_pre_hooks.values()


def test_T39_composed():
    m = linear()
    a = P.L1Unstructured.apply(m, 'weight', 2)
    c = P.RandomUnstructured.apply(m, 'weight', 1)
    assert type(c) is P.PruningContainer and list(m._forward_pre_hooks.values()) == [c] and c[0] is a and len(c) == 2
    assert P.LnStructured.apply(m, 'weight', 1, 2, 0) is c and len(c) == 3 and c._tensor_name == 'weight'


def test_T40_constructor_args():
    class Both(P.BasePruningMethod):
        PRUNING_TYPE = 'unstructured'
        def __init__(self, lo, hi): self.lo, self.hi = lo, hi
        def compute_mask(self, t, default_mask): return default_mask*((t < self.lo) | (t > self.hi))
    m = linear()
    h = Both.apply(m, 'weight', -2.5, hi=2.5)
    assert (h.lo, h.hi) == (-2.5, 2.5) and m.weight.tolist() == [[0, 0, 3, 4], [-4, -3, 0, 0]]


def test_T41_scores_shape():
    m = nn.Linear(2, 3)
    before = state(m)
    for f in (lambda: P.l1_unstructured(m, 'weight', .2, importance_scores=torch.rand(4)), lambda: P.ln_structured(m, 'weight', 1, 2, 0, torch.rand(4))):
        for kind in AssertionError, ValueError:
            with pytest.raises(kind, match='importance_scores'): f()
    unchanged(before, m)


def test_T42_apply_mask():
    m, h = applied('L1Unstructured')
    assert torch.equal(h.apply_mask(m), m.weight) and torch.equal(m.weight, m.weight_mask*m.weight_orig)
    with pytest.raises(AssertionError, match='not applied'): P.L1Unstructured(2).apply_mask(nn.Linear(2, 2))


shapes = st.lists(st.integers(1, 5), min_size=2, max_size=4)


@st.composite
def method(draw, shape):
    "A method by its name and arguments, which fit a tensor of this shape"
    name = draw(st.sampled_from(['Identity', 'L1Unstructured', 'RandomUnstructured', 'LnStructured', 'RandomStructured', 'CustomFromMask']))
    dim = draw(st.integers(-len(shape), len(shape)-1))
    n = int(np.prod(shape)) if 'Un' in name else shape[dim]
    amount = draw(st.one_of(st.integers(0, n), st.floats(0, 1)))
    args = dict(Identity=(), CustomFromMask=((torch.rand(shape) > .3).float(),), LnStructured=(amount, draw(st.sampled_from([0, 1, 2, 3.5, -1, INF, -INF, 'fro'])), dim),
                RandomStructured=(amount, dim)).get(name, (amount,))
    return name, args


@fast
@given(st.data(), shapes, st.integers(0, 999))
def test_T43_contract(data, shape, seed):
    torch.manual_seed(seed)
    name, args = data.draw(method(shape))
    t, default = torch.randn(shape), (torch.rand(shape) > .3).float()
    for h in getattr(P, name)(*args), P.PruningContainer(getattr(P, name)(*args)):
        if type(h) is P.PruningContainer and 'Un' in name and args and isinstance(args[0], int) and args[0] > default.sum(): continue
        if type(h) is P.PruningContainer and 'Structured' in name and isinstance(args[0], int): continue
        m = h.compute_mask(t, default.clone())
        assert m.shape == t.shape and not m[default == 0].any() and ((m == 0) | (m == 1)).all()


@pytest.mark.parametrize('name', METHODS)
def test_T44_prune(name):
    t = torch.randn(2, 3)
    old = t.clone()
    out = made(name).prune(t)
    assert torch.equal(t, old) and out is not t and torch.equal(out[out != 0], t[out != 0]) and out.shape == t.shape
    torch.manual_seed(0); a = made(name).prune(t)
    torch.manual_seed(0); b = made(name).prune(t, torch.ones_like(t))
    assert torch.equal(a, b)


def test_T45_prune_scores():
    t = tensor([[1., 2, 3, 4], [5, 6, 7, 8]])
    scores, default = tensor([[1, 2, 3, 4], [1.5, 1.6, 1.7, 1.8]]), tensor([[1, 1, 1, 0], [1, 1, 0, 1]])
    assert P.L1Unstructured(2).prune(t, default, scores).tolist() == [[0, 2, 3, 0], [0, 6, 0, 8]]
    with pytest.raises(AssertionError): P.L1Unstructured(2).prune(t, importance_scores=scores[0])


def test_T46_method_remove():
    m, h = applied('L1Unstructured')
    w, x = m.weight.detach().clone(), torch.randn(1, 3)
    y = m(x)
    h.remove(m)
    assert torch.equal(m.weight, w) and list(m.state_dict()) == ['weight', 'bias'] and isinstance(m.weight, nn.Parameter)
    assert torch.equal(m(x), y) and not P.is_pruned(m)        # the hook that torch leaves behind takes itself off
    with pytest.raises(AssertionError): h.remove(m)
    h2 = P.RandomUnstructured.apply(m, 'weight', 1)
    h2.remove(m)
    assert type(P.L1Unstructured.apply(m, 'weight', 1)) is P.L1Unstructured and len(m._forward_pre_hooks) == 1


# ---- C. to I.: the classes

ROWS = {'CustomFromMask': 47, 'Identity': 52, 'L1Unstructured': 57, 'LnStructured': 62, 'PruningContainer': 74, 'RandomStructured': 80, 'RandomUnstructured': 86}
APPLY_MASK = {'CustomFromMask': 49, 'Identity': 54, 'L1Unstructured': 59, 'LnStructured': 65, 'PruningContainer': 77, 'RandomStructured': 83, 'RandomUnstructured': 88}


def rows(shift): return [pytest.param(k, id=f'T{v+shift}') for k, v in APPLY_MASK.items()]


def test_T47_custom():
    default = tensor([[0, 0, 0, 0], [1, 1, 1, 1]])
    assert P.CustomFromMask(tensor([[1, 1, 1, 1], [0, 0, 1, 1]])).compute_mask(torch.rand(2, 4), default).tolist() == [[0, 0, 0, 0], [0, 0, 1, 1]]
    assert P.CustomFromMask.PRUNING_TYPE == 'global'


def test_T48_custom_apply():
    m = nn.Linear(3, 2)
    before = state(m)
    for kind in AssertionError, ValueError:
        with pytest.raises(kind, match='shape'): P.CustomFromMask.apply(m, 'weight', torch.ones(3, 2))
    unchanged(before, m)
    h = P.CustomFromMask.apply(m, 'weight', tensor([[True, False, True]]*2))
    assert type(h) is P.CustomFromMask and m.weight_mask.tolist() == [[1, 0, 1]]*2


@pytest.mark.parametrize('name', rows(0))
def test_apply_mask_of(name):
    m, h = applied(name)
    assert torch.equal(h.apply_mask(m), m.weight) and torch.equal(m.weight, m.weight_orig*m.weight_mask)


@pytest.mark.parametrize('name,zeros', [pytest.param(k, z, id=f'T{APPLY_MASK[k]+1}') for k, z in dict(
    CustomFromMask=2, Identity=0, L1Unstructured=2, LnStructured=3, PruningContainer=2, RandomStructured=3, RandomUnstructured=2).items()])
def test_prune_of(name, zeros):
    t = torch.rand(2, 3)+1
    out = made(name).prune(t)
    assert (out == 0).sum() == zeros and torch.equal(out[out != 0], t[out != 0])
    if 'Structured' in name: assert sorted((out != 0).sum(1).tolist()) == [0, 3]
    if name == 'CustomFromMask': assert torch.equal(made(name).prune(torch.ones(2, 3)), METHODS[name][0])
    if name == 'L1Unstructured':
        t, default = tensor([[1., 2, 3, 4], [5, 6, 7, 8]]), tensor([[1, 1, 1, 0], [1, 1, 0, 1]])
        assert P.L1Unstructured(2).prune(t, default).ne(0).int().tolist() == [[0, 0, 1, 0], [1, 1, 0, 1]]
    if name == 'PruningContainer': assert P.PruningContainer(P.CustomFromMask(torch.zeros(2, 3)), P.L1Unstructured(1)).prune(t, torch.ones_like(t)).ne(0).sum() == t.numel()-1


@pytest.mark.parametrize('name', rows(2))
def test_remove_of(name):
    m, h = applied(name)
    w = m.weight.detach().clone()
    h.remove(m)
    assert torch.equal(m.weight, w) and not hasattr(m, 'weight_orig') and not hasattr(m, 'weight_mask') and list(m.state_dict()) == ['weight', 'bias']


def test_T52_identity_then_l1():
    m = P.identity(linear(), 'weight')
    assert m.weight_mask.all()
    P.l1_unstructured(m, 'weight', 2)
    assert type(list(m._forward_pre_hooks.values())[0]) is P.PruningContainer and m.weight.tolist() == [[0, 2, 3, 4], [-4, -3, -2, 0]]


def test_T53_identity_apply(): assert type(P.Identity.apply(linear(), 'weight')) is P.Identity


def test_T57_l1_ties():
    t = tensor([-2., 0, 2]).repeat(24)[:70].view(7, 10)
    m = P.L1Unstructured(.2).compute_mask(t, torch.ones_like(t))
    assert (m == 0).sum() == 14 and not t[m == 0].any()
    assert P.L1Unstructured(3).prune(torch.ones(2, 4)).tolist() == [[1, 1, 1, 1], [1, 0, 0, 0]]     # of equal ones the lower index stays


def test_T58_l1_too_many():
    m = nn.Linear(3, 2)
    before = state(m)
    with pytest.raises(ValueError, match='7.*6'): P.L1Unstructured.apply(m, 'weight', 7)
    unchanged(before, m)


def test_T62_ln():
    assert P.LnStructured(1, 2).dim == -1
    assert P.LnStructured(1, 1).prune(tensor([[3., 1], [1, 2]])).tolist() == [[3, 0], [1, 0]]


def test_T63_ln_apply():
    with pytest.raises(TypeError, match='dim'): P.LnStructured.apply(nn.Linear(3, 2), 'weight', 1, 2)
    assert type(P.LnStructured.apply(nn.Linear(3, 2), 'weight', 1, 2, 0)) is P.LnStructured


@pytest.mark.parametrize('m', [pytest.param(P.LnStructured, id='T64'), pytest.param(lambda a, n, dim: P.RandomStructured(a, dim), id='T82')])
def test_bad_dim(m):
    t = torch.rand(2, 3, 2, 2)
    for dim in 4, 5, -5:
        with pytest.raises(IndexError, match='dim'): m(1, 2, dim).compute_mask(t, torch.ones_like(t))
        with pytest.raises(IndexError): P.PruningContainer(m(1, 2, dim)).compute_mask(t, torch.ones_like(t))
    with pytest.raises(ValueError, match='no channels'): m(1, 2, 0).compute_mask(torch.rand(3), torch.ones(3))
    torch.manual_seed(1); a = m(1, 2, 1).compute_mask(t, torch.ones_like(t))
    torch.manual_seed(1); b = m(1, 2, 1).compute_mask(t, torch.ones_like(t))
    assert torch.equal(a, b) and (a == 0).sum() == 8


def named(m, name='weight'):
    m._tensor_name = name
    return m


def test_T68_container():
    a, b = named(P.L1Unstructured(1)), named(P.RandomUnstructured(2))
    c = P.PruningContainer(a)
    c.add_pruning_method(b)
    assert len(c) == 2 and c[0] is a and c[1] is b and list(c) == [a, b] and c[-1] is b


def test_T69_container_from():
    a, b = named(P.L1Unstructured(1)), named(TP.RandomUnstructured(2))
    for args, n in ((([a, b],), 2), (((a, b),), 2), ((a, b), 2), ((o for o in (a, b)), 2), ((a,), 1), (((o for o in (a, b)),), 2), ((), 0)):
        c = P.PruningContainer(*args)
        assert list(c) == [a, b][:n] and c._tensor_name == ('weight' if n else None)
    assert list(P.PruningContainer(P.PruningContainer(a, b))) == [a, b]
    m = linear()
    h = P.PruningContainer.apply(m, 'weight', [P.L1Unstructured(2), P.L1Unstructured(2)])
    assert type(h) is P.PruningContainer and len(h) == 2 and m.weight.tolist() == [[0, 0, 3, 4], [-4, -3, 0, 0]]
    with pytest.raises(ValueError, match='empty'): P.PruningContainer.apply(linear(), 'weight')
    other = P.L1Unstructured.apply(nn.Linear(2, 2), 'bias', 1)
    with pytest.raises(ValueError, match='bias'): P.PruningContainer.apply(linear(), 'weight', other)
    assert other._tensor_name == 'bias'


def test_T70_add_type():
    c = P.PruningContainer()
    for bad in 10, 'ugh':
        with pytest.raises(TypeError, match='no pruning method'): c.add_pruning_method(bad)
    c.add_pruning_method(None)
    assert len(c) == 0


def test_T71_add_name():
    c = P.PruningContainer(named(P.L1Unstructured(1)))
    with pytest.raises(ValueError, match='bias'): c.add_pruning_method(named(P.L1Unstructured(1), 'bias'))


def last(m, t, default): return P.PruningContainer(m).compute_mask(t, default)


def test_T72_container_unstructured():
    t, default = tensor([[1., 2, 3, 4], [5, 6, 7, 8]]), tensor([[0, 0, 1, 0], [1, 1, 0, 1]])
    assert last(P.L1Unstructured(1), t, default).tolist() == [[0, 0, 0, 0], [1, 1, 0, 1]]     # 3 is the least that is left


def test_T73_container_structured():
    t, default = tensor([[1., 2, 3, 4], [5, 6, 7, 8]]), tensor([[0, 0, 0, 0], [1, 1, 0, 1]])
    assert last(P.LnStructured(1, 2, 0), t, default).tolist() == [[0, 0, 0, 0], [0, 0, 0, 0]]         # row 0 is gone, so row 1 goes
    t, default = tensor([[1., 9, 3, 4], [1, 9, 7, 8]]), tensor([[0, 1, 1, 0], [0, 1, 0, 1]])
    assert last(P.LnStructured(1, 2, 1), t, default).tolist() == [[0, 1, 0, 0], [0, 1, 0, 1]]         # of columns 1, 2, 3 the third is least
    no_dim = threshold(P.BasePruningMethod)(1)
    no_dim.PRUNING_TYPE = 'structured'
    with pytest.raises(AttributeError, match='dim'): last(no_dim, t, default)


def test_T74_container_global():
    m = P.l1_unstructured(linear(), 'weight', 2)
    P.custom_from_mask(m, 'weight', tensor([[1, 0, 1, 1], [1, 1, 0, 1]]))
    assert m.weight.tolist() == [[0, 0, 3, 4], [-4, -3, 0, 0]]
    bad = threshold(P.BasePruningMethod)(1)
    bad.PRUNING_TYPE = 'odd'
    before = state(m)
    with pytest.raises(ValueError, match='odd'): last(bad, torch.ones(2, 2), torch.ones(2, 2))
    type(bad).PRUNING_TYPE = 'odd'
    with pytest.raises(ValueError, match='odd'): type(bad).apply(m, 'weight', 1)
    unchanged(before, m)


def test_T75_only_the_last():
    t, default = torch.rand(4, 4)+1, torch.ones(4, 4)
    default[0] = 0
    c = P.PruningContainer(P.CustomFromMask(torch.zeros(4, 4)), P.L1Unstructured(3))
    m = c.compute_mask(t, default)
    assert (m == 0).sum() == 7 and not m[0].any() and default[1:].all()


def test_T76_container_apply():
    m = P.l1_unstructured(linear(), 'weight', 2)
    h = P.PruningContainer.apply(m, 'weight', P.L1Unstructured(1), P.L1Unstructured(1))
    assert type(h) is P.PruningContainer and len(h) == 3 and m.weight.tolist() == [[0, 0, 3, 4], [-4, -3, 0, 0]] and len(m._forward_pre_hooks) == 1


def test_T80_random_structured():
    assert P.RandomStructured(1).dim == -1
    out = P.RandomStructured(.6, dim=2).prune(torch.ones(5, 4, 2))
    assert (out == 0).sum() == 20 and sorted(out.flatten(0, 1).sum(0).tolist()) == [0, 20]


def test_T81_random_structured_apply():
    m = nn.Linear(4, 3)
    assert type(P.RandomStructured.apply(m, 'weight', 1)) is P.RandomStructured and (m.weight_mask.sum(0) == 0).sum() == 1


def test_T86_random_unstructured():
    masks = []
    for seed in 0, 1:
        torch.manual_seed(seed)
        masks.append(P.RandomUnstructured(30).compute_mask(torch.rand(100), torch.ones(100)))
    assert [(m == 0).sum() for m in masks] == [30, 30] and not torch.equal(*masks)
    torch.manual_seed(0)
    times = sum(P.RandomUnstructured(2).compute_mask(torch.rand(10), torch.ones(10)) == 0 for _ in range(2000))
    assert times.min() > 320 and times.max() < 480           # 400 each, 18 the standard deviation


def test_T87_random_unstructured_apply():
    m = nn.Linear(3, 2)
    assert type(P.RandomUnstructured.apply(m, 'weight', 2)) is P.RandomUnstructured and (m.weight_mask == 0).sum() == 2


# ---- the same as torch, wherever torch is right

FUNCTIONS = dict(Identity='identity', L1Unstructured='l1_unstructured', RandomUnstructured='random_unstructured', LnStructured='ln_structured',
                 RandomStructured='random_structured', CustomFromMask='custom_from_mask')


@st.composite
def layer(draw):
    "A layer with random weights that differ in magnitude"
    g = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    kind = draw(st.sampled_from([nn.Linear, nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d]))
    a, b = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    m = kind(a, b, **({} if kind is nn.Linear else dict(kernel_size=draw(st.integers(1, 3)))))
    for p in m.parameters(): p.data.copy_(torch.randn(p.shape, generator=g))
    return m


def run(lib, m, calls, seed):
    torch.manual_seed(seed)
    try:
        for name, param, args in calls: getattr(lib, FUNCTIONS[name])(m, param, *args)
    except (ValueError, AssertionError, IndexError) as e: return type(e).__mro__
    return None


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data(), layer(), st.integers(0, 999))
def test_same_as_torch(data, m, seed):
    "One to three rounds of any methods: equal masks, weights, keys, and refusals"
    calls = []
    for _ in range(data.draw(st.integers(1, 3))):
        param = data.draw(st.sampled_from(['weight', 'weight', 'bias']))
        p = getattr(m, param)
        calls.append((*data.draw(method(p.shape if param == 'weight' else (*p.shape,))),)[:1]+(param,))
        name, args = data.draw(method(list(p.shape)))
        calls[-1] = (name, param, args)
    a, b = copy.deepcopy(m), copy.deepcopy(m)
    ours, theirs = run(P, a, calls, seed), run(TP, b, calls, seed)
    if any('Structured' in name and param == 'bias' for name, param, _ in calls):
        assert ours is not None                               # torch lets it pass in a second round, where it prunes everything or nothing
        return
    assert (ours is None) == (theirs is None), (calls, ours, theirs)
    if ours is not None: return
    assert list(a.state_dict()) == list(b.state_dict())
    for k, v in b.state_dict().items(): assert torch.equal(a.state_dict()[k], v) and a.state_dict()[k].dtype == v.dtype, (k, calls)
    for param in {c[1] for c in calls}:
        assert torch.equal(getattr(a, param), getattr(b, param))
        assert type(list(a._forward_pre_hooks.values())[0]).__name__ in [type(h).__name__ for h in b._forward_pre_hooks.values()]
        P.remove(a, param); TP.remove(b, param)
        assert torch.equal(getattr(a, param), getattr(b, param))
    assert list(a.state_dict()) == list(m.state_dict())


@fast
@given(st.integers(1, 5), st.one_of(st.integers(0, 10), st.floats(0, 1)), st.sampled_from(['L1Unstructured', 'RandomUnstructured']), st.integers(0, 999))
def test_global_same_as_torch(n, amount, name, seed):
    torch.manual_seed(seed)
    ms = [nn.Linear(n, 3), nn.Conv2d(2, n, 2)]
    twins = copy.deepcopy(ms)
    for lib, mods in (P, ms), (TP, twins):
        torch.manual_seed(seed)
        for i in 0, 1: lib.global_unstructured([(m, k) for m in mods for k in ('weight', 'bias')], getattr(lib, name), amount=amount if i == 0 else .2)
    for a, b in zip(ms, twins): assert same(a.state_dict(), b.state_dict()) and torch.equal(a.weight, b.weight) and torch.equal(a.bias, b.bias)


@fast
@given(st.data(), shapes, st.integers(0, 999))
def test_prune_same_as_torch(data, shape, seed):
    "`prune` of a method by itself, with a mask and scores"
    torch.manual_seed(seed)
    name, args = data.draw(method(shape))
    t, default, scores = torch.randn(shape), (torch.rand(shape) > .3).float(), torch.randn(shape)
    out = []
    for lib in P, TP:
        torch.manual_seed(seed)
        out.append(getattr(lib, name)(*args).prune(t, default, scores))
    assert torch.equal(*out)


def test_mixed_libraries():
    "torch's rounds on top of ours, and ours on top of torch's, are what either does alone"
    values = [[1, 2.5, 3, 4], [-4.5, -3.5, -2, -1.5]]
    want = linear(values)
    for n in 1, 2, 2: TP.l1_unstructured(want, 'weight', n)
    for libs in (P, TP, P), (TP, P, TP), (P, P, TP), (TP, TP, P):
        m = linear(values)
        for lib, n in zip(libs, (1, 2, 2)): lib.l1_unstructured(m, 'weight', n)
        assert torch.equal(m.weight, want.weight) and len(m._forward_pre_hooks) == 1
        libs[0].remove(m, 'weight')
        assert m.weight.tolist() == want.weight.tolist() and not TP.is_pruned(m) and len(m._forward_pre_hooks) == 0


# ---- what torch breaks

def test_zero_is_positive():
    m = linear([[-1, -3, 2]])
    P.custom_from_mask(m, 'weight', tensor([[0, 0, 1]]))
    assert m.weight.tolist() == [[0, 0, 2]] and not m.weight.signbit().any()
    m(torch.ones(1, 3)).sum().backward()
    assert m.weight_orig.grad.tolist() == [[0, 0, 1]] and not P.CustomFromMask(m.weight_mask).prune(m.weight_orig).signbit().any()
    P.remove(m, 'weight')
    assert m.weight.tolist() == [[0, 0, 2]] and not m.weight.signbit().any()


@pytest.mark.parametrize('name', ['in_proj_weight', 'in_proj_bias', 'out_proj.weight', 'out_proj.bias'])
@pytest.mark.parametrize('form', ['new', 'deepcopy', 'pickle'])
def test_attention(name, form):
    "Three steps of attention with one of its tensors pruned are those of the plain layer with masked gradients"
    torch.manual_seed(0)
    att, x = nn.MultiheadAttention(4, 2), torch.randn(3, 2, 4)
    nn.init.normal_(att.in_proj_bias); nn.init.normal_(att.out_proj.bias)
    sub, _, attr = name.rpartition('.')
    plain = copy.deepcopy(att)
    P.l1_unstructured(att.get_submodule(sub), attr, .5)
    keys = list(plain.state_dict())
    mask = getattr(att.get_submodule(sub), f'{attr}_mask').clone()
    att = copy.deepcopy(att) if form == 'deepcopy' else pickle.loads(pickle.dumps(att)) if form == 'pickle' else att
    p = plain.get_parameter(name)
    p.data *= mask
    opts = [torch.optim.SGD(m.parameters(), .1) for m in (att, plain)]
    for _ in range(3):
        a, b = (m(x, x, x)[0] for m in (att, plain))
        assert torch.allclose(a, b, atol=1e-6)
        for y in a, b: y.pow(2).sum().backward()
        p.grad *= mask
        for o in opts: o.step(); o.zero_grad()
    P.remove(att.get_submodule(sub), attr)
    assert list(att.state_dict()) == keys
    for k, v in plain.state_dict().items(): assert torch.allclose(att.state_dict()[k], v, atol=1e-6)


def test_two_graphs():
    "Two forward passes, then two backward passes, with a weight that its module never uses itself"
    m, x = P.l1_unstructured(linear(), 'weight', 2), torch.ones(1, 4)
    ys = [nn.functional.linear(x, m.weight).sum() for _ in range(2)]+[m(x).sum() for _ in range(2)]
    for y in ys: y.backward()
    assert torch.equal(m.weight_orig.grad, 4*m.weight_mask)


@pytest.mark.parametrize('kind', [nn.LSTM, nn.GRU, nn.RNN])
def test_rnn_all(kind):
    "All weights of a two-layer RNN: copies, second backward, order of keys"
    m, x = kind(4, 4, num_layers=2), torch.randn(3, 1, 4)
    keys = list(m.state_dict())
    for k in keys: P.l1_unstructured(m, k, .5)
    for _ in range(2): m(x)[0].sum().backward()
    twin = copy.deepcopy(m)
    assert torch.equal(twin(x)[0], m(x)[0]) and torch.equal(pickle.loads(pickle.dumps(m))(x)[0], m(x)[0])
    y = m(x)[0]
    for k in reversed(keys): P.remove(m, k)
    assert list(m.state_dict()) == keys and torch.equal(m(x)[0], y)


def test_order_after_remove():
    m = nn.Linear(2, 2)
    for first in 'weight', 'bias':
        P.l1_unstructured(m, 'weight', 1); P.l1_unstructured(m, 'bias', 1)
        P.remove(m, first); P.remove(m, 'bias' if first == 'weight' else 'weight')
        assert list(m.state_dict()) == ['weight', 'bias'] == [k for k, _ in m.named_parameters()]
    for lib in TP, P:
        TP.l1_unstructured(m, 'weight', 1)
        lib.l1_unstructured(m, 'weight', 1)
        P.remove(m, 'weight')
        assert list(m.state_dict()) == ['weight', 'bias']


def test_other_places():
    "A pruned layer moved to another type, under functional_call, under autocast, with a TensorBase, compiled"
    from fastai.torch_core import TensorImage
    m, x = P.l1_unstructured(linear(), 'weight', 2), torch.eye(4)
    y = m(x)
    assert torch.equal(copy.deepcopy(m).half()(x.half()).float(), y) and torch.equal(copy.deepcopy(m).to(torch.complex64)(x+0j).real, y)
    m.double()
    assert m.weight.dtype == torch.float64 and torch.equal(m(x.double()).float(), y)
    m.float()
    out = torch.func.functional_call(m, {'weight_orig': torch.full((2, 4), 5.)}, (x,))
    assert out.T.tolist() == [[0, 5, 5, 5], [5, 5, 5, 0]] and torch.equal(m.weight, y.T)
    assert type(m(TensorImage(x))) is TensorImage and torch.equal(m(x), y)
    with torch.autocast('cpu', torch.bfloat16): assert m(x).dtype == torch.bfloat16
    f = torch.compile(m, backend='eager', fullgraph=True)
    assert torch.equal(f(x), y)
    with torch.no_grad(): m.weight_orig.mul_(2)
    assert torch.equal(f(x), 2*y) and torch.equal(m(x), 2*y) and torch.equal(copy.deepcopy(m)(x), 2*y)
    with torch.inference_mode(): assert torch.equal(m(x), 2*y)


@pytest.mark.parametrize('name,match', [('weigth', 'weight'), ('weight_orig', "'weight'")])
def test_unknown_parameter(name, match):
    m = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=match): P.l1_unstructured(m, name, 1)
    with pytest.raises(TypeError): P.l1_unstructured('m', 'weight', 1)
    with pytest.raises(ValueError, match='batch'): P.l1_unstructured(nn.LazyLinear(2), 'weight', 1)
    nn.utils.parametrizations.weight_norm(m)
    with pytest.raises(ValueError, match='parametrization'): P.l1_unstructured(m, 'weight', 1)


def test_nan_is_refused():
    m = linear([[1, float('nan')]])
    before = state(m)
    with pytest.raises(ValueError, match='NaN'): P.l1_unstructured(m, 'weight', 1)
    unchanged(before, m)


# ---- faults at every step

class Stop(BaseException): "Not an `Exception`, as Ctrl-C is not"


def fresh(kind):
    "A module in one of the states in which `apply` may meet it"
    torch.manual_seed(0)
    m = nn.LSTM(3, 2) if kind == 'rnn' else nn.Linear(3, 2)
    name = 'weight_ih_l0' if kind == 'rnn' else 'weight'
    m.register_forward_pre_hook(lambda *a: None)
    if kind in ('once', 'twice', 'torch', 'torch twice'): (TP if 'torch' in kind else P).l1_unstructured(m, name, 1)
    if 'twice' in kind: (TP if 'torch' in kind else P).l1_unstructured(m, name, 1)
    if kind == 'other': P.l1_unstructured(m, 'bias', 1)
    m.register_forward_pre_hook(lambda *a: None)
    return m, name


KINDS = ['plain', 'once', 'twice', 'torch', 'torch twice', 'other', 'rnn']


class Tracer:
    "Raises at the n-th line that the package or its dict methods run inside a call"
    def __init__(self, n): self.n, self.seen, self.fired = n, 0, False
    def __call__(self, frame, event, arg):
        if '/sparsify/prune.py' not in frame.f_code.co_filename or frame.f_code.co_name in ('_undone', '_refill', '_inner'): return None
        if event == 'line':
            self.seen += 1
            if self.seen == self.n:
                self.fired = True
                raise Stop(f'{frame.f_code.co_name}:{frame.f_lineno}')
        return self


def at_each_line(make, call, check):
    "Run `call(make())` with a fault at each line in turn, and `check` what is left, unless all was done by then; the number of lines"
    n, done = 0, make()
    call(*done)
    done = done[0].state_dict()
    while True:
        n += 1
        m, *rest = make()
        before, tracer, old = state(m), Tracer(n), sys.gettrace()
        sys.settrace(tracer)
        try: call(m, *rest)
        except Stop: pass
        finally:
            sys.settrace(old)
            torch.set_grad_enabled(True)                      # a fault just before the end of `no_grad` leaves it on
        if not tracer.fired: return n-1
        if not same(m.state_dict(), done): check(before, m)


@pytest.mark.parametrize('kind', KINDS)
def test_fault_at_each_line_of_apply(kind):
    def check(before, m):
        unchanged(before, m)
        m(torch.randn(2, 1, 3))                               # and it works
    n = at_each_line(lambda: fresh(kind), lambda m, name: P.L1Unstructured.apply(m, name, 1), check)
    assert n > 30


@pytest.mark.parametrize('kind,step', [(k, s) for k in KINDS for s in ('register_parameter', 'register_buffer', '__setattr__', 'register_forward_pre_hook')
                                       if k in ('plain', 'other', 'rnn') or s in ('register_buffer', '__setattr__')])    # the others are of the first round
def test_fault_in_each_call(kind, step, monkeypatch):
    "The module's own methods fail, before or after they have done their work"
    for late in False, True:
        m, name = fresh(kind)
        before, old = state(m), getattr(nn.Module, step)
        def fail(self, *args, **kwargs):
            if late: old(self, *args, **kwargs)
            raise Stop(step)
        with monkeypatch.context() as mp:
            mp.setattr(nn.RNNBase if kind == 'rnn' and step == '__setattr__' else nn.Module, step, fail)
            with pytest.raises(Stop): P.L1Unstructured.apply(m, name, 1)
        unchanged(before, m)


@pytest.mark.parametrize('kind,where', [(k, w) for k in KINDS for w in ('__init__', 'compute_mask', 'apply_mask')
                                        if k in ('plain', 'other', 'rnn') or w != 'apply_mask'])     # later it is the container's
def test_fault_in_a_method(kind, where):
    def fail(*args, **kwargs): raise Stop(where)
    bad = type('Bad', (P.L1Unstructured,), {where: fail})
    m, name = fresh(kind)
    before = state(m)
    with pytest.raises(Stop): bad.apply(m, name, amount=1)
    unchanged(before, m)


@pytest.mark.parametrize('out', [torch.ones(2), 'no mask', None])
def test_fault_in_what_compute_mask_returns(out):
    bad = type('Bad', (P.L1Unstructured,), dict(compute_mask=lambda *a, **k: out))
    for kind in 'plain', 'once':
        m, name = fresh(kind)
        before = state(m)
        with pytest.raises((ValueError, TypeError), match='mask of Bad'): bad.apply(m, name, amount=1)
        unchanged(before, m)


def test_fault_at_each_line_of_remove():
    for kind in 'once', 'twice', 'torch':
        assert at_each_line(lambda: fresh(kind), P.remove, unchanged) > 15


def test_fault_at_each_line_of_global():
    def make(): return nn.Sequential(fresh('once')[0], fresh('plain')[0]), 'weight'
    n = at_each_line(make, lambda m, name: P.global_unstructured([(o, name) for o in m], P.L1Unstructured, amount=3), unchanged)
    assert n > 80


# ---- J. across

def pruned_net(lib=TP):
    "A small network pruned in several ways"
    torch.manual_seed(0)
    m = net()
    lib.l1_unstructured(m[0], 'weight', .3)
    lib.random_unstructured(m[3], 'weight', .5)
    lib.ln_structured(m[3], 'weight', 2, 1, 0)
    lib.l1_unstructured(m[7], 'weight', 10)
    lib.l1_unstructured(m[3], 'bias', 3)
    return m


NAMES = ['0.weight', '3.weight', '3.bias', '7.weight']


@pytest.mark.parametrize('lib', [TP, P])
def test_T91_from_prune(lib):
    m, x = pruned_net(lib), torch.randn(4, 1, 8, 8)
    keys = list(net().state_dict())
    masks = {k: m.get_buffer(f'{k}_mask') != 0 for k in NAMES}
    orig = {k: m.get_parameter(f'{k}_orig') for k in NAMES}
    dense, params = {k: v.detach().clone() for k, v in orig.items()}, {id(p) for p in m.parameters()}
    m.eval()
    y, kept = m(x), copy.deepcopy(m) if lib is P else pickle.loads(pickle.dumps(m))
    sp = quiet(P.from_prune, m)
    assert list(sp.targets) == NAMES and all(torch.equal(sp.masks[k], masks[k]) for k in NAMES)
    assert list(m.state_dict()) == keys and torch.equal(m(x), y) and not TP.is_pruned(m) and {id(p) for p in m.parameters()} == params
    for k in NAMES: assert m.get_parameter(k) is orig[k] and torch.equal(m.get_parameter(k), torch.where(masks[k], dense[k], 0.)) and sp.obeys()
    net().load_state_dict(m.state_dict())
    sp = quiet(P.from_prune, kept, keep_dense=True, criteria=movement)
    for k in NAMES: assert torch.equal(kept.get_parameter(k), dense[k]) and torch.equal(sp.masks[k], masks[k]) and torch.equal(sp.refs['init'][k], dense[k])
    sp.apply_masks()
    assert torch.equal(kept(x), y)


def test_T92_to_prune():
    torch.manual_seed(0)
    m, x = net().eval(), torch.randn(4, 1, 8, 8)
    sp = Sparsifier(m, layer_type=[nn.Conv2d, nn.Linear], context='global').sparsify_model(.7)
    y, keys, masks = m(x), list(m.state_dict()), {k: v.clone() for k, v in sp.masks.items()}
    params = [id(p) for p in m.parameters()]
    assert sp.to_prune() is m and TP.is_pruned(m) and torch.equal(m(x), y)
    for k, v in masks.items(): assert torch.equal(m.get_buffer(f'{k}_mask') != 0, v)
    twin = TP.identity(nn.Linear(16, 4), 'weight')
    twin.load_state_dict({k.removeprefix('7.'): v for k, v in m.state_dict().items() if k.startswith('7.')})
    for i in 0, 3, 7: TP.remove(m[i], 'weight')
    assert not TP.is_pruned(m) and list(m.state_dict()) == keys and torch.equal(m(x), y) and [id(p) for p in m.parameters()] == params
    assert sp.fits(m) and sp.obeys()


@pytest.mark.parametrize('algorithm', ['static', 'gmp'])
@pytest.mark.parametrize('lib', [TP, P])
def test_round_trip(lib, algorithm):
    "Pruned, taken over, trained three epochs, given back, made permanent: the same forward pass at each crossing, and the same masks"
    m, x = pruned_net(lib), torch.randn(4, 1, 8, 8)
    m.eval()
    y = m(x)
    sp = P.from_prune(m)
    assert torch.equal(m.eval()(x), y)
    masks = {k: v.clone() for k, v in sp.masks.items()}
    learn = learner(model=m)
    cb = SparsifyCallback(algorithm=Static(init='from_zeros')) if algorithm == 'static' else SparsifyCallback(.8)
    cb.sparsifier = sp
    learn.fit(3, cbs=cb)
    assert cb.sparsifier is sp and sp.obeys() and not torch.equal(m.eval()(x), y)
    for k, v in sp.masks.items():
        assert torch.equal(v, masks[k]) if algorithm == 'static' else not (v & ~masks[k]).any()
    if algorithm == 'gmp': assert [int((~v).sum()) for v in sp.masks.values()] == [round(.8*v.numel()) for v in sp.masks.values()]
    y, masks, plain = m(x), {k: v.clone() for k, v in sp.masks.items()}, snapshot(m)
    sp.to_prune()
    assert torch.equal(m.eval()(x), y)
    for k, v in masks.items(): assert torch.equal(m.get_buffer(f'{k}_mask') != 0, v)
    again = P.from_prune(m)
    assert all(torch.equal(again.masks[k], masks[k]) for k in masks) and torch.equal(m(x), y)
    again.to_prune()
    for k in NAMES: TP.remove(m[int(k[0])], k[2:])
    assert torch.equal(m(x), y) and same(plain, m.state_dict())


def test_learner_between(tmp_path):
    "A learner whose model is in torch's form can be saved, exported and looked at; training asks for the plain form"
    learn = learner(dls=datasets(), path=tmp_path)
    learn.fit(1, cbs=SparsifyCallback(.5))
    sp = learn.sparsify.sparsifier
    sp.to_prune()
    assert not sp.fits(learn.model)
    with pytest.raises(ValueError, match='already'): sp.to_prune()
    learn.save('pruned', with_opt=False); learn.export(tmp_path/'x.pkl'); learn.validate()
    file = torch.load(tmp_path/'models'/'pruned.pth', weights_only=True)
    state_dict = file['model'] if 'model' in file else file
    plain = net().eval()
    again = P.from_prune(plain, state_dict)
    x = torch.randn(2, 1, 8, 8)
    assert torch.equal(plain(x), learn.model.eval()(x)) and all(torch.equal(again.masks[k], sp.masks[k]) for k in sp.masks)


@pytest.mark.parametrize('prefix', ['', 'module.', '_orig_mod.', 'module._orig_mod.'])
@pytest.mark.parametrize('lib', [TP, P])
def test_from_state_dict(lib, prefix):
    m, x = pruned_net(lib).eval(), torch.randn(4, 1, 8, 8)
    file = {prefix+k: v.clone() for k, v in m.state_dict().items()}
    for wrap in (lambda o: o), nn.DataParallel, lambda o: torch.compile(o, backend='eager'):
        plain = net().eval()
        sp = quiet(P.from_prune, wrap(plain), file, context='global')
        assert torch.equal(plain(x), m(x)) and sp.model is plain and all(torch.equal(sp.masks[k], m.get_buffer(f'{k}_mask') != 0) for k in NAMES)
    plain = net()
    sp = P.from_prune(plain, file, keep_dense=True, criteria=movement)
    for k in NAMES: assert torch.equal(plain.get_parameter(k), m.get_parameter(f'{k}_orig')) and torch.equal(sp.refs['init'][k], plain.get_parameter(k))


def test_from_state_dict_refused():
    file = pruned_net().state_dict()
    def refused(match, state_dict=file, model=None, **kwargs):
        m = net() if model is None else model
        before = state(m)
        with pytest.raises((ValueError, TypeError), match=match): P.from_prune(m, state_dict, **kwargs)
        unchanged(before, m)
    refused('plain model', net().state_dict())
    refused('one side', {k: v for k, v in file.items() if k != '7.bias'})
    refused('one side', {**file, 'more': torch.ones(1)})
    refused('pruned and plain', {**file, '7.weight': torch.ones(4, 16)})
    refused('shape', {**file, '7.bias': torch.ones(5)})
    refused('shape', {**file, '7.weight_mask': torch.ones(5)})
    refused('0 and 1', {**file, '7.weight_mask': file['7.weight_mask']*.5})
    refused('one name here', {**file, 'module.7.bias': torch.ones(4)})
    refused('pruned already', model=pruned_net())
    refused('granularity', granularity='nonsense')
    refused('parts of units', pruned_conv().state_dict(), nn.Sequential(nn.Conv2d(2, 2, 2)), granularity='kernel')


def pruned_conv():
    m = nn.Sequential(nn.Conv2d(2, 2, 2))
    P.l1_unstructured(m[0], 'weight', .5)
    return m


def test_from_prune_refused():
    def refused(match, m, **kwargs):
        before = state(m)
        with pytest.raises((ValueError, TypeError), match=match), warnings.catch_warnings():
            warnings.simplefilter('ignore')
            P.from_prune(m, **kwargs)
        unchanged(before, m)
    refused('nothing in this', net())
    for lib in P, TP:
        refused('granularity', pruned_net(lib), granularity='nonsense')
        refused('unexpected keyword', pruned_net(lib), nonsense=1)
        refused('parts of units', pruned_conv(), granularity='kernel')
        refused('is no target', pruned_net(lib), exclude='7')
        m = nn.Sequential(nn.Linear(3, 1))
        lib.l1_unstructured(m[0], 'bias', 1)
        refused('single entry', m)
    m = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    m[1].weight = m[0].weight
    P.custom_from_mask(m[0], 'weight', torch.eye(3))
    refused('one parameter', m)                               # the other place of the tied weight is not pruned
    P.custom_from_mask(m[1], 'weight', torch.eye(3).flip(0))
    refused('one parameter', m)
    with pytest.raises(TypeError): P.from_prune('m')


def test_tied():
    "Both places of a tied weight, with one mask: one target, and back to both"
    m, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.randn(2, 3)
    m[1].weight = m[0].weight
    keys = list(m.state_dict())
    for o in m: TP.custom_from_mask(o, 'weight', torch.eye(3))
    y = m(x)
    sp = P.from_prune(m)
    assert list(sp.targets) == ['0.weight'] and m[0].weight is m[1].weight and torch.equal(m(x), y)
    sp.to_prune()
    assert torch.equal(m(x), y) and m[0].weight_orig is m[1].weight_orig
    P.from_prune(m)
    assert m[0].weight is m[1].weight and torch.equal(m(x), y) and list(m.state_dict()) == keys


def test_more_targets():
    m = net()
    TP.l1_unstructured(m[0], 'weight', .5)
    sp = P.from_prune(m, layer_type=nn.Linear, context='global')
    assert list(sp.targets) == ['0.weight', '7.weight'] and sp.masks['7.weight'].all()


def test_filters():
    "Whole filters: the mask is taken as it is, what follows them is named in a warning, and goes back if asked"
    m = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
    nn.init.ones_(m[0].bias)
    P.ln_structured(m[0], 'weight', 2, 2, 0)
    file = copy.deepcopy(m.state_dict())
    with pytest.warns(UserWarning, match='0.bias'): sp = P.from_prune(m, granularity='filter')
    assert (m[0].bias == 0).sum() == (m[1].weight == 0).sum() == 2
    sp.to_prune()
    assert [k for k in m.state_dict() if k.endswith('_mask')] == ['0.weight_mask']
    sp = P.from_prune(m, granularity='filter')
    sp.to_prune(followers=True)
    assert sorted(k for k in m.state_dict() if k.endswith('_mask')) == ['0.bias_mask', '0.weight_mask', '1.bias_mask', '1.weight_mask']
    plain = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
    quiet(P.from_prune, plain, file)
    assert (plain[0].bias == 1).all()                         # single weights: nothing follows


def test_fault_at_each_line_across():
    assert at_each_line(lambda: (pruned_net(P),), P.from_prune, unchanged) > 60
    def plain():
        torch.manual_seed(0)
        m = net()
        return m, Sparsifier(m, layer_type=[nn.Conv2d, nn.Linear]).sparsify_model(.5)
    assert at_each_line(plain, lambda m, sp: sp.to_prune(), unchanged) > 60


# ---- masks as files

def test_masks_file(tmp_path):
    m = net()
    sp = Sparsifier(m, layer_type=[nn.Conv2d, nn.Linear]).sparsify_model(.6)
    file = P.save_masks(sp, tmp_path/'masks.safetensors')
    n = sum(v.numel() for v in sp.masks.values())
    from safetensors import safe_open
    with safe_open(file, 'pt') as f: assert sum(f.get_tensor(k).numel() for k in f.keys()) == sum((v.numel()+7)//8 for v in sp.masks.values())
    assert n == 1288 and [p.name for p in tmp_path.iterdir()] == ['masks.safetensors']
    got = P.load_masks(file)
    assert list(sorted(got)) == sorted(sp.masks) and all(torch.equal(got[k], sp.masks[k]) and got[k].dtype == torch.bool for k in got)
    for wrap in (lambda o: o), nn.DataParallel, lambda o: torch.compile(o, backend='eager'):
        other = Sparsifier(wrap(net()), layer_type=[nn.Conv2d, nn.Linear])
        P.load_masks(file, other)
        assert all(torch.equal(other.masks[k], sp.masks[k]) for k in sp.masks) and other.obeys() and other.sparsity == sp.sparsity
        assert P.load_masks(file, wrap(net())).keys() == got.keys()


@pytest.mark.parametrize('prefix', ['module.', '_orig_mod.', 'module._orig_mod.', '_orig_mod.module.'])
def test_masks_file_wrapped_names(tmp_path, prefix):
    "Names as a wrapper has them, in the file or in the model"
    sp = Sparsifier(net(), layer_type=[nn.Conv2d, nn.Linear]).sparsify_model(.6)
    file = P.save_masks({prefix+k: m for k, m in sp.masks.items()}, tmp_path/'m')
    other = Sparsifier(net(), layer_type=[nn.Conv2d, nn.Linear])
    P.load_masks(file, other)
    assert all(torch.equal(other.masks[k], sp.masks[k]) for k in sp.masks)
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = net()
    other = Sparsifier(Wrapper(), layer_type=[nn.Conv2d, nn.Linear])
    P.load_masks(P.save_masks(sp, tmp_path/'m'), other)
    assert all(torch.equal(other.masks[f'module.{k}'], sp.masks[k]) for k in sp.masks)


def test_masks_file_of_a_pruned_model(tmp_path):
    m = pruned_net()
    got = P.load_masks(P.save_masks(nn.DataParallel(m), str(tmp_path/'m')))
    assert sorted(got) == sorted(NAMES) and all(torch.equal(got[k], m.get_buffer(f'{k}_mask') != 0) for k in NAMES)


@fast
@given(st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=3), st.integers(0, 99))
def test_masks_file_any_shape(tmp_path_factory, shapes, seed):
    torch.manual_seed(seed)
    masks = {f'p{i}': torch.rand(s) > .5 for i, s in enumerate(shapes)}
    got = P.load_masks(P.save_masks(masks, tmp_path_factory.mktemp('m')/'m'))
    assert got.keys() == masks.keys() and all(torch.equal(got[k], masks[k]) for k in masks)


def test_masks_file_refused(tmp_path):
    sp = Sparsifier(net(), layer_type=[nn.Conv2d, nn.Linear]).sparsify_model(.6)
    file = P.save_masks(sp, tmp_path/'m')
    def refused(match, to, f=file):
        before = {k: v.clone() for k, v in to.masks.items()} if isinstance(to, Sparsifier) else {}
        with pytest.raises((ValueError, TypeError, OSError), match=match): P.load_masks(f, to)
        assert all(torch.equal(to.masks[k], v) for k, v in before.items())
    refused('one side only', Sparsifier(net()))
    refused('one side only', nn.Linear(2, 2))
    refused('Sparsifier or a model', 3)
    wide = nn.Sequential(*net())
    wide[7] = nn.Linear(16, 5)
    refused('shape', Sparsifier(wide, layer_type=[nn.Conv2d, nn.Linear]))
    parts = P.save_masks({k: m for k, m in sp.masks.items() if k != '7.weight'}, tmp_path/'parts')
    refused('parts of units', Sparsifier(net(), granularity='kernel'), parts)
    whole = file.read_bytes()
    for bad in (whole[:-1], whole[:20], b'', b'\0'*64, whole.replace(b'sparsify masks 1', b'sparsify masks 9')):
        (tmp_path/'bad').write_bytes(bad)
        refused('damaged', None, tmp_path/'bad')
    with pytest.raises(FileNotFoundError): P.load_masks(tmp_path/'none')
    for bad in (3, {'a': torch.ones(2)}, {1: torch.ones(2) > 0}):
        with pytest.raises(TypeError): P.save_masks(bad, tmp_path/'n')
    with pytest.raises(ValueError): P.save_masks(net(), tmp_path/'n')
    assert not (tmp_path/'n').exists()


def test_in_all():
    "`from sparsify.all import *` brings the ways across, and neither torch's names nor fastai's `Identity` change"
    import sparsify.all as A
    assert A.from_prune is P.from_prune and A.save_masks is P.save_masks and hasattr(A.Sparsifier, 'to_prune')
    assert not {'remove', 'identity', 'Identity', 'l1_unstructured'} & set(vars(A))
