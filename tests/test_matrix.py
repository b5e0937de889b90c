"""The matrix of fastai's features against magnitude pruning: each test is a row of the table that pytest prints at the end.

The numbers of the rows are those of section G of `fastai-facts.md`. Every count is worked out by hand: the two convolutions of
`helpers.net` have 72 + 1152 = 1224 weights, half of them are 612, and under `lin` batch t of N sees `round(612*t/(N-1))` zeros."""
import copy
import os
import random
import re
import subprocess
import sys
import textwrap
import warnings
from functools import partial

import pytest
import torch
import torch.nn as nn
from fastai.basics import (Adam, Callback, CancelBackwardException, CancelBatchException, CancelEpochException, CancelFitException,
    CancelStepException, CancelTrainException, CancelValidException, CrossEntropyLossFlat, DataLoaders, FetchPredsCallback, Lamb, Larc,
    Metric, OptimWrapper, QHAdam, RAdam, Recorder, RMSProp, SGD, TfmdDL, load_learner, ranger)
from fastai.callback import channelslast, fp16
from fastai.callback.all import (BnFreeze, CSVLogger, CutMix, EarlyStoppingCallback, GradientAccumulation, GradientClip, MixedPrecision,
    MixUp, ParamScheduler, ReduceLROnPlateau, SaveModelCallback, SchedCos, ShortEpochCallback, TerminateOnNaNCallback)
from fastai.callback.fp16 import NonNativeMixedPrecision
from fastai.optimizer import Lookahead
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

from helpers import conv_zeros, data, datasets, learner, mlp, n_zeros, net, obeys, opt_state, pruned, quiet, same, snapshot, split, watch
from sparsify.algorithm import Static
from sparsify.callback import SparsifyCallback
from sparsify.copies import SparseCopies
from sparsify.schedule import lin, one_shot

pytestmark = pytest.mark.filterwarnings('error:You are shadowing', 'ignore:numpy.core is deprecated', 'ignore:.*mode.chained_assignment')
row = pytest.mark.row

LIN8 = [0, 87, 175, 262, 350, 437, 525, 612]      # 612*t/7
LIN16 = [0, 41, 82, 122, 163, 204, 245, 286, 326, 367, 408, 449, 490, 530, 571, 612]      # 612*t/15
AT_ONCE = one_shot.but(start=0.)


@pytest.fixture
def see(request, record_property):
    "`see(what, expected, seen)`: an entry of this test's row in the table, and the assertion that the two are equal"
    number,feature = request.node.get_closest_marker('row').args
    case = getattr(getattr(request.node, 'callspec', None), 'id', '')
    record_property('row', (number, f'{feature} [{case}]' if case else feature))
    def see(what, expected, seen):
        record_property('seen', (what, brief(expected), brief(seen), expected==seen))
        assert seen==expected, what
    return see

def brief(x):
    "A list as runs: `[612, 612, 612]` is '3x612'"
    if not isinstance(x, list) or len(x)<2: return str(x)
    runs = []
    for o in x:
        if runs and runs[-1][1]==o: runs[-1][0] += 1
        else: runs.append([1, o])
    return ' '.join(f'{n}x{o}' if n>1 else str(o) for n,o in runs)

def half(**kwargs): return SparsifyCallback(.5, **(dict(schedule=lin)|kwargs))

def trace(learn, cb, epochs=1, cbs=(), how='fit', but=None, **kwargs):
    "Zeros in the convolutions at each forward pass in training; a warning is an error, except one that begins like `but`"
    seen = watch(conv_zeros)
    quiet(getattr(learn, how), epochs, cbs=[*([cb] if cb else []), seen, *cbs], but=but or 'numpy.core is deprecated', **kwargs)
    return seen.seen

def warned(f, *args, **kwargs):
    "The messages of the warnings that `f(...)` gives"
    with warnings.catch_warnings(record=True) as w:
        warnings.simplefilter('always')
        f(*args, **kwargs)
    return [str(o.message) for o in w if issubclass(o.category, UserWarning)]

def stops(messages):
    "Where the library says that training stopped: `'6 of 8'`"
    return [m[1] for o in messages if (m := re.search(r'stopped after batch (\d+ of \d+)', o))]

def bits(x):
    "Nested dicts and lists with tensors, as something that `==` compares bit by bit"
    if isinstance(x, torch.Tensor):
        return str(x.dtype),tuple(x.shape),x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).tolist()
    if isinstance(x, dict): return {k: bits(v) for k,v in x.items()}
    if isinstance(x, (list, tuple)) or type(x).__name__=='L': return [bits(o) for o in x]
    return x

def masks_of(cb): return bits(dict(cb.sparsifier.masks))

def seeded(order=0):
    "Data in an order that the epoch alone decides"
    def seed(learn): learn.dls.train.rng = random.Random(learn.epoch)
    return watch(seed, 'before_train', order=order)

class Raise(Callback):
    "Raise `ex` at `event`, where `when(learn)` holds"
    def __init__(self, ex, event, when=lambda l: True, order=5):
        self.ex,self.when,self.order,self.told = ex,when,order,0
        setattr(self, event, self.raise_)
    def raise_(self):
        if self.when(self.learn):
            self.told += 1
            raise self.ex('raised on purpose')

class Scripted(Metric):
    "A metric whose value at each epoch is given"
    def __init__(self, *values): self.values,self.now = values,None
    @property
    def name(self): return 'scripted'
    def reset(self): pass
    def accumulate(self, learn): self.now = self.values[learn.epoch]
    @property
    def value(self): return self.now

@pytest.fixture
def amp(monkeypatch):
    "fastai's mixed precision, on the CPU"
    monkeypatch.setattr(fp16, 'autocast', lambda device, **kw: torch.amp.autocast('cpu', **kw))
    monkeypatch.setattr(fp16, 'GradScaler', lambda device, **kw: torch.amp.GradScaler('cpu', **kw))
    return MixedPrecision

# ---- optimizers

def wrapped(name, **kwargs): return partial(OptimWrapper, opt=getattr(torch.optim, name), **kwargs)

OPTIMIZERS = dict(
    sgd=SGD, momentum=partial(SGD, mom=.9), rmsprop=RMSProp, adam=Adam, radam=RAdam, qhadam=QHAdam, larc=Larc, lamb=Lamb, ranger=ranger,
    adamw=wrapped('AdamW'), adamw_foreach=wrapped('AdamW', foreach=True), adamw_fused=wrapped('AdamW', fused=True), nadam=wrapped('NAdam'),
    nesterov=wrapped('SGD', momentum=.9, nesterov=True), torch_rmsprop=wrapped('RMSprop', momentum=.9))

@row(1, 'plain fit')
@pytest.mark.parametrize('name', OPTIMIZERS)
def test_plain_fit(name, see):
    "The zeros of each forward pass are still there after the optimizer's step, before the callback zeroes anything again"
    learn,left = learner(8, opt_func=OPTIMIZERS[name], wd=.1),watch(conv_zeros, 'after_step', order=10.4)
    see('forward', LIN8, trace(learn, half(), cbs=[left]))
    see('after the bare step', LIN8, left.seen)
    see('after fit', 612, conv_zeros(learn))

@row(1, 'Muon mixes rows: zeroed after each step')
@pytest.mark.skipif(not hasattr(torch.optim, 'Muon'), reason='this torch has no Muon')
def test_muon(see):
    "Muon itself fills pruned places; after the callback's `after_step` the zeros of the forward pass are back: half of 512 + 32, 272*t/7"
    def zeros(learn): return n_zeros(learn.model[1].weight, learn.model[3].weight)
    raw,held,cb = watch(zeros, 'after_step', order=10.4),watch(zeros, 'after_step'),half(layer_type=nn.Linear)
    learn = learner(8, mlp(), opt_func=partial(OptimWrapper, opt=torch.optim.Muon))
    quiet(learn.fit, 1, cbs=[cb, raw, held])
    see('after the step', [0, 39, 78, 117, 155, 194, 233, 272], held.seen)
    see('the bare step revives', True, raw.seen[-1]<272)

@row(2, 'optimizer state')
@pytest.mark.parametrize('name', ['momentum', 'adam', 'radam', 'lamb', 'ranger', 'adamw', 'nesterov', 'nadam'])
def test_state(name, see):
    "Not one pruned weight has an average other than 0 after any step, before the callback zeroes anything again; kept ones have"
    cb = half()
    def count(learn, kept):
        sp = cb.sparsifier
        return sum(int(v[m==kept].count_nonzero()) for k,m in sp.masks.items() for v in opt_state(learn.opt, sp.targets[k].param))
    dead,alive = (watch(partial(count, kept=k), 'after_step', order=10.4) for k in (False, True))
    trace(learner(8, opt_func=OPTIMIZERS[name]), cb, cbs=[dead, alive])
    see('state of pruned weights', [0]*8, dead.seen)
    see('state of the others', [True]*8, [n>0 for n in alive.seen])

