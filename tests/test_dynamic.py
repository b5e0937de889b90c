"""SET, RigL and SNFS in all loops: counts that never change, masks recomputed from that moment's weights and gradients, real optimizer steps only, resume to the bit, groups."""
import math
import warnings

import numpy as np
import pytest
import torch
from fastai.basics import Callback, DataLoaders, Learner, SGD, Adam, noop
from fastai.callback.all import GradientAccumulation, GradientClip, MixedPrecision, ProgressCallback
from torch import nn

from sparsify.algorithm import GMP, Clock, Static
from sparsify.callback import SparsifyCallback
from sparsify.dynamic import SNFS, SET, RigL
from sparsify.group import Group
from sparsify.schedule import Constant

ALGORITHMS = [SET, RigL, SNFS]
LAYERS = dict(linear=lambda: nn.Linear(20, 30), conv1d=lambda: nn.Conv1d(6, 10, 5), conv2d=lambda: nn.Conv2d(6, 10, 3), conv3d=lambda: nn.Conv3d(3, 4, 3), depthwise=lambda: nn.Conv2d(30, 30, 3, groups=30),
              transposed=lambda: nn.ConvTranspose2d(6, 10, 3), lstm=lambda: nn.LSTM(7, 9), attention=lambda: nn.MultiheadAttention(12, 3), embedding=lambda: nn.Embedding(25, 8), tiny=lambda: nn.Linear(2, 3))


def fill_gradients(sp, g):
    for t in sp.targets.values(): t.param.grad = torch.randn(t.param.shape, generator=g)


@pytest.mark.parametrize('make', ALGORITHMS, ids=lambda a: a.__name__)
@pytest.mark.parametrize('layer', LAYERS)
@pytest.mark.parametrize('sparsity', [0, .5, .9, .99])
def test_counts_are_constant(make, layer, sparsity):
    "Over 200 updates, with weights that move: every layer keeps its number, what is grown was not alive and is 0, what is dropped is 0"
    torch.manual_seed(0)
    net = nn.Sequential(LAYERS[layer]())
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        a = make(float(sparsity), drop_fraction=Constant(.3), update=1)
        sp = a.bind(net, layer_type=nn.Module)
        a.begin(sp)
    count,g = {k: int(m.sum()) for k,m in sp.masks.items()},torch.Generator().manual_seed(0)
    total = sum(m.numel() for m in sp.masks.values())
    assert sum(count.values())==max(len(sp), total-round(sparsity*total))
    moved = 0
    for t in range(1, 201):
        fill_gradients(sp, g)
        clock = Clock(t, 202, t, 202)
        if a.watches: a.watch(sp, clock)
        for k,o in sp.targets.items(): o.param.data.copy_(torch.randn(o.param.shape, generator=g)).mul_(sp.masks[k])
        old = {k: m.clone() for k,m in sp.masks.items()}
        sp.held = True
        for place in a.places: a.turn(sp, a.shares(sp, clock), clock, place)
        sp.held = False
        assert {k: int(m.sum()) for k,m in sp.masks.items()}==count
        for k,m in sp.masks.items():
            w = sp.targets[k].param.detach()
            assert not w[~m].any() and not w[m & ~old[k]].any()
            moved += int((m & ~old[k]).sum())
    assert bool(moved)==any(math.floor(round(.3*n, 6))>0 and n<sp.masks[k].numel() for k,n in count.items())


def test_growth_starts_at_zero_with_its_memory():
    "Under SGD with momentum and Adam: at every update, weight and memory of what is grown are 0; what was dropped and regrown at once keeps both"
    for opt in (SGD, Adam):
        seen = []
        class Look(Callback):
            order = 80
            def after_step(self):
                sp = self.learn.sparsify.sparsifier
                for k,t in sp.targets.items():
                    m,s = sp.masks[k],self.learn.opt.state[t.param]
                    held = [v for v in s.values() if isinstance(v, torch.Tensor) and v.shape==m.shape]
                    assert held or opt is SGD
                    for v in (t.param.detach(), *held): assert not v[~m].any()
                    if k in self.before: seen.append(int((m & ~self.before[k]).sum()))
                    for v in (t.param.detach(), *held): assert not v[m & ~self.before.get(k, m)].any() or not self.moved
            def before_batch(self):
                sp = self.learn.sparsify.sparsifier
                self.before,self.moved = {k: m.clone() for k,m in sp.masks.items()},False
        learner(opt_func=opt).fit(1, 1e-2, cbs=[SparsifyCallback(algorithm=SET(.5, update=5), layer_type=nn.Linear), Look()])
        assert sum(seen)>0


