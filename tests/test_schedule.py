"What the notebook of `schedule` cannot own: grids, properties, every golden value, fastai's curves, fresh processes"
import copy, itertools, math, pickle, subprocess, sys
from dataclasses import FrozenInstanceError, dataclass
from functools import lru_cache, partial, wraps
import numpy as np
import pytest
import torch
from fastai.callback import schedule as fs
from hypothesis import given, settings, strategies as st
from sparsify import schedule as S
from sparsify.schedule import (At, Constant, Cosine, Cycling, Every, Exp, Lambda, Linear, Power, Schedule, StepSchedule, as_schedule,
    as_step_schedule, as_update, agp, cos, dsd, iterative, lin, one_cycle, one_shot, sched_agp, sched_cos, sched_dsd, sched_iterative,
    sched_lin, sched_one_cycle, sched_one_shot)

READY = dict(lin=lin, cos=cos, agp=agp, one_cycle=one_cycle, one_shot=one_shot, iterative=iterative, dsd=dsd)
RISING = {k: v for k,v in READY.items() if k!='dsd'}
NS = (1, 2, 3, 5, 10, 57, 100)
FRACTIONS = (0., .05, .2, 1/3, .55, .75, .999, 1.)

# ---- golden tables

POSITIONS = (0, .1, .25, .5, .75, .9, 1)
GOLDEN = dict(
    lin      =(sched_lin,       POSITIONS),
    cos      =(sched_cos,       (0, .024472, .146447, .5, .853553, .975528, 1)),
    agp      =(sched_agp,       (0, .271000, .578125, .875000, .984375, .999000, 1)),
    one_cycle=(sched_one_cycle, (.002473, .009955, .075884, .731304, .989345, .998976, 1)),
    iterative=(sched_iterative, (0, .333333, .333333, .666667, 1, 1, 1)),
    one_shot =(sched_one_shot,  (1,)*7),
    dsd      =(sched_dsd,       (0, .095492, .5, 1, .5, .095492, 0)))

@pytest.mark.parametrize('name', GOLDEN)
def test_golden_curves(name):
    curve, want = GOLDEN[name]
    assert [curve(0, 1, p) for p in POSITIONS] == pytest.approx(want, abs=5e-7)
    assert [READY[name](p) for p in POSITIONS] == pytest.approx(want, abs=5e-7)
    assert [curve(.2, .8, p) for p in POSITIONS] == pytest.approx([.2+.6*w for w in want], abs=5e-7)

def test_golden_ends_are_exact():
    assert [READY[k](1) for k in GOLDEN] == [1]*6+[0]
    assert [READY[k](0) for k in ('lin', 'cos', 'agp', 'iterative', 'dsd')] == [0]*5
    assert dsd(.5)==1 and agp(.5)==.875 and lin(.25)==.25

@pytest.mark.parametrize('pos,want', [(0, 0), (.25, 1/3), (1/3, 1/3), (.34, 2/3), (2/3, 2/3), (.67, 1), (1e-7, 1/3)])
def test_iterative_jumps(pos, want): assert iterative(pos)==want

def test_iterative_steps_are_free_of_float_hazards():
    for n in range(1, 101): assert [sched_iterative(0, 1, k/n, n_steps=n) for k in range(n+1)] == [k/n for k in range(n+1)]

def test_golden_gmp():
    "Zhu & Gupta, 0 to .9 between steps 2000 and 30000: as positions, and through the clock of a run of 40000 batches"
    want = {2000: 0, 2500: .0473584, 9000: .5203125, 16000: .7875, 23000: .8859375, 29500: .8999949, 30000: .9}
    clocked = agp.but(start=.05, end=.75)
    for t,v in want.items():
        assert .9*agp((t-2000)/28000) == pytest.approx(v, abs=5e-8)
        assert .9*clocked.at(t, 40000) == pytest.approx(v, abs=5e-8)
    assert clocked.at(0, 40000)==clocked.at(1999, 40000)==0 and .9*clocked.at(39999, 40000)==.9
    assert .5*agp(9/20) == pytest.approx(.416813, abs=6e-7) and .5*agp(10/20)==.4375