@row(3, 'Lookahead beyond its syncs (k=6, 24 steps)')
@pytest.mark.parametrize('base', [ranger, lambda p, lr: Lookahead(SGD(p, lr=lr, mom=.9)), lambda p, lr: Lookahead(Adam(p, lr=lr), k=4)],
                         ids=['ranger', 'sgd', 'adam_k4'])
def test_lookahead(base, see):
    "Weights and slow weights have the same zeros after every step: 612*t/6, the target before the second sync"
    cb,want = half(schedule=lin.but(end=.25)),[0, 102, 204, 306, 408, 510]+[612]*18
    def slow(learn):
        ids = {id(t.param) for t in cb.sparsifier.targets.values()}
        return n_zeros(*(s for ps,ss in zip(learn.opt.param_lists, learn.opt.slow_weights) for p,s in zip(ps, ss) if id(p) in ids))
    bare,slows = watch(conv_zeros, 'after_step', order=10.4),watch(slow, 'after_step', order=10.4)
    see('forward', want, trace(learner(8, opt_func=base), cb, 3, cbs=[bare, slows]))
    see('after the bare step', want, bare.seen)
    see('slow weights', want, slows.seen)

# ---- mixed precision

@row(4, 'mixed precision')
@pytest.mark.parametrize('mode,scale', [('fp16', 1024.), ('bf16', 1.)])
def test_mixed_precision(mode, scale, amp, see):
    "The same zeros as in fp32; where the weight lives the callback leaves the raw gradient without the loss scale, elsewhere 0"
    cb,raw = half(),{}
    def keep(learn): raw.update({k: t.param.grad.clone() for k,t in cb.sparsifier.targets.items()})
    def check(learn):
        sp = cb.sparsifier
        return all(torch.equal(t.param.grad, torch.where(sp.masks[k], raw[k]/scale, 0.)) for k,t in sp.targets.items())
    got = watch(check, 'before_step')
    learn = learner(8, cbs=amp(mode, **(dict(init_scale=scale) if mode=='fp16' else {})))
    see('forward', LIN8, trace(learn, cb, cbs=[watch(keep, 'after_backward', order=70), got]))
    see('gradients', [True]*8, got.seen)
    see('types', {'torch.float32'}, {str(p.dtype) for p in learn.model.parameters()})

@row(5, 'fp16 overflow at batch')
@pytest.mark.parametrize('bad,want', [(0, [0, 0, *LIN8[2:]]), (3, [*LIN8[:4], 262, *LIN8[5:]]), (6, LIN8), (7, LIN8)],
                         ids=['0', '3', '6', '7'])
def test_overflow(bad, want, amp, see):
    "A skipped step changes no weight and no state, the mask waits for the next real one (the last batch is at the target anyway)"
    def poison(learn):
        if learn.iter==bad: learn.loss_grad = learn.loss_grad*float('inf')
    now,moved = {},[]
    def state(learn): return bits([list(learn.model.parameters()), learn.opt.state_dict()['state']])
    def keep(learn): now['is'] = state(learn)
    learn = learner(8, cbs=amp('fp16', init_scale=1024.), opt_func=Adam)
    probes = [watch(poison, 'before_backward', order=10.7), watch(keep, 'after_backward', order=70),
              watch(lambda l: moved.append(now['is']!=state(l)), 'after_batch', order=70)]
    see('forward', want, trace(learn, half(), cbs=probes))
    see('batches that changed something', [i!=bad for i in range(8)], moved)
    see('Adam steps', 7, learn.opt.state[learn.model[3].weight]['step'])
    see('after fit', (612, True), (conv_zeros(learn), obeys(learn)))

@row(5, 'fp16 overflow of the initial scale')
def test_overflow_of_the_scale(amp, see):
    "At 2**60 the first step overflows, then the scale is 1024: one skipped step, the rest of the run as planned"
    learn = learner(8, cbs=amp('fp16', init_scale=2.**60, backoff_factor=2.**-50), opt_func=Adam)
    see('forward', [0, 0, *LIN8[2:]], trace(learn, half()))
    see('Adam steps', 7, learn.opt.state[learn.model[3].weight]['step'])

# ---- accumulation and clipping

ACC = [0]*4+[204]*4+[408]*4+[612]*4      # 612*t/3 at step t, four batches each

@row(6, 'GradientAccumulation, steps of four batches')
@pytest.mark.parametrize('how', ['alone', 'clip', 'fp16', 'fp16 clip'])
def test_accumulation(how, amp, see):
    "Masks move only after a real step; the same with mixed precision and a clip"
    cbs = [GradientAccumulation(16)]
    if 'clip' in how: cbs.append(GradientClip(.1))
    if 'fp16' in how: cbs.append(amp('fp16', init_scale=1024.))
    learn,steps = learner(8, cbs=cbs, opt_func=Adam),watch(lambda l: l.train_iter, 'before_step')
    see('forward', ACC, trace(learn, half(), 2, cbs=[steps]))
    see('real steps at', [3, 7, 11, 15], steps.seen)
    see('after fit', (612, True), (conv_zeros(learn), obeys(learn)))

@row(6, 'GradientAccumulation, the last two batches without a step')
def test_accumulation_left_over(see):
    "Ten batches, steps after 3 and 7: the second step is the last, and at the target, as is all that comes after it"
    learn = learner(10, cbs=GradientAccumulation(16))
    see('forward', [0]*4+[612]*6, trace(learn, half()))
    see('after fit', (612, True), (conv_zeros(learn), obeys(learn)))
    see('next fit', [612]*10, trace(learn, half()))

def at_steps(sparsity, how, amp, schedule=None):
    "Zeros at each of four optimizer steps: `plain` with batches of 16, the others with four batches of 4"
    acc = [] if how=='plain' else [GradientAccumulation(16)]+([amp('fp16', init_scale=1024.), GradientClip(.1)] if 'fp16' in how else [])
    learn,seen = learner(dls=data(2, bs=16) if how=='plain' else data(8), cbs=acc),watch(conv_zeros, 'before_step')
    quiet(learn.fit, 2, cbs=[SparsifyCallback(sparsity, schedule=schedule), seen])
    return seen.seen

@row(6, 'accumulated = large batch, sparsity a function of the step')
@pytest.mark.parametrize('how', ['plain', 'accumulated', 'accumulated fp16 clip'])
def test_accumulation_by_step(how, amp, see):
    "612*t/3 at optimizer step t, with batches of 16 and with four of 4"
    see('at each step', [0, 204, 408, 612], at_steps(lambda step: .5*min(step, 3)/3, how, amp))

@row(6, 'accumulated = large batch, under a Schedule')
@pytest.mark.parametrize('how', ['plain', 'accumulated', 'accumulated fp16 clip'])
def test_accumulation_by_schedule(how, amp, see):
    "The same sparsity for each optimizer step as in a plain fit with the large batch: 612*t/3 at step t"
    see('at each step', [0, 204, 408, 612], at_steps(.5, how, amp, lin))

@row(7, 'GradientClip measures what lives')
@pytest.mark.parametrize('how', ['fp32', 'fp16', 'accumulated'])
def test_clip(how, amp, monkeypatch, see):
    "The norm that the clip finds is that of the gradients with pruned entries 0, to the bit, and smaller than the dense one"
    cb,dense,norms = SparsifyCallback(.9, schedule=AT_ONCE),[],[]
    scale = 1024. if how=='fp16' else 1.
    clip = nn.utils.clip_grad_norm_
    def clipped(params, *args):
        norms.append(clip(params, *args).item())
        return norms[-1]
    monkeypatch.setattr(nn.utils, 'clip_grad_norm_', clipped)
    def keep(learn):
        masks = {id(cb.sparsifier.targets[k].param): m for k,m in cb.sparsifier.masks.items()}
        gs = [(p.grad/scale, masks.get(id(p), torch.ones(1, dtype=torch.bool))) for p in learn.model.parameters()]
        alive = [torch.where(m, g, 0.) for g,m in gs]
        dense.append([nn.utils.get_total_norm(alive).item(), nn.utils.get_total_norm([g for g,_ in gs]).item()])
    cbs = dict(fp32=[], fp16=[amp('fp16', init_scale=scale)], accumulated=[GradientAccumulation(16)])[how]
    quiet(learner(8, cbs=cbs).fit, 1, cbs=[cb, GradientClip(.01), watch(keep, 'after_backward', order=70)])
    found = dense[3::4] if how=='accumulated' else dense
    see('norms', [a for a,_ in found], norms)
    see('below the dense one', [True]*len(norms), [a<b for a,b in found])
    see('number', 2 if how=='accumulated' else 8, len(norms))

