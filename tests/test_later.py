"Faults of the callback that the last attack found and that are mended, each as a small case"

import copy
import warnings

import numpy as np
import pytest
import torch
from fastai.callback.core import Callback, CancelFitException
from fastai.callback.training import GradientAccumulation
from torch import nn
from torch.utils.data import DataLoader as TorchLoader

from test_stumbles import N, fit, learner, zeros

from sparsify.algorithm import GMP, Static
from sparsify.callback import SparsifyCallback
from sparsify.schedule import Linear, Schedule, dsd, lin, one_shot, sched_lin


def split(m): return [list(m[:4].parameters()), list(m[4:].parameters())]


@pytest.mark.parametrize('algorithm', [Static(.5, context='local'), GMP(.5, Schedule(sched_lin, start_val=1), init='topk')])
@pytest.mark.parametrize('frozen', ['wait', 'skip'])
def test_first_masks_wait_for_unfreeze(algorithm, frozen):
    learn = learner(splitter=split)
    learn.freeze()
    cb = SparsifyCallback(algorithm=algorithm, frozen=frozen)
    with pytest.warns(UserWarning, match='frozen'): fit(learn, cbs=cb)
    assert zeros(learn)==0
    learn.unfreeze()
    fit(learn, cbs=cb)
    assert zeros(learn)==round(.5*N)


def test_static_raises_an_earlier_sparsity():
    learn = fit(learner(), cbs=SparsifyCallback(.5))
    fit(learn, cbs=SparsifyCallback(algorithm=Static(.9)))
    assert zeros(learn)==round(.9*N)


def test_from_zeros_after_two_callbacks():
    learn = fit(learner(), cbs=[SparsifyCallback(.5, layer_type='0'), SparsifyCallback(.5, layer_type='2')])
    fit(learn, cbs=SparsifyCallback(algorithm=Static(init='from_zeros')))
    assert zeros(learn)==36+576


def test_given_twice_leaves_the_learner_usable():
    cb = SparsifyCallback(.5)
    learn = learner(cbs=cb)
    with pytest.raises(ValueError, match='twice'): fit(learn, cbs=cb)
    fit(learn)
    assert zeros(learn)==round(.5*N)


def test_falling_filters_are_refused():
    with pytest.raises(ValueError, match='never'): fit(learner(), cbs=SparsifyCallback(.5, 'filter', schedule=dsd))


def test_accumulation_with_a_torch_loader():
    learn = learner()
    data = learn.dls.train.dataset
    learn.dls.loaders[0] = TorchLoader(data, batch_size=8)
    fit(learn, cbs=[SparsifyCallback(.5), GradientAccumulation(16)])
    assert zeros(learn)==round(.5*N) and isinstance(learn.model[0], nn.Conv2d)


def test_two_of_four_over_a_mask_taken_over():
    "Every group keeps at most two, whatever an earlier callback left in it"
    learn = fit(learner(), cbs=SparsifyCallback(.6, layer_type='2', context='local'))
    fit(learn, cbs=SparsifyCallback(nm=True, layer_type='2'))
    assert learn.sparsify.sparsifier.masks['2.weight'].view(16, 2, 4, 9).sum(2).max()==2


def test_fit_inside_a_fit():
    class Nested(Callback):
        order,done = 80,False
        def after_epoch(self):
            if not self.done:
                self.done = True
                self.learn.fit(1)
    learn = learner(cbs=[SparsifyCallback(.5, schedule=one_shot.but(start=0.)), Nested()])
    fit(learn, 3)
    assert zeros(learn)==round(.5*N)


def test_overlap_is_refused_before_anything():
    learn = learner()
    before = [p.clone() for p in learn.model.parameters()]
    with pytest.raises(ValueError, match='two callbacks'): fit(learn, cbs=[SparsifyCallback(algorithm=Static(.5)), SparsifyCallback(.5)])
    assert all(torch.equal(a, b) for a,b in zip(before, learn.model.parameters())) and not learn.metrics


def test_model_replaced_in_part_and_whole():
    cb = SparsifyCallback(.5)
    learn = fit(learner(cbs=cb))
    learn.model[5] = nn.Linear(64, 3)
    learn.create_opt()
    fit(learn)
    assert zeros(learn)==round(.5*N)
    learn.model = copy.deepcopy(learn.model)
    learn.create_opt()
    learn.remove_cb(cb)
    fit(learn, cbs=SparsifyCallback(.2))
    assert zeros(learn)==round(.5*N)