@pytest.mark.parametrize('s,want', [
    (Linear(0, 1e-3), {0: 0, 100: .1, 500: .5, 1000: 1, 1500: 1.5}),
    (Exp(.3, -1e-3, .9), {0: .3, 100: .357098, 1000: .679272, 5000: .895957}),
    (Power(.9, .999), {0: .9, 100: .814313, 1000: .330926}),
    (Power(.5, .5), {0: .5, 1: .25, 2: .125}),
    (Cosine(.3, 1000), {0: .3, 250: .256066, 500: .15, 750: .043934, 1000: 0, 1500: .15, 2000: .3}),
    (Cosine(.9, 100, .1), {0: .9, 50: .5, 100: .1, 150: .5, 200: .9}),
    (Constant(.7), {0: .7, 10**6: .7})], ids=repr)
def test_golden_step_schedules(s, want):
    for t,v in want.items():
        assert s(t)==pytest.approx(v, abs=5e-7) and type(s(t)) is float
        assert s(torch.tensor(t)) == pytest.approx(v, abs=5e-6)

@pytest.mark.parametrize('u,want', [
    (Every(100, stop=300), [0, 100, 200]), (Every(3, 2, 11), [2, 5, 8]), (Every(5, 10, 25), [10, 15, 20]), (Every(3, stop=10), [0, 3, 6, 9]),
    (Every(100, start=50), [50, 150, 250]), (At([2, 5, 7]), [2, 5, 7]), (At(torch.tensor([7, 2, 5])), [2, 5, 7]),
    (At(np.array([3])), [3]), (At(range(0, 9, 4)), [0, 4, 8]), (At({1, 2}), [1, 2])], ids=repr)
def test_golden_cadence(u, want):
    assert [t for t in range(301) if u(t)] == want
    assert [t for t in range(301) if u(torch.tensor(t))] == want
    assert type(u(0)) is bool

# ---- the clock

@pytest.mark.parametrize('name', RISING)
def test_clock_grid(name):
    "Rising, nothing before `start`, complete from `end` and always on the last batch"
    for n,start,end in itertools.product(NS, FRACTIONS, FRACTIONS):
        if end < start: continue
        s = RISING[name].but(start=start, end=end)
        ys, ps = [s.at(t, n) for t in range(n)], [s.position(t, n) for t in range(n)]
        assert ys == sorted(ys) and ys[-1]==1 and ps[-1]==1
        assert all(y==0 and p is None for t,(y,p) in enumerate(zip(ys, ps)) if t < start*n-1e-6 and t < n-1)
        assert all(y==1 for t,y in enumerate(ys) if t >= end*n-1e-6)
        assert s.begins(n) == next(t for t,p in enumerate(ps) if p is not None)
        assert [t for t in range(n) if s.changes(t, n)] == [t for t in range(n) if ys[t]!=([0.]+ys)[t]]

@pytest.mark.parametrize('n', (1, 2, 5, 100))
def test_dsd_ends_at_zero(n):
    assert dsd.at(n-1, n)==0
    if n==100: assert max(dsd.at(t, n) for t in range(n)) > .999

def test_clock_by_hand():
    assert [lin.at(t, 5) for t in range(5)] == [0, .25, .5, .75, 1]
    assert lin.at(0, 1)==1 and lin.at(7, 5)==1
    assert [one_shot.at(t, 4) for t in range(4)] == [0, 0, 1, 1]
    assert [one_shot.changes(t, 4) for t in range(4)] == [False, False, True, False]
    assert [lin.but(start=1.).position(t, 3) for t in range(3)] == [None, None, 1]
    assert [lin.but(end=0.).at(t, 3) for t in range(3)] == [1, 1, 1]
    assert lin.but(start=.5, end=.5).at(2, 4)==1 and lin.but(start=.5, end=.5).at(1, 4)==0
    assert lin.but(start_val=.3).at(0, 5)==.3 and lin.but(start=.5, start_val=.3).at(1, 5)==.3
    assert one_shot.but(start=0.).changes(0, 5) and not lin.changes(0, 5)