# ---- data and schedules of others

@row(9, 'mixed batches')
@pytest.mark.parametrize('mix', [MixUp, CutMix])
def test_mix(mix, see):
    "Prunes as ever; the loss is the learner's own again, in validation and after the fit"
    learn = learner(8)
    loss,inner = learn.loss_func,watch(lambda l: l.loss_func is loss, 'before_batch')
    see('forward', LIN16, trace(learn, half(), 2, cbs=[mix(), inner]))
    see('loss within and after', ([False]*16, True), (inner.seen, learn.loss_func is loss))

@row(10, 'schedules of hyperparameters')
@pytest.mark.parametrize('how,kwargs', [('fit', {}), ('fit', dict(cbs=[ParamScheduler({'lr': SchedCos(1e-2, 1e-3)})])),
                                        ('fit_one_cycle', dict(lr_max=1e-2)), ('fit_flat_cos', {}), ('fit_sgdr', dict(cycle_len=2))],
                         ids=['fit', 'ParamScheduler', 'fit_one_cycle', 'fit_flat_cos', 'fit_sgdr'])
def test_fits(how, kwargs, see):
    "Sixteen batches, the same zeros under each; the learning rate moves where it should"
    learn = learner(8)
    see('forward', LIN16, trace(learn, half(), 1 if how=='fit_sgdr' else 2, how=how, **kwargs))
    see('learning rate moved', not (how=='fit' and not kwargs), len({round(o, 9) for o in learn.recorder.lrs})>1)

@row(10, 'sgdr, three cycles of 1, 2 and 4 epochs')
def test_sgdr(see):
    "28 batches: 612*t/27"
    see('forward', [round(612*t/27) for t in range(28)], trace(learner(4), half(), 3, how='fit_sgdr', cycle_len=1))

# ---- several fits, frozen layers

@row(11, 'fit twice, the same callback')
def test_fit_twice(see):
    "The second fit starts where the first ended"
    learn,cb = learner(8),half()
    see('first', LIN8, trace(learn, cb))
    see('second', [612]*8, trace(learn, cb))
    see('third, to .9', [612]*4+[629, 787, 944, 1102], trace(learn, SparsifyCallback(.9, schedule=lin)))      # 1101.6*t/7

def images(n):
    "`n` batches of four images of 32 x 32 in two classes"
    g = torch.Generator().manual_seed(0)
    random.seed(0)
    def dl(k, **kw):
        xy = TensorDataset(torch.randn(4*k, 3, 32, 32, generator=g), torch.randint(0, 2, (4*k,), generator=g))
        return TfmdDL(xy, bs=4, num_workers=0, **kw)
    return DataLoaders(dl(n, shuffle=True), dl(1))

@row(11, 'fine_tune of vision_learner(resnet18), body frozen first')
def test_fine_tune_resnet(tmp_path, see):
    "11166912 weights in convolutions: the frozen phase prunes none of them, the other ends at round(.9*11166912) = 10050221"
    from fastai.vision.all import resnet18, vision_learner
    torch.manual_seed(0)
    learn = vision_learner(images(2), resnet18, pretrained=False, n_out=2, normalize=False, loss_func=CrossEntropyLossFlat(),
                           path=tmp_path)
    learn.remove_cbs([cb for cb in learn.cbs if type(cb).__name__=='ProgressCallback'])
    learn.logger = lambda *args: None
    seen = watch(conv_zeros)
    messages = warned(learn.fine_tune, 2, freeze_epochs=1, cbs=[SparsifyCallback(.9, schedule=lin), seen, BnFreeze()])
    see('forward', [0, 0]+[0, 3350074, 6700147, 10050221], seen.seen)      # 10050220.8*t/3
    see('warnings', ['frozen'], [m.split(':')[0] for m in messages])
    see('after fit', (10050221, True, 0), (conv_zeros(learn), obeys(learn), n_zeros(learn.model[1][-1].weight)))

@row(12, 'freeze, unfreeze, discriminative learning rates')
def test_freeze_unfreeze(see):
    "Masks outlive the cleared state, in frozen layers too; parameters stay the same objects; each group has its own learning rate"
    learn,cb = learner(8, splitter=split, opt_func=Adam),half()
    ids = [id(p) for p in learn.model.parameters()]
    see('dense to half', LIN8, trace(learn, cb))
    learn.freeze()
    see('frozen', [612]*8, trace(learn, cb, but='frozen: 0.weight'))
    learn.unfreeze()
    see('unfrozen', [612]*4+[629, 787, 944, 1102], trace(learn, SparsifyCallback(.9, schedule=lin), lr=slice(1e-4, 1e-2)))
    see('learning rates', [1e-4, 1e-2], [round(h['lr'], 12) for h in learn.opt.hypers])
    in_opt = [id(p) for p in learn.opt.all_params().itemgot(0)]
    see('same parameters, all in the optimizer', (ids, ids), ([id(p) for p in learn.model.parameters()], in_opt))
    see('invariant', True, obeys(learn))

@row(12, 'freeze between, momentum kept elsewhere')
def test_freeze_to_after_half(see):
    "A layer that is frozen after it was pruned keeps its 36 zeros while the other goes on; by layer: 576*t/7"
    learn = learner(8, splitter=split)
    quiet(learn.fit, 1, cbs=SparsifyCallback({'0': .5}, schedule=lin))
    learn.freeze()
    cb = SparsifyCallback({'0': .5, '3': .5}, schedule=lin, frozen='skip')
    see('forward', [36+n for n in (0, 82, 165, 247, 329, 411, 494, 576)], trace(learn, cb, but='frozen: 0.weight'))

@row(12, 'BnFreeze with a frozen norm')
def test_bn_freeze(see):
    "The frozen norm keeps its statistics; the layer that is not frozen is pruned: 576*t/7"
    learn = learner(8, splitter=split, train_bn=False)
    learn.freeze()
    before = bits(dict(learn.model[1].state_dict()))
    see('forward', [0, 82, 165, 247, 329, 411, 494, 576], trace(learn, half(layer_type='3'), cbs=[BnFreeze()]))
    see('norm', True, bits(dict(learn.model[1].state_dict()))==before)

# ---- lr_find and interruptions

@row(13, 'lr_find')
@pytest.mark.parametrize('name', ['adam', 'ranger', 'adamw'])
def test_lr_find(name, tmp_path, see):
    "Dense: no mask, the same weights, and a fit like any other. Sparse: weights, masks, optimizer and history as before, to the bit"
    cb = half()
    learn = learner(8, cbs=cb, path=tmp_path, opt_func=OPTIMIZERS[name])
    before = bits(snapshot(learn.model))
    learn.lr_find(show_plot=False, num_it=10)
    see('dense', (True, None), (bits(snapshot(learn.model))==before, cb.sparsifier))
    see('then a fit', LIN8, trace(learn, None))
    def all_of(): return bits(snapshot(learn.model)),masks_of(cb),bits(learn.opt.state_dict()),cb.history.values.tolist()
    before,during = all_of(),watch(conv_zeros)
    with learn.added_cbs(during): learn.lr_find(show_plot=False, num_it=10)
    see('sparse', [True]*4, [a==b for a,b in zip(all_of(), before)])
    see('zeros meanwhile', {612}, set(during.seen))
    see('then a fit', [612]*8, trace(learn, None))

@row(13, 'lr_find in fp16')
def test_lr_find_fp16(amp, tmp_path, see):
    "The same under mixed precision"
    cb = half()
    learn = learner(8, cbs=[cb, amp('fp16', init_scale=1024.)], path=tmp_path)
    trace(learn, None)
    before = bits(snapshot(learn.model)),masks_of(cb),bits(learn.opt.state_dict())
    learn.lr_find(show_plot=False, num_it=10)
    see('model, masks, optimizer', True, before==(bits(snapshot(learn.model)), masks_of(cb), bits(learn.opt.state_dict())))
    see('then a fit', [612]*8, trace(learn, None))