def learner(n=40, **kwargs):
    torch.manual_seed(0)
    x,y = torch.randn(n, 8, 12),torch.randint(0, 3, (n, 8))
    batches = list(zip(x, y))
    learn = Learner(DataLoaders(batches, batches[:1]), nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 3)), loss_func=nn.CrossEntropyLoss(), **kwargs)
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn


def reference(w, g, mask, f):
    "Drop floor(f·n) by |w|, grow by |g|, ties to the lower index: sorted by NumPy, one layer"
    w,g,m = np.abs(w.flatten()),np.abs(g.flatten()),mask.flatten()
    n = int(m.sum())
    k = math.floor(round(f*n, 6))
    if n==m.size: return mask
    active = np.flatnonzero(m)
    keep = active[np.argsort(-w[active], kind='stable')[:n-k]]
    new = np.zeros_like(m)
    new[keep] = True
    free = np.flatnonzero(~new)
    new[free[np.argsort(-g[free], kind='stable')[:k]]] = True
    return new.reshape(mask.shape)


class Recomputed(Callback):
    "At each real step the state before it, and what RigL should have made of it; counts real optimizer steps"
    order = 10.4      # before RigL, after MixedPrecision has unscaled
    def __init__(self, every, end, anneal='constant'): self.every,self.end,self.anneal,self.real,self.updates = every,end,anneal,0,[]
    def before_step(self):
        sp,t = self.learn.sparsify.sparsifier,self.real
        self.state = {k: (o.param.detach().clone().numpy(), o.param.grad.clone().numpy(), sp.masks[k].clone().numpy()) for k,o in sp.targets.items()}
        self.seen = sp.updates
        self.due = 0<t<self.end and t%self.every==0
        self.f = .3/2*(1+math.cos(math.pi*t/self.end)) if self.anneal=='cosine' else .3
    def after_step(self):
        if not hasattr(self, 'state'): return
        sp = self.learn.sparsify.sparsifier
        if self.due:
            for k,(w,g,m) in self.state.items(): assert (sp.masks[k].numpy()==reference(w, g, m, self.f)).all(), (self.real, k)
            if sp.updates!=self.seen: self.updates.append(self.real)
        else: assert sp.updates==self.seen
        self.real += 1
        del self.state


@pytest.mark.parametrize('others', [(), (GradientClip(.1),), (GradientAccumulation(24),), (GradientAccumulation(16), GradientClip(.05))], ids=['plain', 'clip', 'accumulate 3', 'accumulate 2, clip'])
def test_rigl_is_recomputed(others):
    "At every update the mask is the one worked out from that moment's weights and dense, accumulated, unclipped gradient, and updates are counted in optimizer steps"
    n = 40*3//(math.ceil(others[0].n_acc/8) if others and isinstance(others[0], GradientAccumulation) else 1)
    probe = Recomputed(4, math.ceil(round(.75*n, 6)))
    cb = SparsifyCallback(algorithm=RigL(.6, update=4, anneal='constant'), layer_type=nn.Linear)
    learner().fit(3, 1e-2, cbs=[cb, probe, *others])
    assert probe.real==n and probe.updates==[t for t in range(4, probe.end, 4)] and len(probe.updates)==cb.sparsifier.updates-1


def test_rigl_is_recomputed_while_it_cools():
    "With the drop fraction on its half cosine; near the end it rounds down to nothing"
    probe = Recomputed(4, 90, 'cosine')
    learner().fit(3, 1e-2, cbs=[SparsifyCallback(algorithm=RigL(.6, update=4), layer_type=nn.Linear), probe])
    assert probe.updates[:10]==list(range(4, 44, 4)) and probe.updates[-1]<88