@pytest.mark.parametrize('n', (100, 1000, 12345))
def test_ceiling_is_free_of_float_hazards(n):
    "Batch k begins a window that opens at k/n, whatever k/n*n is in floats; so does any two-digit fraction of 100 batches"
    for k in range(0, n, max(1, n//500)):
        assert lin.but(start=k/n).begins(n)==k
    if n==100: assert [lin.but(start=round(k*.01, 2)).begins(100) for k in range(100)] == list(range(100))

def test_a_long_fit_changes_at_every_batch():
    assert sum(lin.changes(t, 5000) for t in range(5000)) == 4999
    assert sum(iterative.changes(t, 5000) for t in range(5000)) == 3

fraction = st.floats(0, 1, allow_nan=False)
window = st.tuples(fraction, fraction).map(sorted)

@settings(max_examples=150, deadline=None)
@given(w=window, vals=st.tuples(fraction, fraction), n=st.integers(1, 400), name=st.sampled_from(sorted(READY)), data=st.data())
def test_share_properties(w, vals, n, name, data):
    s = READY[name].but(start=w[0], end=w[1], start_val=vals[0], end_val=vals[1])
    lo, hi = sorted(vals)
    t = data.draw(st.integers(0, n-1))
    pos = s.position(t, n)
    assert lo <= s.at(t, n) <= hi and (pos is None or 0 <= pos <= 1)
    assert s.at(n-1, n) == (vals[0] if name=='dsd' else vals[1])
    assert 0 <= s.begins(n) <= n-1 and s.position(s.begins(n), n) is not None
    assert s.at(t, n)==s.at(t, n) and (pos is not None or s.at(t, n)==vals[0])
    if t and name not in ('dsd',):
        a, b = s.at(t-1, n), s.at(t, n)
        assert a <= b if vals[0] <= vals[1] else a >= b

@settings(max_examples=100, deadline=None)
@given(a=fraction, b=fraction, pos=fraction)
def test_share_is_within_its_values(a, b, pos):
    s = lin.but(start_val=a, end_val=b)
    assert min(a, b) <= s(pos) <= max(a, b) and s(1)==b and s(0)==a

@settings(max_examples=100, deadline=None)
@given(freq=st.integers(1, 50), start=st.integers(0, 100), length=st.integers(1, 200))
def test_every_properties(freq, start, length):
    due = [t for t in range(400) if Every(freq, start, start+length)(t)]
    assert due == list(range(start, start+length, freq))

@settings(max_examples=100, deadline=None)
@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=6), updates=st.lists(st.booleans(), max_size=30), wrap=st.booleans())
def test_cycling_properties(values, updates, wrap):
    c, other = Cycling(values, wrap), Cycling(values, wrap)
    for u in updates: c.update(u)
    k = sum(updates)
    assert c(0) == values[k%len(values) if wrap else min(k, len(values)-1)]
    other.load_state_dict(copy.deepcopy(c.state_dict()))
    c.update(True), other.update(True)
    assert c(0)==other(0)

# ---- a value

@pytest.mark.parametrize('name', READY)
def test_is_a_value(name):
    s = READY[name]
    assert s==pickle.loads(pickle.dumps(s))==copy.deepcopy(s)==s.but()
    assert hash(s)==hash(pickle.loads(pickle.dumps(s)))
    assert s!=s.but(start=.1) and s!=s.curve and len({s, s.but()})==1
    with pytest.raises(FrozenInstanceError): s.start = .3
    with pytest.raises(FrozenInstanceError): del s.curve
    before = repr(s), s._value()
    for t in range(20): s.at(t, 20), s.changes(t, 20)
    s.falls, s.plot()
    assert (repr(s), s._value())==before and s.falls==(name=='dsd')
    assert pickle.loads(pickle.dumps(s))==s

def test_partial_curves_are_values_too():
    five, five_ = (Schedule(partial(sched_iterative, n_steps=5), start=.2, stepped=True) for _ in range(2))
    assert five==five_==pickle.loads(pickle.dumps(five))==copy.deepcopy(five) and hash(five)==hash(five_)
    assert five!=iterative and five!=five.but(curve=partial(sched_iterative, n_steps=4))
    assert [five(p) for p in (.1, .3, .5, .7, .9)] == [.2, .4, .6, .8, 1]
    assert repr(five)=='Schedule(partial(sched_iterative, n_steps=5), start=0.2, stepped=True)'

