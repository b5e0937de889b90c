"""Drop and grow: published and hand-worked cases, what each algorithm's argument accepts, and what bad input is told."""
import math

import pytest
import torch
from torch import nn

from sparsify.algorithm import GMP, Clock, Static
from sparsify.callback import SparsifyCallback
from sparsify.dynamic import SNFS, SET, RigL
from sparsify.granularity import Grouped
from sparsify.group import Group
from sparsify.masks import drop, grow
from sparsify.schedule import Constant, Cosine, Every

NOW = Clock(1, 4, 1, 4)


def layer(w, mask, grad=None, a=None, **kwargs):
    "A sparsifier of one Linear with these weights, mask and gradient"
    m = nn.Linear(len(w), 1, bias=False)
    m.weight.data[0] = torch.tensor(w, dtype=torch.float32)
    if grad is not None: m.weight.grad = torch.tensor([grad], dtype=torch.float32)
    sp = a.bind(nn.Sequential(m), layer_type=nn.Linear, **kwargs)
    sp.masks['0.weight'] = torch.tensor([[c=='1' for c in mask]])
    return sp


def after(a, w, mask, grad=None, **kwargs):
    sp = layer(w, mask, grad, a, **kwargs)
    a.swap(sp, a.shares(sp, NOW), NOW)
    return ''.join('01'[int(x)] for x in sp.masks['0.weight'][0]),sp.targets['0.weight'].param.detach()[0]


W,M = [.5, -.1, 0, 0, .9, .3, 0, 0],'11001100'

@pytest.mark.parametrize('w,g,mask,f,sparsity,want,left', [
    (W, [.1, .2, .9, .05, .3, .1, .4, .8], M, .5, .5, '10101001', [.5, 0, 0, 0, .9, 0, 0, 0]),
    (W, [.1, .95, .9, .05, .3, .1, .4, .8], M, .5, .5, '11101000', [.5, -.1, 0, 0, .9, 0, 0, 0]),
    ([.2]*4+[0]*4, [0]*4+[1]*4, '11110000', .5, .5, '11001100', [.2, .2]+[0]*6),
    ([1, 2, 3, 0], [0, 0, 0, 1], '1110', .3, .25, '1110', [1, 2, 3, 0]),
    ([1, 2, 3], [0, 0, 1], '111', .5, 0., '111', [1, 2, 3]),
    ([1, 2, 0, 0], [.1, .2, .9, .3], '1100', 1., .5, '0011', [0]*4),
    ([0, .3, 0, 0], [.1, .1, .5, .2], '1100', .5, .5, '0110', [0, .3, 0, 0])], ids='ABCDEFG')
def test_golden(w, g, mask, f, sparsity, want, left):
    m,new = after(RigL(sparsity, drop_fraction=Constant(f)), w, mask, g)
    assert m==want and torch.equal(new, torch.tensor(left, dtype=torch.float32))


def test_without_the_just_dropped(): assert after(RigL(.5, drop_fraction=Constant(.5), exclude_dropped=True), W, M, [.1, .95, .9, .05, .3, .1, .4, .8])[0]=='10101001'


SIGNED,MASK = [-9., 1, 4, -1, 5, 8, -2, 3],'01010110'

@pytest.mark.parametrize('f,signed,size', [(0, '01010110', '01010110'), (.25, '11010100', '11000110'), (.5, '11001100', '10001110'), (.75, '10101100', '10101100'), (1, '10101100', '10101100')])
def test_jaxpruner(f, signed, size):
    "Dropped by the signed score, or by its size; grown by the size"
    s,m = torch.tensor(SIGNED),torch.tensor([c=='1' for c in MASK])
    for score,want in ((s, signed), (s.abs(), size)):
        left = drop(score, m, 4-math.floor(4*f))
        assert ''.join('01'[int(x)] for x in grow(s.abs(), left, 4))==want
    assert after(RigL(.5, drop_fraction=Constant(float(f))), SIGNED, MASK, SIGNED)[0]==size


def test_jaxpruner_without_the_just_dropped(): assert after(RigL(.5, drop_fraction=Constant(1.), exclude_dropped=True), SIGNED, MASK, SIGNED)[0]=='10101001'