@row(14, 'Ctrl-C in lr_find, then a fit')
@pytest.mark.parametrize('where,sparse', [('after_step', False), ('after_step', True), ('after_batch', False), ('after_backward', True)])
def test_lr_find_interrupted(where, sparse, tmp_path, see):
    "fastai leaves the weights of the trial run behind; the next fit prunes them all the same, and one column is there"
    cb = half()
    learn = learner(8, cbs=cb, path=tmp_path)
    if sparse: trace(learn, None)
    stop = Raise(KeyboardInterrupt, where, lambda l: hasattr(l, 'lr_finder') and l.train_iter==3, 10.4)
    with pytest.raises(KeyboardInterrupt), learn.added_cbs(stop): learn.lr_find(show_plot=False, num_it=6)
    see('then a fit', [612]*8 if sparse else LIN8, trace(learn, None))
    see('after fit', (612, True, 1), (conv_zeros(learn), obeys(learn), learn.recorder.metric_names.count('sparsity')))

@row(15, 'Ctrl-C in a fit')
@pytest.mark.parametrize('attached', [True, False], ids=['learn.cbs', 'fit(cbs)'])
@pytest.mark.parametrize('order', [5, 10.6, 70])
def test_interrupted(attached, order, see):
    "After batch 4: 350 zeros stay in the masks, the next fit starts there; no hook, no key, no second column is left"
    cb,stop = half(),Raise(KeyboardInterrupt, 'after_step', lambda l: l.iter==4, order)
    learn = learner(8, cbs=cb if attached else None)
    keys = list(learn.model.state_dict())
    with pytest.raises(KeyboardInterrupt): learn.fit(1, cbs=[stop] if attached else [cb, stop])
    see('masks', 350, sum(pruned(cb.sparsifier).values()))
    see('still in the learner', attached, cb in learn.cbs)
    kinds = '_forward_hooks', '_forward_pre_hooks', '_backward_hooks', '_state_dict_hooks', '_load_state_dict_pre_hooks'
    hooks = sum(len(getattr(m, k)) for m in learn.model.modules() for k in kinds)
    see('hooks and keys', (0, keys), (hooks, list(learn.model.state_dict())))
    see('next fit', [350]*5+[437, 525, 612], trace(learn, None if attached else cb))
    names = learn.recorder.metric_names
    see('columns', (1, len(names)-2), (names.count('sparsity'), len(learn.recorder.values[-1])))

def second(l): return l.iter==1
def sixth(l): return l.epoch==1 and l.iter==1
def epoch1(l): return l.epoch==1
SKIP = [0, 87, 87, 262, 350, 437, 437, 612]      # after batches 1 and 5, which took no step, nothing moves
CUT = [0, 87, 350, 437]                          # batches 0, 1 and 4, 5
def always(l): return True
def epoch0(l): return l.epoch==0
CANCELS = {f'{ex.__name__[6:-9]} in {event}, order {order}': (ex, event, when, order, want, says) for ex,event,when,orders,want,says in [
    (CancelBackwardException, 'before_backward', second, (5, 70), LIN8, []),
    (CancelStepException, 'before_step', second, (5, 70), SKIP, []),
    (CancelBatchException, 'after_pred', second, (70,), SKIP, []), (CancelBatchException, 'after_backward', second, (5,), SKIP, []),
    (CancelBatchException, 'before_step', second, (5, 70), SKIP, []),
    (CancelTrainException, 'after_batch', second, (5, 70), CUT, ['6 of 8']),
    (CancelEpochException, 'after_batch', second, (5, 70), CUT, ['6 of 8']),
    (CancelValidException, 'before_validate', epoch1, (5, 70), LIN8, []),
    (CancelFitException, 'before_fit', always, (5, 70), [], []),
    (CancelFitException, 'before_epoch', epoch1, (70,), LIN8[:4], ['4 of 8']),
    (CancelFitException, 'before_train', epoch1, (5,), LIN8[:4], ['4 of 8']),
    (CancelFitException, 'after_pred', sixth, (70,), LIN8[:6], ['6 of 8']),
    (CancelFitException, 'before_step', sixth, (70,), LIN8[:6], ['6 of 8']),
    (CancelFitException, 'after_batch', sixth, (5,), LIN8[:6], ['6 of 8']), (CancelFitException, 'after_train', epoch1, (70,), LIN8, []),
    (CancelFitException, 'before_validate', epoch1, (5,), LIN8, []),
    (CancelFitException, 'after_epoch', epoch0, (70,), LIN8[:4], ['4 of 8'])] for order in orders}

@row(16, 'cancelled')
@pytest.mark.parametrize('name', CANCELS)
def test_cancelled(name, see):
    "Two epochs of four batches: only real steps move the masks; a fit cut short stays where it is and says so once; the next ends at the target"
    ex,event,when,order,want,says = CANCELS[name]
    learn,cb,seen,other = learner(4),half(),watch(conv_zeros),Raise(ex, event, when, order)
    probe = watch(obeys, 'after_step', 'after_batch', 'before_validate', order=66, valid=True)
    messages = warned(learn.fit, 2, cbs=[cb, seen, other, probe])
    see('raised', True, other.told>0)
    see('forward', want, seen.seen)
    see('says', (says, len(says)), (stops(messages), len(messages)))
    see('invariant and columns', (True, 1), (all(probe.seen), len(learn.metrics)))
    trace(learn, cb)
    see('next fit', (612, 1), (conv_zeros(learn), learn.recorder.metric_names.count('sparsity')))

@row(16, 'CancelFit in after_fit goes through, as in fastai')
@pytest.mark.parametrize('order', [5, 70])
def test_cancelled_after_fit(order, see):
    "The target is met, and the learner goes on"
    learn,cb = learner(8),half()
    with pytest.raises(CancelFitException): learn.fit(1, cbs=[cb, Raise(CancelFitException, 'after_fit', order=order)])
    see('zeros', 612, conv_zeros(learn))
    see('next fit', ([612]*8, 1, 1), (trace(learn, cb), learn.recorder.metric_names.count('sparsity'), len(learn.metrics)))

# ---- what must not touch anything

@row(17, '100 x validate and get_preds between and after fits')
def test_looking_often(capfd, see):
    "No bit of the model changes, no mask is made, nothing is printed; the first looks are at a learner without an optimizer"
    cb = half()
    learn = learner(8, cbs=cb)
    def look(n=100):
        before,masks,epochs,mets = bits(snapshot(learn.model)),cb.sparsifier and masks_of(cb),len(cb.records),list(learn.metrics)
        for _ in range(n): quiet(learn.validate); quiet(learn.get_preds)
        now = cb.sparsifier and masks_of(cb)
        return bits(snapshot(learn.model))==before,now==masks,len(cb.records)==epochs,list(learn.metrics)==mets
    see('before', ((True,)*4, None, None), (look(10), cb.sparsifier, learn.opt))
    see('fit', LIN8, trace(learn, None))
    see('between', (True,)*4, look())
    see('fit', [612]*8, trace(learn, None))
    see('after', (True,)*4, look())
    see('output', ('', ''), tuple(capfd.readouterr()))

@row(17, 'FetchPreds in a fit')
def test_fetch_preds(see):
    "Predictions fetched after each validation leave the run as it is, though fastai takes callbacks out and in meanwhile"
    learn,other,fetch = learner(4),learner(4),FetchPredsCallback()
    see('forward', LIN8, trace(learn, half(), 2, cbs=[fetch]))
    trace(other, half(), 2)
    see('weights as without', True, bits(snapshot(learn.model))==bits(snapshot(other.model)))
    see('predictions, columns', (4, 1), (len(fetch.preds[0]), learn.recorder.metric_names.count('sparsity')))

@row(17, 'predict, tta, summary on a fresh learner and on a sparse one')
def test_looking(capsys, see):
    "Neither a mask nor a change nor a word (summary returns its text)"
    cb = half()
    learn = learner(dls=datasets(), cbs=cb)
    def look():
        for f in (lambda: learn.predict(3), lambda: learn.tta(n=1), learn.summary):
            before = bits(snapshot(learn.model)),cb.sparsifier and masks_of(cb)
            quiet(f)
            yield before==(bits(snapshot(learn.model)), cb.sparsifier and masks_of(cb))
    see('fresh', ([True]*3, None), (list(look()), cb.sparsifier))
    see('fit', [0, 204, 408, 612], trace(learn, None))
    see('sparse', [True]*3, list(look()))
    see('output', '', capsys.readouterr().out)

# ---- the best epoch

RAMP = lin.but(end=.5)      # six epochs of four batches: 612*t/12, at the target from batch 12, the first of epoch 3