def test_a_curve_that_cannot_be_hashed():
    @dataclass
    class Curve:
        power: int
        def __call__(self, pos): return pos**self.power
    assert Schedule(Curve(2))==Schedule(Curve(2)) and repr(Schedule(Curve(2)))=='Schedule(Curve)'
    with pytest.raises(TypeError): hash(Schedule(Curve(2)))

def test_two_users_do_not_interact():
    alone = [agp.at(t, 50) for t in range(50)]
    both = [(agp.at(t, 50), agp.at(3*t%7, 7)) for t in range(50)]
    assert [a for a,_ in both]==alone

def test_reprs():
    assert repr(agp)=='Schedule(sched_agp, start=0.2)' and repr(lin)=='Schedule(sched_lin)'
    assert repr(dsd)=='Schedule(sched_dsd, ends=0.0)'
    assert 'SchedPoly' in repr(Schedule(fs.SchedPoly(0, 1, 2))) and '<lambda>' in repr(Schedule(lambda p: p))
    assert repr(At({7, 2, 5}))=='At([2, 5, 7])' and repr(Every(5))=='Every(freq=5, start=0, stop=None)'

def test_falls():
    assert lin.but(start_val=1, end_val=.5).falls and one_shot.but(start_val=1, end_val=.5).falls
    assert not lin.but(start_val=.5, end_val=.5).falls and not Schedule(fs.combined_cos(.3, 0, .5, 1)).falls
    assert Schedule(lambda p: p + .2*math.sin(2*math.pi*p)*(p<.99)).falls

def test_noise_of_a_curve_stays_out_of_the_share():
    s = Schedule(lambda p: p*(1+5e-7))
    assert s(1)==1 and max(s(i/1000) for i in range(1001))==1
    assert Schedule(lambda p: torch.tensor(p, dtype=torch.float32)**2).at(4, 5)==1
    assert lin(1.0000000000000004)==1 and lin(-1e-9)==0

# ---- which curves are accepted

@fs.annealer
def annealed_square(start, end, pos): return start + pos**2*(end-start)

def passed_on(f):
    @wraps(f)
    def _inner(*args, **kwargs): return f(*args, **kwargs)
    return _inner

class Ramp:
    def __call__(self, pos): return pos

CURVES = {
    'fastai sched_cos': (fs.sched_cos, .146447), 'fastai sched_lin': (fs.sched_lin, .25), 'SchedCos(0, 1)': (fs.SchedCos(0, 1), .146447),
    'SchedCos': (fs.SchedCos, .146447), 'SchedLin(0, 1)': (fs.SchedLin(0, 1), .25), 'SchedExp': (fs.SchedExp(.01, 1), .031623),
    'SchedPoly': (fs.SchedPoly(0, 1, 2), .0625), 'combine_scheds': (fs.combine_scheds([.3, .7], [fs.SchedCos(0, .5), fs.SchedLin(.5, 1)]), .466506),
    'combined_cos': (fs.combined_cos(.5, 0, .5, 1), .25), 'annealer': (annealed_square, .0625), 'annealer(0, 1)': (annealed_square(0, 1), .0625),
    'lambda s, e, p': (lambda s, e, p: s + p*(e-s), .25), 'lambda p': (lambda p: p**2, .0625), 'default': (lambda p, power=3: p**power, .015625),
    'wraps': (passed_on(sched_agp), .578125), 'lru_cache': (lru_cache(sched_agp), .578125), 'partial': (partial(sched_lin, 0., 1.), .25),
    'keyword': (partial(sched_iterative, n_steps=5), .4), 'object': (Ramp(), .25), 'method': (Ramp().__call__, .25), 'math.sqrt': (math.sqrt, .5),
    'numpy': (np.square, .0625), 'np.float32': (lambda p: np.float32(p), .25), 'tensor': (lambda p: torch.tensor(p)**2, .0625)}

@pytest.mark.parametrize('name', CURVES)
def test_curves_accepted(name):
    curve, want = CURVES[name]
    s = as_schedule(curve)
    assert isinstance(s, Schedule) and s(.25)==pytest.approx(want, abs=1e-6) and s(1)==1 and type(s(.25)) is float
    assert s.at(9, 10)==1 and not s.falls and repr(s).startswith('Schedule(')
    assert Schedule(curve, start=.2, start_val=.5, end_val=.9).at(9, 10)==.9

