"Faults that an attack on files, trackers, copies and the trust in optimizers found, each as a small case"
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from fastai.basics import Adam, Callback, Learner, Lookahead, OptimWrapper, RAdam
from fastai.callback.all import SaveModelCallback
from torch import nn
from torch.optim.swa_utils import AveragedModel

from helpers import N0, N3, conv_zeros, learner, mlp, net, obeys, opt_state, quiet
from sparsify.callback import SparsifyCallback
from sparsify.copies import SparseCopies
from sparsify.optimizer import keeps_zeros
from sparsify.schedule import dsd, one_shot


def test_a_holder_that_gives_way_is_saved(tmp_path):
    learn = learner(8, path=tmp_path)
    quiet(learn.fit, 1, cbs=SparsifyCallback(.8, hold=True))
    quiet(learn.fit, 1)
    quiet(learn.fit, 1, cbs=SparsifyCallback(.9, layer_type='3'))
    zeros = conv_zeros(learn)
    learn.save('held')
    assert conv_zeros(learner(8, path=tmp_path).load('held'))==zeros


def test_another_model_begins_another_history(tmp_path):
    learn = learner(8, cbs=SparsifyCallback(.8, layer_type=(nn.Conv2d, nn.Linear)), path=tmp_path)
    quiet(learn.fit, 1)
    learn.model,learn.opt = mlp(),None
    quiet(learn.fit, 1)
    assert len(learn.sparsify.history)==1 and learn.sparsify.history.total.iloc[0]==round(.8*(64*8+8*4))/(64*8+8*4)
    learn.save('other')
    learn.load('other')


def test_load_clears_what_the_optimizer_remembers(tmp_path):
    a,b = learner(8, path=tmp_path),learner(8, path=tmp_path, cbs=SparsifyCallback(.5, schedule=one_shot), opt_func=Adam)
    for p in a.model.parameters(): p.data = torch.randn_like(p)
    quiet(a.fit, 1, cbs=SparsifyCallback(.5, schedule=one_shot))
    a.save('a', with_opt=False)
    quiet(b.fit, 1)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        b.load('a', with_opt=False)
    assert obeys(b)
    for k,m in b.sparsify.sparsifier.masks.items():
        assert not any(v[~m].any() for v in opt_state(b.opt, b.sparsify.sparsifier.targets[k].param)), k


def test_load_not_strict(tmp_path):
    "The masks of layers that are not there are left out by name; those that fit are taken"
    learn = learner(8, path=tmp_path)
    quiet(learn.fit, 1, cbs=SparsifyCallback({'0': .5, '3': .75}, schedule=one_shot))
    learn.save('two', with_opt=False)
    one = learner(8, path=tmp_path, model=nn.Sequential(*net()[:3], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)))
    with pytest.raises(ValueError, match='masks of other layers than this model has: 3.weight'): one.load('two', with_opt=False)
    with pytest.warns(UserWarning, match='the masks of 3.weight fit no parameter'): one.load('two', with_opt=False, strict=False)
    quiet(one.fit, 1, cbs=SparsifyCallback(.1, schedule=one_shot))
    assert conv_zeros(one)==N0//2


class OwnLookahead(Lookahead):
    "Moves every weight"
    def step(self, closure=None):
        super().step()
        for p,*_ in self.all_params(): p.data.add_(.1)


def hooked(ps, lr):
    opt = OptimWrapper(ps, torch.optim.SGD, lr=lr)
    opt.opt.register_step_post_hook(lambda *args: None)
    return opt


def instance(ps, lr):
    opt = OptimWrapper(ps, torch.optim.SGD, lr=lr)
    opt.opt.step = lambda closure=None: None
    return opt


@pytest.mark.parametrize('make', [lambda ps,lr: OwnLookahead(RAdam(ps, lr=lr)), hooked, instance])
def test_optimizers_that_are_not_trusted(make): assert not keeps_zeros(make([nn.Parameter(torch.ones(2, 2))], lr=.1))


class Moves(nn.Conv2d):
    "Writes to its own weight from the 29th forward pass on, when no mask is updated any more, or in validation"
    def __init__(self, *args, late=True):
        super().__init__(*args)
        self.late,self.passes = late,0
    def forward(self, x):
        self.passes += self.training
        if self.passes>28 and self.late or not (self.training or self.late): self.weight.data.clamp_(min=.01)
        return super().forward(x)


@pytest.mark.parametrize('late', [True, False])
def test_a_forward_that_moves_weights(late):
    "Found after the epoch or the fit, said, and put right"
    model = nn.Sequential(Moves(1, 8, 3, late=late), *net()[1:])
    learn = learner(8, model=model)
    with pytest.warns(UserWarning, match='pruned weights were moved, and not by the optimizer'):
        learn.fit(4, cbs=SparsifyCallback(.5, schedule=one_shot, context='local'))
    assert conv_zeros(learn)==N0//2+N3//2


@pytest.mark.parametrize('opt', [partial(Adam, wd=300.), partial(OptimWrapper, opt=torch.optim.AdamW, weight_decay=300.)])
def test_a_decay_of_more_than_all(opt):
    "1 - lr·wd is negative, and would make a +0.0 a -0.0"
    seen,learn = [],learner(8, opt_func=opt)
    class Watched(Learner):
        "Looks after each step, without a callback, which would not be trusted"
        def __call__(self, event_name):
            super().__call__(event_name)
            if event_name=='after_step': seen.append(conv_zeros(self))
    learn.__class__ = Watched
    learn.fit(1, cbs=SparsifyCallback(.5, schedule=one_shot.but(start=0.)), wd=300.)
    assert seen==[612]*8


def test_copies_are_looked_at_before_the_first_step():
    learn = learner(8)
    before = {k: v.clone() for k,v in learn.model.state_dict().items()}
    with pytest.raises(ValueError, match='this Linear is no copy of the model'): learn.fit(1, cbs=[SparsifyCallback(.5), SparseCopies(nn.Linear(3, 3))])
    assert all(torch.equal(v, before[k]) for k,v in learn.model.state_dict().items())
    with pytest.raises(TypeError, match="a copy is 'x'"): learner(8).fit(1, cbs=[SparsifyCallback(.5), SparseCopies(lambda learn: 'x')])
    with pytest.raises(TypeError, match='is no copy'): SparseCopies(nn.Linear)


def test_an_average_of_a_wrapped_model():
    learn = learner(8)
    average = AveragedModel(nn.DataParallel(learn.model))
    class Average(Callback):
        def after_batch(self):
            if self.training: average.update_parameters(nn.DataParallel(self.model))
    quiet(learn.fit, 1, cbs=[SparsifyCallback(.5), Average(), SparseCopies(average)])
    assert conv_zeros(average)==conv_zeros(learn)==612


def test_best_of_a_schedule_that_falls(tmp_path):
    "What SaveModel loads has its masks, and the optimizer remembers nothing of what they prune"
    learn = learner(8, path=tmp_path, opt_func=Adam)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        learn.fit(4, cbs=[SparsifyCallback(.8, schedule=dsd, sparse_best=False), SaveModelCallback(monitor='sparsity', comp=np.greater)])
    sp = learn.sparsify.sparsifier
    assert sp.obeys() and not any(v[~m].any() for k,m in sp.masks.items() for v in opt_state(learn.opt, sp.targets[k].param))