@row(18, 'SaveModel, best epoch in the ramp')
@pytest.mark.parametrize('with_opt', [False, True], ids=['', 'with_opt'])
def test_save_model(with_opt, tmp_path, see):
    "The metric is best at epoch 0 (dense) and, of the three at the target, at epoch 4: that one is loaded"
    learn,cb = learner(4, path=tmp_path, metrics=Scripted(9, 8, 8, 2, 5, 3), opt_func=Adam),half(schedule=RAMP)
    epochs = watch(lambda l: bits(snapshot(l.model)), 'before_validate', valid=True)
    want = [51*t for t in range(12)]+[612]*12
    see('forward', want, trace(learn, cb, 6, cbs=[SaveModelCallback('scripted', with_opt=with_opt), epochs]))
    see('epoch that was loaded', 4, epochs.seen.index(bits(snapshot(learn.model))))
    see('after fit', (612, 612, True), (conv_zeros(learn), sum(pruned(cb.sparsifier).values()), obeys(learn)))
    see('next fit', [612]*4, trace(learn, cb))

@row(18, 'SaveModel, sparse_best=False')
@pytest.mark.parametrize('values,had', [((9, 8, 8, 2, 5, 3), 153), ((1, 2, 9, 2, 5, 3), 561)], ids=['epoch 0', 'epoch 2'])
def test_save_model_dense_best(values, had, tmp_path, see):
    "An epoch of the ramp is loaded (51*3 or 51*11 zeros), the target is imposed on it, and a warning says so; the file is as it was"
    learn,cb = learner(4, path=tmp_path, metrics=Scripted(*values)),half(schedule=RAMP, sparse_best=False)
    epochs = watch(lambda l: l.model[7].weight.tolist(), 'before_validate', valid=True)
    messages = warned(learn.fit, 6, cbs=[cb, SaveModelCallback('scripted'), epochs])
    see('after fit', (612, 612, True), (conv_zeros(learn), sum(pruned(cb.sparsifier).values()), obeys(learn)))
    see('epoch that was loaded', values.index(9), epochs.seen.index(learn.model[7].weight.tolist()))
    see('warnings', [f'had a sparsity of {had/1224:.4f} and not yet 0.5000'], [re.search(r'had a sp.*0\.5000', m)[0] for m in messages])
    state = torch.load(tmp_path/'models'/'model.pth', weights_only=True)
    see('zeros of the file', had, n_zeros(state['0.weight'], state['3.weight']))
    see('next fit', [612]*4, trace(learn, cb))

@row(18, 'SaveModel of the sparsity itself')
def test_save_model_of_sparsity(tmp_path, see):
    "The column can be monitored: epoch 3 is the first at .5, and none is greater"
    learn,epochs = learner(4, path=tmp_path),watch(lambda l: bits(snapshot(l.model)), 'before_validate', valid=True)
    trace(learn, half(schedule=RAMP), 6, cbs=[SaveModelCallback('sparsity'), epochs])
    see('epoch that was loaded, zeros', (3, 612), (epochs.seen.index(bits(snapshot(learn.model))), conv_zeros(learn)))

@row(18, 'SaveModel in fine_tune')
def test_save_model_fine_tune(tmp_path, see):
    "The frozen phase prunes nothing; of the other, epoch 2 alone is at the target from its first batch: 612*t/6"
    learn,seen = learner(4, path=tmp_path, metrics=Scripted(9, 8, 7), splitter=split),watch(conv_zeros)
    messages = warned(learn.fine_tune, 3, freeze_epochs=2, cbs=[half(schedule=RAMP), SaveModelCallback('scripted'), seen])
    see('forward', [0]*8+[0, 102, 204, 306, 408, 510]+[612]*6, seen.seen)
    see('after fit, warnings', (612, True, ['frozen']), (conv_zeros(learn), obeys(learn), [m.split(':')[0] for m in messages]))

@row(18, 'SaveModel(every_epoch) and at_end')
def test_save_every_epoch(tmp_path, see):
    "Each file has the zeros of its epoch's masks, 612*t/11 at batch 3, 7 and 11, and brings them back into a new learner"
    learn,cb = learner(4, path=tmp_path),half()
    trace(learn, cb, 3, cbs=[SaveModelCallback(every_epoch=True, fname='e'), SaveModelCallback(at_end=True, fname='end')])
    files = ['e_0', 'e_1', 'e_2', 'end']
    states = [torch.load(tmp_path/'models'/f'{f}.pth', weights_only=True) for f in files]
    see('zeros of the files', [167, 389, 612, 612], [n_zeros(s['0.weight'], s['3.weight']) for s in states])
    see('history', [167/1224, 389/1224, .5], cb.history.total.tolist())
    found = []
    for f in files:
        other,cb = learner(4, path=tmp_path),SparsifyCallback(.5, schedule=AT_ONCE)
        other.load(f, with_opt=False)
        found.append(conv_zeros(other))
        trace(other, cb)
        found.append(conv_zeros(other))
    see('loaded, and after a fit', [167, 612, 389, 612, 612, 612, 612, 612], found)

@row(19, 'EarlyStopping in the ramp')
@pytest.mark.parametrize('values,rows', [((9, 5, 1, 3, 2, 4), 5), ((9, 5, 1, 3, 4, 5), 6)], ids=['stops at 4', 'never stops'])
def test_early_stopping(values, rows, see):
    "The falling metric of the ramp does not stop the run; of the epochs at the target, the first that is no better does"
    learn,cb = learner(4, metrics=Scripted(*values)),half(schedule=RAMP)
    messages = warned(learn.fit, 6, cbs=[cb, EarlyStoppingCallback('scripted')])
    see('epochs, zeros, says', (rows, 612, []), (len(learn.recorder.values), conv_zeros(learn), messages))

@row(19, 'EarlyStopping in the ramp, sparse_best=False')
def test_early_stopping_dense(see):
    "Stops after epoch 1 at 51*7 zeros and says where"
    learn = learner(4, metrics=Scripted(9, 5, 1, 3, 2, 4))
    messages = warned(learn.fit, 6, cbs=[half(schedule=RAMP, sparse_best=False), EarlyStoppingCallback('scripted')])
    see('epochs, zeros', (2, 357), (len(learn.recorder.values), conv_zeros(learn)))
    see('says', (['8 of 24'], 1), (stops(messages), len(messages)))

@row(19, 'ReduceLROnPlateau in the ramp')
@pytest.mark.parametrize('sparse_best,times', [(True, 1), (False, 5)])
def test_reduce_lr(sparse_best, times, see):
    "Of the sparse epochs (3, 2, 4) one is no better than the best so far; of all, five are below the first"
    learn = learner(4, metrics=Scripted(9, 5, 1, 3, 2, 4))
    trace(learn, half(schedule=RAMP, sparse_best=sparse_best), 6, cbs=[ReduceLROnPlateau('scripted')])
    see('learning rate', round(1e-2/10**times, 12), round(learn.opt.hypers[-1]['lr'], 12))
    see('zeros', 612, conv_zeros(learn))

# ---- files

@row(20, 'save, load, start_epoch = uninterrupted, to the bit')
@pytest.mark.parametrize('name,attached', [('adam', False), ('momentum', True), ('adamw', False), ('ranger', False)],
                         ids=['adam', 'momentum, callback there before load', 'adamw', 'ranger'])
def test_resume(name, attached, tmp_path, see):
    "Six epochs in one go, and from the file of epoch 2 in a new learner: 612*t/23 zeros, the same weights, state, masks, history"
    want = [round(612*t/23) for t in range(24)]
    one,cb = learner(4, path=tmp_path, opt_func=OPTIMIZERS[name]),half()
    see('in one go', want, trace(one, cb, 6, cbs=[seeded(), SaveModelCallback(every_epoch=True, with_opt=True)]))
    again = half()
    two = learner(4, path=tmp_path, opt_func=OPTIMIZERS[name], cbs=again if attached else None)
    two.load('model_2')
    see('resumed', want[12:], trace(two, None if attached else again, 6, cbs=[seeded()], start_epoch=3))
    def all_of(learn, cb): return bits(snapshot(learn.model)),bits(learn.opt.state_dict()),masks_of(cb),cb.history.values.tolist()
    see('weights, optimizer, masks, history', [True]*4, [a==b for a,b in zip(all_of(one, cb), all_of(two, again))])

FRESH = """
    import sys
    sys.modules['sparsify'] = sys.modules['fastai'] = None
    import torch
    from torch import nn
    m = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1, stride=2), nn.ReLU(),
                      nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))
    m.load_state_dict(torch.load(sys.argv[1], weights_only=True), strict=True)
    print(*m.eval()(torch.ones(1, 1, 8, 8))[0].tolist(), *(int((m[i].weight==0).sum()) for i in (0, 3)))
"""