def test_same_curves_as_fastai():
    for p in np.linspace(0, 1, 101):
        assert sched_lin(.2, .9, p)==pytest.approx(fs.sched_lin(.2, .9, p)) and sched_cos(.2, .9, p)==pytest.approx(fs.sched_cos(.2, .9, p))

def test_ours_as_fastai_schedules():
    "The signature is fastai's, so the curves also schedule fastai's hyper-parameters"
    f = fs.combine_scheds([.5, .5], [partial(sched_agp, 0., 1.), fs.annealer(sched_dsd)(1., 0.)])
    assert f(.25)==.875 and f(.75)==pytest.approx(0)

BAD_CURVES = [
    ('agp', TypeError, 'Did you mean agp, without the quotes'), ('gradual', TypeError, 'agp, cos, dsd, iterative, lin, one_cycle, one_shot'),
    (None, TypeError, 'None is no schedule'), (.5, TypeError, 'is no schedule'), ([0, 1], TypeError, 'is no schedule'),
    (lambda: 1, TypeError, 'not 0'), (lambda a, b, c, d: 1, TypeError, 'not 4'), (lambda a, b: 1, TypeError, 'not 2'),
    (lambda a, b: 1/a, TypeError, 'not 2'), (lambda *a: 1, TypeError, 'wrap it: lambda pos'), (partial(sched_lin, start=0, end=1), TypeError, 'wrap it'),
    (lambda p, *, k: p, TypeError, 'wrap it'), (agp.curve, None, ''),
    (lambda p: 1/p, ValueError, 'raised ZeroDivisionError at position 0.0'), (fs.sched_exp, ValueError, 'raised ZeroDivisionError at position'),
    (lambda p: None, ValueError, 'raised TypeError at position 0.0'), (lambda p: 'a', ValueError, 'raised ValueError at position 0.0'),
    (lambda p: math.nan if p > .5 else p, ValueError, 'gives nan at position 0.51'), (lambda p: math.inf*p if p else 0, ValueError, 'gives inf at position 0.01'),
    (lambda p: 1.5*p, ValueError, 'gives 1.005 at position 0.67'), (lambda p: p-.1, ValueError, 'gives -0.1 at position 0.0'),
    (lambda p: 100*p, ValueError, 'allowed is [0, 1]'), (fs.SchedCos(0, .9), ValueError, 'gives 0.9 at position 1, not 1'),
    (fs.sched_no, ValueError, 'ends=0)'), (sched_dsd, ValueError, 'Schedule(sched_dsd, ends=0)'), (lambda p: 1-p, ValueError, 'ends=0)')]

@pytest.mark.parametrize('curve,exc,says', BAD_CURVES, ids=range(len(BAD_CURVES)))
def test_curves_refused(curve, exc, says):
    for make in (as_schedule, Schedule):
        if exc is None: assert make(curve)
        else:
            with pytest.raises(exc) as e: make(curve)
            assert says in str(e.value)

@pytest.mark.parametrize('kw,exc,says', [
    (dict(start=25), ValueError, 'start=25: a fraction of training in [0, 1] is needed, did you mean 0.25?'),
    (dict(end=80), ValueError, 'did you mean 0.8?'), (dict(start=-.1), ValueError, 'start=-0.1'), (dict(end=1.0001), ValueError, 'end=1.0001'),
    (dict(start=math.nan), ValueError, 'start=nan'), (dict(end=math.inf), ValueError, 'end=inf'), (dict(start=True), TypeError, 'start=True'),
    (dict(start='.5'), TypeError, "start='.5'"), (dict(end=None), TypeError, 'end=None'), (dict(start=.5, end=.2), ValueError, 'end=0.2 < start=0.5'),
    (dict(start_val=90), ValueError, 'did you mean 0.9?'), (dict(end_val=1.2), ValueError, 'end_val=1.2: a share of the target'),
    (dict(end_val=-1), ValueError, 'end_val=-1'), (dict(ends=2), ValueError, 'ends=2'), (dict(ends=.5), ValueError, 'gives 1 at position 1, not 0.5'),
    (dict(stepped=1), TypeError, 'stepped=1'), (dict(strat=.5), TypeError, 'strat')])
def test_windows_refused(kw, exc, says):
    for make in (partial(Schedule, sched_lin), lin.but):
        with pytest.raises(exc) as e: make(**kw)
        assert says in str(e.value)