class CPUMixedPrecision(MixedPrecision):
    "fastai's MixedPrecision with torch's CPU autocast and scaler"
    def before_fit(self):
        self.autocast = torch.autocast('cpu', dtype=torch.float16)
        self.learn.scaler,self.scales = torch.amp.GradScaler('cpu', init_scale=2.**8),[]


class Overflow(Callback):
    "Puts an inf into the gradient of some steps, before it is unscaled"
    order = 5
    def __init__(self, at): self.at,self.n = at,0
    def before_step(self):
        if self.n in self.at: next(self.learn.model.parameters()).grad[0, 0] = float('inf')
        self.n += 1


@pytest.mark.parametrize('skipped', [(), (4, 9)], ids=['no overflow', 'two skipped'])
def test_rigl_under_fp16(skipped):
    "The gradient is unscaled; a step that overflows is none: no update, and the next ones come one batch later"
    probe,cb = Recomputed(4, 45),SparsifyCallback(algorithm=RigL(.6, update=4, end=45, anneal='constant'), layer_type=nn.Linear)
    learner().fit(2, 1e-2, cbs=[cb, probe, CPUMixedPrecision(), Overflow(skipped)])
    assert probe.real==80-len(skipped) and probe.updates==list(range(4, 45, 4)) and cb._now.step==probe.real


def test_a_gradient_that_is_not_finite_moves_nothing():
    "Without a scaler: no mask moves, once a warning says so, and the optimizer's step is not replaced"
    class NaN(Callback):
        order = 5
        def before_step(self):
            if self.learn.iter==4: self.learn.model[0].weight.grad[0, 0] = float('nan')
    cb = SparsifyCallback(algorithm=RigL(.6, update=4), layer_type=nn.Linear)
    with pytest.warns(UserWarning, match='not finite') as found: learner(8).fit(1, 1e-2, cbs=[cb, NaN()])
    assert sum('finite' in str(w.message) for w in found)==1 and cb.sparsifier.updates==1


@pytest.mark.parametrize('replaces', [True, False])
def test_an_update_replaces_the_step(replaces):
    "RigL leaves the optimizer step out, biases and all, unless it is told not to; the learning rate goes on"
    moved,lrs = [],[]
    class Look(Callback):
        order = 80
        def before_step(self): self.b = self.learn.model[0].bias.detach().clone()
        def before_batch(self): self.b0 = self.learn.model[0].bias.detach().clone()
        def after_batch(self):
            if self.training: moved.append(not torch.equal(self.learn.model[0].bias, self.b0)); lrs.append(self.learn.opt.hypers[-1]['lr'])
    learner(12).fit_one_cycle(1, 1e-2, cbs=[SparsifyCallback(algorithm=RigL(.5, update=4, replace_step=replaces), layer_type=nn.Linear), Look()])
    assert [i for i,m in enumerate(moved) if not m]==([4, 8] if replaces else []) and len(set(lrs))==12


def test_set_follows_the_step():
    "Every step is taken, and the mask changes after it"
    seen = []
    class Look(Callback):
        order = 10.4
        def before_step(self): self.n = self.learn.sparsify.sparsifier.updates; self.w = self.learn.model[0].bias.detach().clone()
        def after_step(self): self.same = self.learn.sparsify.sparsifier.updates==self.n and not torch.equal(self.w, self.learn.model[0].bias)
        def after_batch(self):
            if self.training: seen.append((self.same, self.learn.sparsify.sparsifier.updates-self.n))
    learner(12).fit(1, 1e-2, cbs=[SparsifyCallback(algorithm=SET(.5, update=4, anneal='constant'), layer_type=nn.Linear), Look()])
    assert all(same for same,_ in seen) and [i for i,(_,n) in enumerate(seen) if n]==[4, 8]


def test_per_epoch():
    "At the last step of each epoch but the last"
    at = []
    class Look(Callback):
        order = 80
        def after_batch(self):
            if self.training: at.append(self.learn.sparsify.sparsifier.updates)
    learner(10).fit(4, 1e-2, cbs=[SparsifyCallback(algorithm=SET(.5, update='epoch'), layer_type=nn.Linear), Look()])
    assert [i for i in range(1, 40) if at[i]!=at[i-1]]==[9, 19, 29]