def test_start_val_before_the_window():
    seen = []
    class Probe(Callback):
        def after_pred(self): self.training and seen.append(zeros(self.learn))
    fit(learner(), 2, cbs=[SparsifyCallback(.5, schedule=Schedule(sched_lin, start=.5, start_val=.4)), Probe()])
    assert seen[:4]==[round(.2*N)]*4 and seen[-1]==round(.5*N)


def test_hold_after_an_exception():
    class Stop(Callback):
        def after_step(self):
            if self.train_iter==2: raise KeyboardInterrupt('stop')
    learn = learner()
    with pytest.raises(KeyboardInterrupt): fit(learn, cbs=[SparsifyCallback(.5, schedule=one_shot.but(start=0.), hold=True), Stop()])
    fit(learn)
    assert zeros(learn)==round(.5*N)


def test_validation_before_an_epoch():
    class Early(Callback):
        order = 5
        def before_epoch(self):
            if not self.learn.lock.locked(): self.learn.validate()
    learn = learner(cbs=Early())
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        fit(learn, 3, cbs=SparsifyCallback(.5))
    assert zeros(learn)==round(.5*N)


def test_stale_training_does_not_spoil_the_core():
    "After Ctrl-C the sparsifier zeroes all that its masks prune again, not only what is new"
    class Stop(Callback):
        def after_step(self): raise KeyboardInterrupt('stop')
    cb = SparsifyCallback(.5, schedule=one_shot.but(start=0.))
    learn = learner(cbs=cb)
    with pytest.raises(KeyboardInterrupt): fit(learn, cbs=Stop())
    for i in (0, 2): nn.init.normal_(learn.model[i].weight)
    cb.sparsifier.sparsify_model(.6)
    assert zeros(learn)==round(.6*N)


@pytest.mark.parametrize('kw', [dict(granularity='layer', context='local'), dict(min_keep=-1), dict(reduce='foo'), dict(seed='x'), dict(nm=3)], ids=str)
def test_refused_by_the_constructor(kw):
    with pytest.raises((ValueError, TypeError)): SparsifyCallback(.5, **kw)


@pytest.mark.parametrize('update', [9, {'freq': 9}, {'steps': [9]}, np.int64(9)], ids=str)
def test_cadence_longer_than_the_fit(update):
    with pytest.raises(ValueError, match='9'): fit(learner(), cbs=SparsifyCallback(.5, update=update))


def test_filters_are_worked_out_once():
    "Which outputs are alive is asked at every step and computed when a mask changes"
    learn = fit(learner(), cbs=SparsifyCallback(.5, 'filter', 'local'))
    sp = learn.sparsify.sparsifier
    assert sp.outputs('2.weight') is sp.outputs('2.weight') and int(sp.outputs('2.weight').sum())==8
    sp.masks['2.weight'][0] = ~sp.masks['2.weight'][0]
    assert int(sp.outputs('2.weight').sum())!=8


@pytest.mark.parametrize('sparsity, seen', [(lambda t: .5+t/4, ('1.25 at step 3', 'min(.9')), (Linear(-.1, .01), ('-0.1 at step 0',))])
def test_a_function_of_the_step_that_leaves_the_range_is_refused(sparsity, seen):
    learn = learner()
    before = {k: v.clone() for k,v in learn.model.state_dict().items()}
    with pytest.raises(ValueError) as e: fit(learn, cbs=SparsifyCallback(sparsity))
    assert all(o in str(e.value) for o in seen), e.value
    assert all(torch.equal(v, before[k]) for k,v in learn.model.state_dict().items())


def test_first_masks_of_gmp_are_at_the_start_of_its_schedule():
    "lin from 40 % to 80 %: 40 % of the weights are random zeros before the first step; a start at 0 has nothing to choose"
    seen = []
    class Look(Callback):
        order = 10.6
        def before_batch(self): seen.append(zeros(self.learn))
    learn = fit(learner(), cbs=[SparsifyCallback(algorithm=GMP(.8, Schedule(sched_lin, start_val=.5), init='random')), Look()])
    assert (seen[0], zeros(learn))==(round(.4*N), round(.8*N))
    with pytest.raises(ValueError, match='the schedule starts at 0'): fit(learner(), cbs=SparsifyCallback(algorithm=GMP(.8, lin, init='random')))


def test_a_fit_stopped_before_its_first_batch_says_so():
    class Stop(Callback):
        order = 10.7
        def before_train(self): raise CancelFitException
    with pytest.warns(UserWarning, match='stopped after batch 0 of'): fit(learner(), cbs=[SparsifyCallback(.5), Stop()])