@row(21, 'file in a process with torch alone')
def test_fresh_process(tmp_path, see):
    "A plain module loads the file strictly, as weights only, and answers as the sparse model does"
    learn,cb = learner(4, path=tmp_path),half()
    trace(learn, cb)
    learn.save('w', with_opt=False)
    args = [sys.executable, '-c', textwrap.dedent(FRESH), str(tmp_path/'models'/'w.pth')]
    out = subprocess.run(args, env=os.environ|dict(OMP_NUM_THREADS='1'), capture_output=True, text=True, timeout=120)
    see('errors', '', out.stderr if out.returncode else '')
    want = [*learn.model.eval()(torch.ones(1, 1, 8, 8))[0].tolist(), *pruned(cb.sparsifier).values()]
    see('answers and zeros', ' '.join(map(str, want)), out.stdout.strip())

@row(22, 'export after fit(cbs=), without this library')
def test_export_without_library(tmp_path, monkeypatch, see):
    "`load_learner` finds all it needs where `sparsify` cannot be imported"
    learn = learner(dls=datasets(), path=tmp_path)
    trace(learn, half())
    learn.export('e.pkl')
    for k in [k for k in sys.modules if k.split('.')[0]=='sparsify']: monkeypatch.setitem(sys.modules, k, None)
    got = load_learner_of(tmp_path/'e.pkl')
    out = got.get_preds(dl=got.dls.test_dl([1, 2, 3]))[0]
    see('zeros, predictions', (612, (3, 4)), (conv_zeros(got), tuple(out.shape)))

@row(21, 'file into a plain learner, then a dense fit')
def test_plain_learner(tmp_path, see):
    "The zeros arrive; without a callback they are nobody's, and training fills them"
    learn,other = learner(4, path=tmp_path),learner(4, path=tmp_path)
    trace(learn, half())
    learn.save('m')
    quiet(other.load, 'm', but='numpy.core is deprecated')
    see('loaded', (612, True), (conv_zeros(other), same(snapshot(learn.model), snapshot(other.model))))
    bare = learner(4)
    bare.model.load_state_dict(learn.model.state_dict())
    bare.create_opt()
    bare.opt.load_state_dict(learn.opt.state_dict())
    trace(other, None, cbs=[seeded()])
    trace(bare, None, cbs=[seeded()])
    see('dense fit fills zeros', True, conv_zeros(other)<612)
    see('as one from the bare weights', True, bits(snapshot(other.model))==bits(snapshot(bare.model)))

@row(22, 'export with the callback in learn.cbs')
def test_export(tmp_path, see):
    "`load_learner` gives a learner without data and optimizer that predicts, keeps its masks, and goes on pruning with new data"
    cb = half()
    learn = learner(dls=datasets(), cbs=cb, path=tmp_path)
    trace(learn, None)
    learn.export('e.pkl')
    got = load_learner_of(tmp_path/'e.pkl')
    see('predictions', (8, 4), tuple(got.get_preds(dl=learn.dls.valid)[0].shape))
    mine = [o for o in got.cbs if isinstance(o, SparsifyCallback)]
    see('zeros, masks', (612, [masks_of(cb)]), (conv_zeros(got), [masks_of(o) for o in mine]))
    see('learn.sparsify', [True], [getattr(got, 'sparsify', None) is o for o in mine])
    got.dls = learn.dls
    see('fit', [612]*4, trace(got, None))
    see('the one that was exported', ([612]*4, 612), (trace(learn, None), conv_zeros(learn)))

def load_learner_of(path):
    "`load_learner` without its warning of pickles"
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        return load_learner(path)

# ---- one mask for the whole run

def static(): return SparsifyCallback(algorithm=Static(.5))

@row(1, 'Static')
@pytest.mark.parametrize('opt,how', [('momentum', 'plain'), ('ranger', 'plain'), ('adam', 'accumulated fp16 clip'),
                                     ('adamw', 'accumulated fp16 clip')])
def test_static(opt, how, amp, see):
    "612 zeros from the first forward pass on, after each bare step, and the masks of the beginning to the bit"
    cbs = [] if how=='plain' else [amp('fp16', init_scale=1024.), GradientAccumulation(16), GradientClip(.1)]
    learn,cb,left = learner(8, opt_func=OPTIMIZERS[opt], cbs=cbs),static(),watch(conv_zeros, 'after_step', order=10.4)
    masks = watch(lambda l: masks_of(cb), 'before_batch')
    see('forward', [612]*16, trace(learn, cb, 2, cbs=[left, masks]))
    see('after the bare step', [612]*len(left.seen), left.seen)
    see('masks', True, all(m==masks_of(cb) for m in masks.seen))

@row(20, 'Static: save, load, start_epoch = uninterrupted, to the bit')
def test_static_resume(tmp_path, see):
    "The random masks come from the file and are not drawn again"
    one,cb = learner(4, path=tmp_path),static()
    trace(one, cb, 4, cbs=[seeded(), SaveModelCallback(every_epoch=True, with_opt=True)])
    two,again = learner(4, path=tmp_path),SparsifyCallback(algorithm=Static(.5), seed=1)
    two.load('model_1')
    see('resumed', [612]*8, trace(two, again, 4, cbs=[seeded()], start_epoch=2))
    see('weights, masks', (True, True), (bits(snapshot(one.model))==bits(snapshot(two.model)), masks_of(cb)==masks_of(again)))

@row(11, 'Static in fine_tune')
def test_static_fine_tune(see):
    "The mask is made when the last target is unfrozen"
    learn,seen = learner(4, splitter=split),watch(conv_zeros)
    messages = warned(learn.fine_tune, 2, freeze_epochs=1, cbs=[static(), seen])
    see('forward', [0]*4+[612]*8, seen.seen)
    see('warnings', ['frozen'], [m.split(':')[0] for m in messages])

# ---- averages

class EMA(Callback):
    "An average as other libraries keep it: it moves after each batch, and takes the model's place in validation, at the end too if asked to"
    order = 11
    def __init__(self, replace=False, made='before_fit'):
        self.replace = replace
        setattr(self, made, self.make)
    def make(self):
        if 'model_ema' not in vars(self.learn): self.learn.model_ema = copy.deepcopy(self.learn.model)
    def swap(self):
        for p,q in zip(self.learn.model.parameters(), self.learn.model_ema.parameters()): p.data,q.data = q.data.clone(),p.data.clone()
    def after_batch(self):
        if not self.training: return
        with torch.no_grad():
            for p,q in zip(self.learn.model.parameters(), self.learn.model_ema.parameters()): q.lerp_(p, .1)
    def before_validate(self): self.swap()
    def after_validate(self): self.swap()
    def after_fit(self):
        if self.replace: self.swap()

@row(23, 'EMA with SparseCopies')
@pytest.mark.parametrize('replace', [False, True], ids=['beside', 'replaces the weights'])
@pytest.mark.parametrize('made', ['before_fit', 'before_train'])
def test_ema(replace, made, see):
    "It has the zeros of the model after each batch, in validation and after the fit, wherever its callback (order 11) makes it"
    learn = learner(4)
    each = watch(lambda l: conv_zeros(l.model_ema), 'after_batch', order=67)
    valid = watch(conv_zeros, 'before_validate', order=67, valid=True)
    see('model', LIN8, trace(learn, half(), 2, cbs=[EMA(replace, made), SparseCopies(lambda l: l.model_ema), each, valid]))
    see('average', LIN8, each.seen)
    see('validated', [262, 612], valid.seen)
    see('after fit', (612, 612), (conv_zeros(learn.model), conv_zeros(learn.model_ema)))

@row(23, 'EMA alone is dense')
def test_ema_without(see):
    "What the row above is there for: without SparseCopies no average of nine tenths becomes 0"
    learn = learner(8)
    trace(learn, half(), cbs=[EMA()])
    see('average', 0, conv_zeros(learn.model_ema))

@row(23, 'one average step by hand (S 42)')
def test_average_by_hand(see):
    "Average .9, weight .5, pruned to 0: .9*.9 + .1*0 = .81 without, 0 with SparseCopies; the kept weight's average moves as ever"
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(2, 1, bias=False)
            self.lin.weight.data = torch.tensor([[2., .5]])
        def forward(self, x): return self.lin(x[:, 0, 0, :2])
    found = []
    for cbs in [], [SparseCopies(lambda l: l.model_ema)]:
        learn = learner(1, Two(), lr=0., loss_func=lambda p, y: p.mean(), metrics=None, opt_func=SGD)
        start = watch(lambda l: l.model_ema.lin.weight.data.fill_(.9), 'before_batch', order=12)
        quiet(learn.fit, 1, cbs=[SparsifyCallback(.5, schedule=AT_ONCE, layer_type=nn.Linear), EMA(), start, *cbs])
        found.append([round(o, 6) for o in learn.model_ema.lin.weight[0].tolist()])
    see('averages', [[1.01, .81], [1.01, 0.]], found)