def test_the_same_seed_the_same_masks():
    "Whatever the global generator did; another seed, other masks"
    def masks(seed, noise):
        learn = learner(20)
        torch.manual_seed(noise)
        learn.fit(1, 1e-2, cbs=SparsifyCallback(algorithm=SET(.5, update=3), layer_type=nn.Linear, seed=seed))
        return [m.clone() for m in learn.sparsify.sparsifier.masks.values()]
    a,b,c = masks(0, 1),masks(0, 1),masks(1, 1)
    assert all(map(torch.equal, a, b)) and not all(map(torch.equal, a, c))
    first = [SET(.5).bind(nn.Sequential(nn.Linear(12, 24)), layer_type=nn.Linear) for _ in range(2)]
    for i,sp in enumerate(first): torch.manual_seed(i); SET(.5).begin(sp)
    assert torch.equal(*[sp.masks['0.weight'] for sp in first])


def test_grad_accum_is_the_mean():
    "Of the gradients of the last two steps, the update's own the last"
    grads,used = [],[]
    class Look(Callback):
        order = 10.4
        def before_step(self): grads.append(self.learn.model[0].weight.grad.clone())
    class Spy(RigL):
        def grow_scores(self, sp, name, u):
            s = super().grow_scores(sp, name, u)
            if name=='0.weight': used.append((len(grads)-1, s.clone()))
            return s
    learner(12).fit(1, 1e-2, cbs=[SparsifyCallback(algorithm=Spy(.5, update=4, grad_accum=2), layer_type=nn.Linear), Look()])
    assert [t for t,_ in used]==[4, 8]
    for t,s in used: assert torch.allclose(s, (grads[t]+grads[t-1]).div(2).abs().flatten(), atol=1e-7)


def test_snfs_average():
    "e ← β·e + (1-β)·g: with a constant gradient c it is c·(1-β^t)"
    sp = SNFS(.5).bind(nn.Sequential(nn.Linear(2, 2)), layer_type=nn.Linear)
    for t in range(1, 4):
        sp.targets['0.weight'].param.grad = torch.full((2, 2), 2.)
        SNFS(.5).watch(sp, Clock(t, 9, t, 9))
        assert torch.allclose(sp.memory['average']['0.weight'], torch.full((2, 2), 2*(1-.9**t)))


@pytest.mark.parametrize('make', [SET, RigL, SNFS, lambda s, **kw: RigL(s, grad_accum=3, **kw), lambda s, **kw: SNFS(s, redistribute=True, **kw)], ids=['SET', 'RigL', 'SNFS', 'RigL, 3 gradients', 'SNFS, redistributed'])
def test_resumes_to_the_bit(make, tmp_path):
    "Four epochs, or two, a file and two more: the same weights, masks and memory"
    a = make(.7, update=7)
    def run(until, start=0, load=False):
        learn = learner(10, path=tmp_path, opt_func=Adam)
        cb = SparsifyCallback(algorithm=a, layer_type=nn.Linear)
        if load: learn.load('half')
        class Stop(Callback):
            def after_epoch(self):
                if self.epoch==until-1 and until<4: self.learn.save('half'); raise KeyboardInterrupt
        try: learn.fit(4, 1e-2, cbs=[cb, Stop()], start_epoch=start)
        except KeyboardInterrupt: pass
        return learn,cb
    whole,cb = run(4)
    run(2)
    torch.manual_seed(99)
    resumed,other = run(4, start=2, load=True)
    assert all(torch.equal(p, q) for p,q in zip(whole.model.parameters(), resumed.model.parameters()))
    assert all(torch.equal(m, other.sparsifier.masks[k]) for k,m in cb.sparsifier.masks.items()) and cb.sparsifier.updates==other.sparsifier.updates