def test_other_refusals():
    with pytest.raises(TypeError, match='is a Schedule already'): Schedule(agp, start=.5)
    for pos in (-.1, 1.1, math.nan):
        with pytest.raises(ValueError, match='pos='): lin(pos)
    for bad in ((-1, 5), (0, 0), (0, -3)):
        with pytest.raises(ValueError, match='a whole number of at least'): lin.at(*bad)
    for bad in ((.5, 5), (0, 5.), (True, 5), (0, None)):
        with pytest.raises(TypeError, match='a whole number is needed'): lin.position(*bad)
    for f in (lin.begins, partial(lin.changes, 0)):
        with pytest.raises(ValueError, match='n=0'): f(0)

def test_as_schedule_leaves_a_schedule_alone():
    for s in READY.values(): assert as_schedule(s) is s

def test_ready_made_windows():
    assert {k: (v.start, v.end, v.start_val, v.end_val, v.ends, v.stepped) for k,v in READY.items()} == dict(
        lin=(0, 1, 0, 1, 1, False), cos=(0, 1, 0, 1, 1, False), agp=(.2, 1, 0, 1, 1, False), one_cycle=(0, 1, 0, 1, 1, False),
        one_shot=(.5, 1, 0, 1, 1, True), iterative=(.2, 1, 0, 1, 1, True), dsd=(0, 1, 0, 1, 0, False))

@pytest.mark.parametrize('name', READY)
def test_stepped_is_true(name):
    "A stepped schedule takes few values, the others many"
    s = READY[name]
    assert (len({s.at(t, 500) for t in range(500)}) < 10)==s.stepped

# ---- functions of the step

class Square(StepSchedule):
    def compute(self, step): return step**2

def test_a_subclass_needs_compute_only():
    s = Square()
    assert s(3)==9 and s.bounds(1, 3)==(1, 9, 9) and s.state_dict()=={} and s.load_state_dict({}) is None
    s.update(True)
    assert s(3)==9 and as_step_schedule({'type': 'square'})(2)==4
    with pytest.raises(ValueError, match='has no state'): s.load_state_dict({'index': 1})
    with pytest.raises(TypeError, match='abstract'): StepSchedule()
    class Empty(StepSchedule): pass
    with pytest.raises(TypeError, match='compute'): Empty()

@pytest.mark.parametrize('s,begin,end,want', [
    (Linear(0, .001), 0, 500, (0, .5, .5)), (Linear(1, -.001), 0, 500, (.5, 1, .5)), (Constant(.3), 0, 9, (.3, .3, .3)),
    (Cosine(.9, 100, .1), 0, 150, (.1, .9, .5)), (Cosine(.1, 100, .9), 0, 150, (.1, .9, .5)), (Cycling([.3, .1, .2]), 0, 9, (.1, .3, .2)),
    (Power(.5, .5), 0, 2, (.125, .5, .125)), (Exp(.3, -1., .9), 0, 10**6, (.3, .9, .9))], ids=repr)
def test_bounds(s, begin, end, want): assert s.bounds(begin, end)==pytest.approx(want)

def test_lambda():
    assert Lambda(lambda t: torch.tensor(t/4))(1)==.25 and Lambda(abs).bounds(0, 1) is None
    assert pickle.loads(pickle.dumps(Lambda(math.sqrt)))(4)==2

@pytest.mark.parametrize('s', [Constant(.1), Linear(0, 1), Exp(1, -1), Power(1, .5), Cosine(1, 10)], ids=repr)
def test_values_without_state(s):
    assert s==pickle.loads(pickle.dumps(s))==copy.deepcopy(s) and hash(s)==hash(copy.deepcopy(s)) and s.state_dict()=={}
    before = s(3)
    s.update(True)
    assert s(3)==before
    with pytest.raises(FrozenInstanceError): s.init = s.value = 0