class Averages(Callback):
    "`torch.optim.swa_utils.AveragedModel`, moved after each batch"
    order,run_valid = 11,False
    def before_fit(self): self.avg = AveragedModel(self.learn.model)
    def after_batch(self): self.avg.update_parameters(self.learn.model)

@row(23, 'AveragedModel with SparseCopies, and a warning without')
def test_averaged_model(see):
    "As sparse as the model after each batch"
    learn,avg = learner(8),Averages()
    each = watch(lambda l: conv_zeros(avg.avg), 'after_batch', order=67)
    see('model', LIN8, trace(learn, half(), cbs=[avg, SparseCopies(lambda l: avg.avg), each]))
    see('average', LIN8, each.seen)
    messages = warned(learner(8).fit, 1, cbs=[half(), Averages()])
    see('without: warnings', [True], ['Averages.avg is an average' in m and 'SparseCopies' in m for m in messages])

# ---- what is shown

@row(24, 'TensorBoard')
def test_tensorboard(tmp_path, see):
    "A scalar `sparsity` for each epoch, beside the loss and the metric"
    pytest.importorskip('tensorboard')
    from fastai.callback.tensorboard import TensorBoardCallback
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    learn = learner(4)
    see('forward', LIN8, trace(learn, half(), 2, cbs=[TensorBoardCallback(log_dir=tmp_path/'log', trace_model=False, log_preds=False)]))
    events = EventAccumulator(str(tmp_path/'log'))
    events.Reload()
    see('scalars', torch.tensor([262/1224, .5]).tolist(), [e.value for e in events.Scalars('sparsity')])
    see('others', [2, 2], [len(events.Scalars(k)) for k in ('valid_loss', 'accuracy')])

@row(24, 'a batch outside any loop, as TensorBoard(log_preds=True) does')
def test_stray_batch(see):
    "`one_batch` from after_epoch changes nothing"
    stray = watch(lambda l: l.one_batch(0, l.dls.valid.one_batch()), 'after_epoch', order=51, valid=True)
    learn = learner(4)
    see('forward', LIN8, trace(learn, half(), 2, cbs=[stray]))
    see('batches, zeros', (2, 612), (len(stray.seen), conv_zeros(learn)))

@row(24, 'CSVLogger over two fits')
def test_csv(tmp_path, see):
    "A column beside the others, rows as long as the header, and no text of ours between"
    learn,cb = learner(4, path=tmp_path),half()
    trace(learn, cb, 2, cbs=[CSVLogger()])
    trace(learn, cb, 1, cbs=[CSVLogger(append=True)])
    rows = [r.split(',') for r in (tmp_path/'history.csv').read_text().splitlines()]
    see('headers', [['epoch', 'train_loss', 'valid_loss', 'accuracy', 'sparsity', 'time']]*2, [r for r in rows if r[0]=='epoch'])
    see('sparsity', [f'{262/1224}', '0.5', '0.5'], [r[4] for r in rows if r[0]!='epoch'])
    see('lengths', {6}, {len(r) for r in rows})

@row(24, 'Recorder(train_metrics=True)')
def test_train_metrics(see):
    "Both columns, at the end of the epoch's training"
    learn = learner(4)
    learn.remove_cb(Recorder)
    learn.add_cb(Recorder(train_metrics=True))
    trace(learn, half(), 2)
    names = learn.recorder.metric_names
    see('columns', ['train_sparsity', 'valid_sparsity'], [k for k in names if 'sparsity' in k])
    at = [names.index(k)-1 for k in ('train_sparsity', 'valid_sparsity')]
    see('values', [[262/1224]*2, [.5]*2], [[r[i] for i in at] for r in learn.recorder.values])
    see('lengths', {len(names)-2}, {len(r) for r in learn.recorder.values})

@row(24, 'learn.sparsify.history')
def test_history(see):
    "A row for each epoch of each fit: 36*p and 576*p weights of the layers at p = .2, .6, 1, then held"
    learn,cb = learner(2),half(context='local')
    see('before', [], cb.history.values.tolist())
    trace(learn, cb, 3)
    trace(learn, cb, 1)
    see('columns', ['fit', 'epoch', '0', '3', 'total'], list(learn.sparsify.history.columns))
    want = [[0, 0, 7/72, 115/1152, 122/1224], [0, 1, 22/72, 346/1152, 368/1224], [0, 2, .5, .5, .5], [1, 0, .5, .5, .5]]
    see('rows', want, learn.sparsify.history.values.tolist())

@row(24, 'history of a fit that was cut short')
def test_history_cut_short(see):
    "The epoch that Ctrl-C ended has no row; the next fit has its own number"
    learn,cb = learner(4),half()
    with pytest.raises(KeyboardInterrupt): learn.fit(2, cbs=[cb, Raise(KeyboardInterrupt, 'after_batch', sixth, 70)])
    trace(learn, cb)
    see('fit, epoch, zeros', [(0, 0, 262), (1, 0, 612)], [(r.fit, r.epoch, round(r.total*1224)) for r in cb.history.itertuples()])

# ---- wrapped models and layouts

def against_plain(model, see, unwrap=lambda m: m, cbs=()):
    "The run in a wrapper and the plain one, seeded alike: zeros at each forward pass, masks by name, weights"
    cb,plain = half(),half()
    learn,other = learner(8, model),learner(8)
    unwrap(learn.model).load_state_dict(other.model.state_dict())
    see('forward', LIN8, trace(learn, cb, cbs=[seeded(), *cbs]))
    trace(other, plain, cbs=[seeded()])
    see('names', ['0.weight', '3.weight'], list(cb.sparsifier.masks))
    see('masks as plain', True, masks_of(cb)==masks_of(plain))
    see('weights as plain', True, bits(snapshot(unwrap(learn.model)))==bits(snapshot(other.model)))
    return learn

@row(26, 'torch.compile(backend=eager)')
def test_compiled(see): against_plain(torch.compile(net(), backend='eager'), see, lambda m: m._orig_mod)

@row(26, 'model.compile(backend=eager)')
def test_compiled_in_place(see):
    m = net()
    m.compile(backend='eager')
    against_plain(m, see)

@row(27, 'DataParallel')
@pytest.mark.skipif(torch.cuda.is_available(), reason='the wrapper would move the model to the GPU')
def test_data_parallel(see): against_plain(nn.DataParallel(net()), see, lambda m: m.module)

@row(27, 'DataParallel for the length of a fit, as ParallelTrainer does')
@pytest.mark.skipif(torch.cuda.is_available(), reason='the wrapper would move the model to the GPU')
def test_parallel_trainer(see):
    def wrap(learn): learn.model = nn.DataParallel(learn.model)
    def unwrap(learn): learn.model = learn.model.module
    learn = against_plain(net(), see, cbs=[watch(wrap, 'before_fit', order=0), watch(unwrap, 'after_fit', order=0)])
    see('a plain fit afterwards', [612]*8, trace(learn, half()))

@row(28, 'ChannelsLast')
@pytest.mark.parametrize('use_amp', [False, True], ids=['fp32', 'fp16'])
def test_channels_last(use_amp, amp, monkeypatch, see):
    "The first masks, made of the first weights, are those of the contiguous model, to the bit; the layout stays, the zeros too"
    monkeypatch.setattr(channelslast, 'MixedPrecision', lambda mode, **kw: amp(mode, init_scale=1024.))
    cb,plain = half(schedule=AT_ONCE),half(schedule=AT_ONCE)
    learn,other = learner(8, opt_func=Adam).to_channelslast(use_amp=use_amp),learner(8, opt_func=Adam)
    see('forward', [612]*8, trace(learn, cb))
    trace(other, plain)
    see('masks as contiguous', True, masks_of(cb)==masks_of(plain))
    see('layout, invariant', (True, True), (learn.model[3].weight.is_contiguous(memory_format=torch.channels_last), obeys(learn)))
    see('rising', [612]*4+[629, 787, 944, 1102], trace(learn, SparsifyCallback(.9, schedule=lin)))

# ---- runs that end early

@row(31, 'ShortEpoch(.5), two epochs')
def test_short_epoch(see):
    "Batches 0-4 and 8-12 of 16, as by the clock; says where it stopped, at 490 of 612"
    learn,seen,cb = learner(8),watch(conv_zeros),half()
    messages = warned(learn.fit, 2, cbs=[cb, seen, ShortEpochCallback(.5)])
    see('forward', LIN16[:5]+LIN16[8:13], seen.seen)
    see('after fit, says', (490, ['13 of 16'], 1), (conv_zeros(learn), stops(messages), len(messages)))