def test_three_behaviours_side_by_side():
    "Static, RigL and GMP on one network in one run: one mask that stays, one that moves at a constant count, one that shrinks, and all exact"
    learn,seen = learner(40),[]
    learn.model = nn.Sequential(nn.Linear(12, 30), nn.ReLU(), nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 3))
    class Look(Callback):
        order = 80
        def after_batch(self):
            if self.training: seen.append({k: m.clone() for k,m in self.learn.sparsify.sparsifier.masks.items()})
    cb = SparsifyCallback(algorithm=Group({'0.*': Static(.5), '2.*': RigL(.8, update=5, anneal='constant'), '*': GMP(.9)}))
    learn.fit(2, 1e-2, cbs=[cb, Look()])
    a,b,c = ([s[k] for s in seen] for k in ('0.weight', '2.weight', '4.weight'))
    assert all(torch.equal(m, a[0]) for m in a) and int((~a[0]).sum())==180
    assert {int((~m).sum()) for m in b}=={480} and sum(not torch.equal(m, n) for m,n in zip(b, b[1:]))==11      # 5, 10 … 55, and 60 is the end
    n = [int((~m).sum()) for m in c]
    assert n==sorted(n) and n[0]==0 and n[-1]==54 and all(not (n & ~m).any() for m,n in zip(c, c[1:]))
    for k,m in cb.sparsifier.masks.items(): assert not learn.model.get_parameter(k)[~m].any()


def test_a_group_resumes(tmp_path):
    "State, masks and what each member counts; another number of members is refused"
    a = Group({'0.*': SNFS(.5, update=3), '*': RigL(.8, update=5)})
    learn = learner(20, path=tmp_path)
    learn.fit(1, 1e-2, cbs=SparsifyCallback(algorithm=a))
    sp = learn.sparsify.sparsifier
    state = sp.state_dict()
    other = a.bind(learner().model)
    other.load_state_dict(state)
    assert all(torch.equal(m, sp.masks[k]) for k,m in other.masks.items()) and [m.updates for m in other.members]==[m.updates for m in sp.members]
    assert torch.equal(other.members[0].memory['average']['0.weight'], sp.members[0].memory['average']['0.weight'])
    with pytest.raises(ValueError, match='2 members of a Group, this one has 1'): Group({'*': SET(.5)}).bind(learner().model).load_state_dict(state)


def test_only_its_own_parameters_skip_the_step():
    "In a group RigL's update leaves out its own weights; the others, and all biases, take the step"
    still = []
    class Look(Callback):
        order = 80
        def before_batch(self): self.w = [p.detach().clone() for p in self.learn.model.parameters()]
        def after_batch(self):
            if self.training: still.append([torch.equal(p, w) for p,w in zip(self.learn.model.parameters(), self.w)])
    cb = SparsifyCallback(algorithm=Group({'0.*': RigL(.0, update=4), '*': Static(.0)}))
    learner(12).fit(1, 1e-2, cbs=[cb, Look()])
    assert [i for i,s in enumerate(still) if s[0]]==[4, 8] and not any(any(s[1:]) for s in still)


def test_frozen_layers_wait():
    "While a layer is frozen no mask moves, and none is made"
    learn = learner(12)
    learn.model[0].weight.requires_grad_(False)
    cb = SparsifyCallback(algorithm=RigL(.5, update=3), layer_type=nn.Linear)
    with pytest.warns(UserWarning, match='frozen: 0.weight'): learn.fit(1, 1e-2, cbs=cb)
    assert cb.sparsifier.updates==0 and cb.sparsifier.sparsity==0
    learn.model[0].weight.requires_grad_(True)
    learn.fit(1, 1e-2, cbs=cb)
    assert cb.sparsifier.updates==1+2 and cb.sparsifier.sparsity==.5      # the first masks; steps 3 and 6 of 12, 9 is the end


def test_a_growing_target_is_reached():
    "With a schedule weights are dropped to the target at each update, and the last batch settles what is left"
    from sparsify.schedule import agp
    cb = SparsifyCallback(.9, schedule=agp, algorithm=RigL(update=7), layer_type=nn.Linear)
    learner(30).fit(1, 1e-2, cbs=cb)
    assert sum(int((~m).sum()) for m in cb.sparsifier.masks.values())==round(.9*360)


@pytest.mark.slow
def test_moving_masks_beat_a_static_one():
    "Digits at 98 %, five seeds, paired: SET and RigL each above Static by more than two standard errors"
    import sys
    from pathlib import Path
    sys.path.insert(0, str(Path(__file__).parents[1]/'benchmarks'))
    from dynamic import compare
    rows = compare('digits', .98, 5, 30)
    for k in ('set', 'rigl'): assert rows[k]['gain']>2*rows[k]['gain_error'], rows