def test_cycling_is_its_own():
    given = [.1, .2, .3]
    a, b = as_step_schedule(given), as_step_schedule(given)
    a.update(True), a.update(False)
    given[1] = 9
    assert a(0)==.2 and b(0)==.1 and a.state_dict()=={'index': 1} and type(a.state_dict()['index']) is int
    assert pickle.loads(pickle.dumps(a))(0)==copy.deepcopy(a)(0)==.2
    b.load_state_dict(a.state_dict())
    assert b(0)==.2
    for bad in ({'index': 3}, {'index': -1}, {}, {'place': 1}):
        with pytest.raises(ValueError): b.load_state_dict(bad)
    assert b(0)==.2

@pytest.mark.parametrize('x,same', [
    (.3, Constant(.3)), (1, Constant(1)), (np.float32(.5), Constant(.5)), (Linear(0, 1), Linear(0, 1)),
    ({'type': 'constant', 'value': .3}, Constant(.3)), ({'type': 'Linear', 'init': 0, 'slope': .001}, Linear(0, .001)),
    ({'type': 'EXP', 'init': .3, 'gamma': -.1}, Exp(.3, -.1)), ({'type': 'exp', 'init': .3, 'gamma': -.1, 'final': .9}, Exp(.3, -.1, .9)),
    ({'type': 'power', 'init': .5, 'beta': .5}, Power(.5, .5)), ({'type': 'cosine', 'init': .3, 'half_period': 9, 'minimum': .1}, Cosine(.3, 9, .1))])
def test_as_step_schedule(x, same):
    before = copy.deepcopy(x)
    assert as_step_schedule(x)==same and x==before

def test_as_step_schedule_lists_and_functions():
    for x in ([.1, .2], (.1, .2), {'type': 'cycling', 'values': [.1, .2]}, {'type': 'cycling', 'values': [.1, .2], 'wrap': False}):
        s = as_step_schedule(x)
        assert isinstance(s, Cycling) and s.values==[.1, .2]
        assert as_step_schedule(s) is s
    assert as_step_schedule(math.sqrt)(4)==2 and as_step_schedule(fs.SchedPoly(0, 1, 2))(.5)==.25

@pytest.mark.parametrize('x,exc,says', [
    (None, ValueError, 'None'), ('x', ValueError, "'x'"), ({1}, ValueError, '{1}'), (True, TypeError, 'True'), (Linear, TypeError, 'a class'), (agp, TypeError, 'progress'),
    ({}, ValueError, '`type` is needed'), ({'init': 1}, ValueError, 'constant, linear, exp, power, cosine, cycling'), ({'type': 3}, ValueError, '`type` is needed'),
    ({'type': 'cosin', 'init': 1}, ValueError, "did you mean 'cosine'?"), ({'type': 'xyz'}, ValueError, 'constant, linear, exp, power, cosine, cycling'),
    ({'type': 'linear', 'init': 0}, ValueError, 'slope'), ({'type': 'linear', 'init': 0, 'slop': 1, 'slope': 1}, ValueError, 'slop'),
    ([], ValueError, 'at least one'), (['a'], TypeError, "'a'"), ([.1, True], TypeError, 'True'), (math.nan, ValueError, 'nan')])
def test_as_step_schedule_refuses(x, exc, says):
    with pytest.raises(exc) as e: as_step_schedule(x)
    assert says in str(e.value)

@pytest.mark.parametrize('make,exc,says', [
    (lambda: Exp(.3, 0), ValueError, 'gamma=0'), (lambda: Exp(.3, .1), ValueError, 'did you mean -0.1?'), (lambda: Power(.9, -.5), ValueError, 'beta=-0.5'),
    (lambda: Cosine(.3, 0), ValueError, 'half_period=0'), (lambda: Cosine(.3, -5), ValueError, 'half_period=-5'), (lambda: Cycling([]), ValueError, 'at least one'),
    (lambda: Cycling(.3), TypeError, 'a list'), (lambda: Cycling('abc'), TypeError, 'a list'), (lambda: Cycling([1], 'no'), TypeError, "wrap='no'"), (lambda: Constant('a'), TypeError, "value='a'"),
    (lambda: Constant(None), TypeError, 'value=None'), (lambda: Constant(True), TypeError, 'value=True'), (lambda: Linear(0, math.inf), ValueError, 'slope=inf'),
    (lambda: Lambda(3), TypeError, 'fn=3'), (lambda: Every(0), ValueError, 'freq=0'), (lambda: Every(-1), ValueError, 'freq=-1'), (lambda: Every(2.), TypeError, 'freq=2.0'),
    (lambda: Every(True), TypeError, 'freq=True'), (lambda: Every(1, -1), ValueError, 'start=-1'), (lambda: Every(1, 5, 5), ValueError, 'stop=5 <= start=5'),
    (lambda: Every(1, 5, 3), ValueError, 'stop=3 <= start=5'), (lambda: Every(stop='a'), TypeError, "stop='a'"), (lambda: At([]), ValueError, 'empty'),
    (lambda: At(torch.tensor([])), ValueError, 'empty'), (lambda: At(5), TypeError, 'At([100, 200])'), (lambda: At('12'), TypeError, "steps='12'"),
    (lambda: At([1, 2.5]), TypeError, '2.5'), (lambda: At([-1]), ValueError, '-1'), (lambda: At(torch.tensor([1.])), TypeError, '1.0'), (lambda: At([True]), TypeError, 'True')])