@row(31, 'TerminateOnNaN')
def test_terminate_on_nan(see):
    "The step with NaN spoils what lives; what is pruned stays +0.0, in weights and in Adam's averages. It says where it stopped"
    def poison(learn):
        if learn.iter!=4: return
        learn.loss = learn.loss*float('nan')
        for p in learn.model.parameters(): p.grad.fill_(float('nan'))
    learn,seen,cb,states = learner(8, opt_func=Adam),watch(conv_zeros),half(),watch(obeys, 'after_step', order=66)
    messages = warned(learn.fit, 1, cbs=[cb, seen, states, TerminateOnNaNCallback(), watch(poison, 'after_backward')])
    see('forward', LIN8[:5], seen.seen)
    see('zeros, NaNs', (350, 1224-350), (conv_zeros(learn), sum(int(learn.model[i].weight.isnan().sum()) for i in (0, 3))))
    see('invariant', [True]*5, states.seen)
    see('says', (['5 of 8'], 1), (stops(messages), len(messages)))

@row(32, 'to_non_native_fp16 is refused')
def test_non_native(monkeypatch, see):
    "With the reason and what to do; the learner is as before and a plain fit prunes"
    monkeypatch.setattr(NonNativeMixedPrecision, 'before_fit', lambda self: None)
    cb,other = half(),NonNativeMixedPrecision()
    learn = learner(8, cbs=cb)
    before = bits(snapshot(learn.model))
    with pytest.raises(ValueError, match=r'to_non_native_fp16.*use learn\.to_fp16') as e: learn.fit(1, cbs=other)
    see('refused', True, 'fp32 copies' in str(e.value))
    see('model, masks, columns', (True, None, 1), (bits(snapshot(learn.model))==before, cb.sparsifier, len(learn.metrics)))
    see('without it', LIN8, trace(learn, None))

# ---- odd parameters

class Tied(nn.Module):
    "An embedding of 20 x 4 whose matrix is also the last layer's"
    def __init__(self):
        super().__init__()
        self.enc,self.mid,self.dec = nn.Embedding(20, 4),nn.Linear(4, 4),nn.Linear(4, 20)
        self.dec.weight = self.enc.weight
    def forward(self, x): return self.dec(torch.relu(self.mid(self.enc(x))))

def words(vocab=20, n=4):
    "`n` batches of four lines of five words, and the next words"
    g = torch.Generator().manual_seed(0)
    def dl(k): return TfmdDL(TensorDataset(*(torch.randint(0, vocab, (4*k, 5), generator=g) for _ in 'xy')), bs=4, num_workers=0)
    return DataLoaders(dl(n), dl(1))

@row(33, 'tied weights')
@pytest.mark.parametrize('layer_type,want', [((nn.Embedding, nn.Linear), [40, 8]), ('dec', [40]), ('enc', [40])],
                         ids=['both types', 'decoder by name', 'encoder by name'])
def test_tied(layer_type, want, see):
    "Handled once: half of 80, and of 16 where the middle layer is chosen too"
    learn,cb = learner(model=Tied(), dls=words(), metrics=None),half(context='local', layer_type=layer_type)
    quiet(learn.fit, 2, cbs=cb)
    see('pruned', want, list(pruned(cb.sparsifier).values()))
    see('zeros, still tied', (40, True), (n_zeros(learn.model.enc.weight), learn.model.enc.weight is learn.model.dec.weight))

@row(33, 'tied weights, Linear alone')
def test_tied_by_type(see):
    "The embedding is not pruned behind the user's back: left out with a warning that says how to get it"
    learn,cb = learner(model=Tied(), dls=words(), metrics=None),half(context='local', layer_type=nn.Linear)
    messages = warned(learn.fit, 2, cbs=cb)
    see('pruned', ({'mid.weight': 8}, 0), (pruned(cb.sparsifier), n_zeros(learn.model.enc.weight)))
    see('warnings', [True], ['enc.weight' in m and 'name it to prune both' in m for m in messages])

@row(33, 'computed weights are left out by name')
@pytest.mark.parametrize('norm', [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm, nn.utils.spectral_norm],
                         ids=['weight_norm', 'parametrized', 'spectral_norm'])
@pytest.mark.filterwarnings('ignore:.*weight_norm.*is deprecated')
def test_computed(norm, see):
    "The first convolution's weight is computed: one warning names it; the other one is pruned, 576*t/7"
    m = net()
    norm(m[0])
    learn,seen = learner(8, m),watch(lambda l: n_zeros(l.model[3].weight))
    messages = warned(learn.fit, 1, cbs=[half(), seen])
    see('forward', [0, 82, 165, 247, 329, 411, 494, 576], seen.seen)
    see('warnings', [True], [re.search(r"\b0\b", o) is not None and 'comput' in o for o in messages])

@row(33, 'AWD_LSTM: WeightDropout and a tied decoder')
@pytest.mark.filterwarnings('ignore')
def test_awd_lstm(see):
    "The raw matrix behind the dropout and the input matrix, 16 x 4 each, are pruned by half; the matrix in use has the zeros; the decoder once"
    from fastai.text.models.awdlstm import AWD_LSTM, awd_lstm_lm_config
    from fastai.text.models.core import get_language_model
    from fastai.callback.rnn import rnn_cbs
    config = awd_lstm_lm_config|dict(emb_sz=4, n_hid=4, n_layers=1)
    found = []
    for layer_type in 're:0.rnns.*weight.*', '1.decoder':
        m,cb = get_language_model(AWD_LSTM, 20, config=config),half(context='local', layer_type=layer_type)
        learn = learner(model=m, dls=words(), metrics=None, cbs=rnn_cbs())
        probe = watch(obeys, 'after_step', 'before_validate', order=66, valid=True)
        learn.fit(2, cbs=[cb, probe])
        learn.validate()
        found.append((pruned(cb.sparsifier), all(probe.seen), n_zeros(m[0].rnns[0].module.weight_hh_l0), n_zeros(m[0].encoder.weight)))
    see('matrices of the LSTM', ({'0.rnns.0.weight_hh_l0_raw': 32, '0.rnns.0.module.weight_ih_l0': 32}, True, 32, 0), found[0])
    see('decoder', ({'0.encoder.weight': 40}, True, 0, 40), found[1])

# ---- callbacks of this library beside each other

@row(34, 'the same instance twice')
def test_same_twice(see):
    "Refused with what to do, nothing is changed, and the next fit prunes"
    cb = half()
    learn = learner(8, cbs=cb)
    before = bits(snapshot(learn.model))
    with pytest.raises(ValueError, match='twice'): learn.fit(1, cbs=cb)
    there = sum(o is cb for o in learn.cbs)
    see('model, columns, still there', (True, 1, 1), (bits(snapshot(learn.model))==before, len(learn.metrics), there))
    see('next fit', LIN8, trace(learn, None))

@row(34, 'two instances on two layers')
def test_two_instances(see):
    "36*t/7 and 576 from the start; one column for both, and each keeps its own masks"
    a,b,learn = half(layer_type='0'),SparsifyCallback(.5, schedule=AT_ONCE, layer_type='3'),learner(8)
    see('forward', [576+n for n in (0, 5, 10, 15, 21, 26, 31, 36)], trace(learn, a, cbs=[b]))
    see('masks', ({'0.weight': 36}, {'3.weight': 576}), (pruned(a.sparsifier), pruned(b.sparsifier)))
    see('column', (1, .5), (learn.recorder.metric_names.count('sparsity'), learn.recorder.values[-1][3]))
    see('the last one is learn.sparsify', True, learn.sparsify is b)

@row(34, 'two instances on one layer')
def test_two_on_one(see):
    "Refused before anything changes"
    learn = learner(8)
    before = bits(snapshot(learn.model))
    with pytest.raises(ValueError, match='two callbacks'): learn.fit(1, cbs=[half(), half(layer_type='3')])
    see('model, columns', (True, 1), (bits(snapshot(learn.model))==before, len(learn.metrics)))
    see('next fit', LIN8, trace(learn, half()))

@row(35, 'trackers with start_epoch: fastai itself fails')
@pytest.mark.parametrize('tracker', [SaveModelCallback, EarlyStoppingCallback, ReduceLROnPlateau])
def test_trackers_and_start_epoch(tracker, tmp_path, see):
    "An IndexError with this callback as without it; with it the learner is usable afterwards"
    found,cb = [],half()
    for ours in False, True:
        learn = learner(4, path=tmp_path)
        try: warned(learn.fit, 2, cbs=[tracker(), *([cb] if ours else [])], start_epoch=1)
        except Exception as e: found.append(type(e).__name__)
    see('errors', ['IndexError', 'IndexError'], found)
    trace(learn, cb)
    see('next fit', (612, 1), (conv_zeros(learn), learn.recorder.metric_names.count('sparsity')))