@pytest.mark.parametrize('shape', [(1,), (5,), (4,5), (2,9,1), (2,2,4,4)])
@pytest.mark.parametrize('sparsity', [0, .5, .95])
def test_counts_of_any_shape(shape, sparsity):
    class Any(nn.Module):
        def __init__(self): super().__init__(); self.w = nn.Parameter(torch.randn(shape))
    a = RigL(float(sparsity), drop_fraction=Constant(.5), context='local')
    if math.prod(shape)==1: return
    sp = a.bind(Any(), layer_type=lambda n, p: True)
    a.begin(sp)
    n = int(sp.masks['w'].sum())
    sp.targets['w'].param.grad = torch.randn(shape)
    a.swap(sp, a.shares(sp, NOW), NOW)
    assert n==int(sp.masks['w'].sum())==max(1, math.prod(shape)-round(sparsity*math.prod(shape)))


# ---- annealing

def fraction(t, T=75000, **kwargs): return RigL(.9, end=T, **kwargs).fraction(None, Clock(t, 2*T, t, 2*T))

@pytest.mark.parametrize('t,want', [(0, .3), (100, .29999868), (18750, .25606602), (25000, .225), (37500, .15), (56250, .04393398), (74900, 1.3159e-6), (75000, 0)])
def test_cosine(t, want): assert fraction(t)==pytest.approx(want, abs=1e-8)

def test_cosine_of_another_start(): assert fraction(25000+37500, 100000, start=25000)==pytest.approx(.15)      # from the start on, not from 0

def test_sparsimony(): assert RigL(.9, drop_fraction=.5, end=10).fraction(None, Clock(2, 20, 2, 20))==pytest.approx(.452254, abs=1e-6)

@pytest.mark.parametrize('anneal,want', [('constant', .3), ('linear', .15), ('cubic', .0375), (lambda p: 1-p*p, .225)])
def test_other_curves(anneal, want): assert fraction(37500, anneal=anneal)==pytest.approx(want)

@pytest.mark.parametrize('form,want', [([.1, .2, .4], [.1, .2, .4, .1]), ((.5, .3), [.5, .3, .5, .3]), (Constant(.2), [.2]*4), (lambda t: .1*t, [.1, .2, .3, .4]),
    ({'type': 'cosine', 'init': .3, 'half_period': 2}, [.15, 0, .15, .3]), (Cosine(.3, 2), [.15, 0, .15, .3]), (1., [1., 1., 1., 1.])])
def test_forms_of_the_fraction(form, want):
    "A number, list, tuple, dict, function, schedule: at steps 1 to 4, the second update, and so on"
    a = SET(.5, drop_fraction=form, anneal='constant')
    sp = layer(W, M, None, a)
    for t,f in enumerate(want, 1):
        assert a.fraction(sp, Clock(t, 9, t, 9))==pytest.approx(f, abs=1e-7)
        a.swap(sp, a.shares(sp, NOW), Clock(t, 9, t, 9))


# ---- when

def steps(a, n, epochs=1): return [t for t in range(n) if a.due(None, Clock(t, n, t, n, epochs=epochs))]

@pytest.mark.parametrize('kwargs,n,want', [
    ({}, 40, list(range(2, 30, 2))), ({}, 10000, list(range(100, 7500, 100))), (dict(update=10), 100, list(range(10, 75, 10))), (dict(update=10, end=1.), 50, [10, 20, 30, 40]), (dict(update=10, start=5), 50, [5, 15, 25, 35]),
    (dict(update=10, start=.5, end=.9), 100, [50, 60, 70, 80]), (dict(update={'freq': 100, 'stop': 1000}), 2000, list(range(100, 1000, 100))), (dict(update=Every(50, 50, 200)), 1000, [50, 100, 150]),
    (dict(update=Every(.1, stop=.5)), 200, [20, 40, 60, 80]), (dict(update={'steps': [3, 8]}), 20, [3, 8]), (dict(update=lambda t: t%7==0), 20, [7, 14]), (dict(update=Every(2, 1, 4)), 10, [1, 3])])
def test_due(kwargs, n, want): assert steps(SET(.5, **kwargs), n)==steps(RigL(.5, **kwargs), n)==want

def test_due_at_the_end_of_epochs(): assert steps(SET(.5, update='epoch'), 12, 3)==[3, 7]


# ---- section L of the cases