def test_step_values_refused(make, exc, says):
    with pytest.raises(exc) as e: make()
    assert says in str(e.value)

# ---- cadence

def test_cadence_values():
    assert Every(np.int64(5))==Every(5) and type(Every(np.int64(5)).freq) is int
    assert At([1, 2])==At((2, 1, 1))==pickle.loads(pickle.dumps(At([1, 2]))) and hash(At([1, 2]))==hash(At({2, 1}))
    assert Every(5)==pickle.loads(pickle.dumps(Every(5)))
    with pytest.raises(FrozenInstanceError): Every().freq = 3

@pytest.mark.parametrize('x,same', [(None, Every(1)), (5, Every(5)), (np.int64(5), Every(5)), ({'freq': 5}, Every(5)), ({'freq': 5, 'start': 10, 'stop': 25}, Every(5, 10, 25)),
    ({'freq': 5, 'stop': None}, Every(5)), ({'steps': [1, 2]}, At([1, 2])), ({'steps': torch.tensor([1, 2])}, At([1, 2])), (At([3]), At([3])), (Every(2), Every(2))])
def test_as_update(x, same): assert as_update(x)==same

def test_as_update_takes_any_function():
    def f(step): return step==3
    assert as_update(f) is f

@pytest.mark.parametrize('x,exc', [({}, ValueError), ('x', ValueError), (5., ValueError), ([1, 2], ValueError), (0, ValueError), (-3, ValueError),
    ({'start': 5}, ValueError), ({'freq': 5, 'steps': [1]}, ValueError), ({'freq': 5, 'frequency': 1}, ValueError), ({'steps': [1], 'stop': 5}, ValueError), ({'steps': []}, ValueError),
    (True, TypeError), (False, TypeError), (Every, TypeError), (agp, TypeError), (Constant(1), TypeError), ({'freq': 2.5}, TypeError)])
def test_as_update_refuses(x, exc):
    with pytest.raises(exc): as_update(x)

# ---- plots and imports

def test_plot():
    from matplotlib import pyplot as plt
    from matplotlib.figure import Figure
    before = plt.get_fignums()
    fig = agp.plot(n=5)
    assert isinstance(fig, Figure) and plt.get_fignums()==before
    line, dots = fig.axes[0].lines
    assert list(dots.get_xdata())==[0, .2, .4, .6, .8] and list(dots.get_ydata())==[agp.at(t, 5) for t in range(5)]
    assert line.get_ydata()[0]==0 and line.get_ydata()[-1]==1 and line.get_label()=='agp'
    fig2, ax = plt.subplots()
    assert all(s.plot(ax=ax) is fig2 for s in READY.values()) and len(ax.lines)==7
    for w in ((0., 0.), (1., 1.), (.5, .5)): assert lin.but(start=w[0], end=w[1]).plot().axes[0].lines[0].get_ydata()[-1]==1
    plt.close(fig2)

def test_import_is_light():
    "A fresh process gets the module without torch, fastai or matplotlib"
    code = ("import sys, sparsify.schedule as s; s.agp.at(3, 5); "
            "print(sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'fastai', 'matplotlib', 'numpy'}))")
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout.strip()=='[]'

def test_everything_exported_exists():
    assert all(hasattr(S, k) for k in S.__all__) and set(READY) <= set(S.__all__) and not any(k.startswith('_') for k in S.__all__)