def test_the_negatives_nearest_to_zero_go():
    "Of -3, -2, -1, 1, 2, 3 a third: -1 and 1"
    w = [-3., -2, -1, 1, 2, 3]
    a = SET(.0, drop_fraction=Constant(1/3))
    for b in (a, SET(.0, drop_fraction=Constant(1/3), split_signs=True)):
        sp = layer(w, '111111', None, b)
        assert b.survivors(sp, sp._units('0.weight'), 4, 6).tolist()==[True, True, False, False, True, True]

def test_signs_are_split_in_proportion():
    "Six positive and three negative weights, a third: two of the one and one of the other, though all three smallest are positive"
    w = [.1, .2, .3, 1, 2, 3, -4, -5, -6]
    a = SET(.0, drop_fraction=Constant(1/3), split_signs=True)
    sp = layer(w, '1'*9, None, a)
    assert a.survivors(sp, sp._units('0.weight'), 6, 9).tolist()==[False, False, True, True, True, True, False, True, True]

def test_growth_never_lands_on_live_weights():
    assert grow(torch.tensor([9., 8, 1, 2]), torch.tensor([True, True, False, False]), 3).tolist()==[True, True, False, True]

def test_what_is_dropped_may_come_back_with_its_value():
    "5 and .1 active, one to drop, the gradient largest at .1: it comes back, and is .1"
    m,w = after(RigL(.5, drop_fraction=Constant(.5)), [5, .1, 0, 0], '1100', [0, 9, 1, 0])
    assert m=='1100' and torch.equal(w, torch.tensor([5, .1, 0, 0]))


# ---- balance

@pytest.mark.parametrize('side', ['in', 'out'])
def test_balanced_groups(side):
    "The same number in each of four groups of channels, at first and after each update"
    a = RigL(.75, drop_fraction=Constant(.5), **{f'balance_{side}_groups': 4})
    sp = a.bind(nn.Sequential(nn.Linear(8, 12)), layer_type=nn.Linear)
    assert a.granularity==Grouped(side, 4)
    a.begin(sp)
    for t in range(1, 20):
        m = sp.masks['0.weight']
        groups = m.T.reshape(4, -1) if side=='in' else m.reshape(4, -1)
        assert groups.sum(1).tolist()==[6]*4
        sp.targets['0.weight'].param.grad = torch.randn(12, 8)
        a.swap(sp, a.shares(sp, NOW), NOW)


# ---- groups

def group_of(groups, net=None): return {k: type(a).__name__ for a,m in groups.of(groups.bind(net or nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5)))) for k in m.targets}

@pytest.mark.parametrize('groups,want', [({'0.*': SET(.5), '*': RigL(.5)}, ['SET', 'RigL']), ({'*': SET(.5)}, ['SET', 'SET']), ({('2.*', '0.*'): GMP(.5)}, ['GMP', 'GMP']), ({lambda n, p: p.shape[0]==6: SET(.5), '2.weight': GMP(.5)}, ['SET', 'GMP'])])
def test_the_first_filter_that_matches(groups, want): assert list(group_of(Group(groups)).values())==want

def test_a_pattern_is_of_the_whole_name():
    class Net(nn.Module):
        def __init__(self): super().__init__(); self.fc1,self.xfc1 = nn.Linear(3, 3),nn.Linear(3, 3)
    with pytest.warns(UserWarning, match="no parameter is left for 'c1\\*'"): assert group_of(Group({'fc1.*': SET(.5), 'c1*': GMP(.5)}), Net())=={'fc1.weight': 'SET'}

def test_group_is_a_list():
    a,b = SET(.5),GMP(.5)
    g = Group().add(['0.*', '1.*'], a).extend(Group({'*': b}))
    assert len(g)==2 and g[0] is a and g[1] is b
    with pytest.raises(NotImplementedError, match='ask its members'): g.sparsity

@pytest.mark.parametrize('make,error,says', [
    (lambda: Group({'*': 5}), TypeError, '5 is no algorithm'), (lambda: Group({'*': Group()}), TypeError, 'another Group is not'), (lambda: Group({5: SET(.5)}), TypeError, 'a filter is 5'), (lambda: Group().add([], SET(.5)), TypeError, 'a filter is'),
    (lambda: Group().extend(SET(.5)), TypeError, 'no Group'), (lambda: Group().bind(nn.Linear(2, 2)), RuntimeError, 'is empty'), (lambda: Group({'nothing.*': SET(.5)}).bind(nn.Sequential(nn.Linear(3, 3))), ValueError, 'no filter .* 0.weight'),
    (lambda: SparsifyCallback(.5, algorithm=Group({'*': SET(.5)})), ValueError, 'members have their own'), (lambda: SparsifyCallback(algorithm=Group({'*': SET()})), ValueError, 'sparsity is missing: SET')])
def test_bad_groups(make, error, says):
    with pytest.raises(error, match=says): make()


# ---- bad input

@pytest.mark.parametrize('make,says', [
    (lambda: SET(1.), 'sparsity is 1'), (lambda: SET(150.), '150'), (lambda: RigL(-.1), '-0.1'), (lambda: SET(.5, drop_fraction=1.5), 'drop_fraction is 1.5'), (lambda: SET(.5, drop_fraction='x'), "drop_fraction is 'x'"),
    (lambda: SET(.5, drop_fraction=True), 'drop_fraction is True'), (lambda: SET(.5, anneal='cos'), "anneal is 'cos'.*cosine, constant"), (lambda: SET(.5, start=-1), 'start is -1'), (lambda: SET(.5, end=1.5), 'end is 1.5'),
    (lambda: SET(.5, update=0), 'freq=0'), (lambda: SET(.5, split_signs=True, granularity='row'), "split_signs with granularity='row'"), (lambda: SET(.5, init='zzz'), "init is 'zzz'"),
    (lambda: RigL(.5, grad_accum=0), 'grad_accum is 0'), (lambda: RigL(.5, balance_in_groups=2, balance_out_groups=2), 'one of them'), (lambda: RigL(.5, balance_in_groups=0), 'groups is 0'),
    (lambda: RigL(.5, balance_in_groups=2, granularity='filter'), 'contradict'), (lambda: SNFS(.5, momentum=1.), 'momentum is 1.0'), (lambda: SNFS(lambda t: .5, redistribute=True), 'leave out the schedule'),
    (lambda: SET(lambda t: .5, schedule=lambda p: p), 'function of the step already'), (lambda: SET(.5).check(SET(.5).bind(nn.Sequential(nn.Linear(9, 9)), layer_type=nn.Linear), 0), 'no step would be due|at most'),
    (lambda: SET(.5, update=200).check(SET(.5).bind(nn.Sequential(nn.Linear(9, 9)), layer_type=nn.Linear), 100), 'an update every 200 steps'),
    (lambda: SET(.5, start=90, end=80).check(SET(.5).bind(nn.Sequential(nn.Linear(9, 9)), layer_type=nn.Linear), 100), 'begin at step 90 and end at step 80'),
    (lambda: SparsifyCallback(algorithm=RigL()), 'sparsity is missing: RigL'), (lambda: SparsifyCallback(.5, algorithm=RigL(.9)), 'given twice')])
def test_bad_input(make, says):
    with pytest.raises(ValueError, match=says): make()

def test_filters_with_their_norm_are_refused():
    a = RigL(.5, granularity='filter', context='local')
    sp = a.bind(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
    with pytest.raises(ValueError, match='never comes back'): a.check(sp, 100)

def test_layers_too_small_to_move_are_named():
    a = RigL(.5, update=5, context='local')
    sp = a.bind(nn.Sequential(nn.Linear(2, 2), nn.Linear(20, 20)), layer_type=nn.Linear)
    with pytest.warns(UserWarning, match='nothing ever moves in 0.weight:'): a.check(sp, 100)

def test_a_run_without_updates_says_so():
    a = RigL(.5)
    with pytest.warns(UserWarning, match='RigL has no update in a fit of 1 steps'): a.check(a.bind(nn.Sequential(nn.Linear(9, 9)), layer_type=nn.Linear), 1)

def test_short_runs_say_how_often():
    a = SET(.5)
    with pytest.warns(UserWarning, match=r'SET updates every 5 of 100 steps \(every 100 in the papers'): a.check(a.bind(nn.Sequential(nn.Linear(9, 9)), layer_type=nn.Linear), 100)

def test_static_keeps_its_mask():
    a = Static(.5)
    sp = a.bind(nn.Sequential(nn.Linear(9, 9)), layer_type=nn.Linear)
    a.begin(sp)
    was = sp.masks['0.weight'].clone()
    for t in range(50): a.turn(sp, a.shares(sp, Clock(t, 50, t, 50)), Clock(t, 50, t, 50), 'before_batch')
    assert torch.equal(was, sp.masks['0.weight']) and int((~was).sum())==round(.5*81)
