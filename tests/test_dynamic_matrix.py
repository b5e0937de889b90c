"""SET, RigL, SNFS and a group of them against fastai's loops and optimizers. A probe looks after every step, after every epoch and after the fit: pruned weights and all that is remembered of
them are zero, gradients of pruned weights are zero before the optimizer sees them, and each layer has the number of weights it began with."""
import random
from functools import partial

import pytest
import torch
from fastai.basics import Adam, Callback, CancelFitException, CrossEntropyLossFlat, DataLoaders, Lamb, Learner, OptimWrapper, QHAdam, RAdam, RMSProp, SGD, TfmdDL, noop, ranger
from fastai.callback.all import GradientAccumulation, GradientClip, MixUp, ProgressCallback
from torch.utils.data import TensorDataset

from helpers import net, opt_state, split
from sparsify.callback import SparsifyCallback
from sparsify.dynamic import SNFS, SET, RigL
from sparsify.group import Group

ALGORITHMS = dict(set=lambda: SET(.7, update=3), epochs=lambda: SET(.7, update='epoch', split_signs=True), rigl=lambda: RigL(.7, update=3), rigl2=lambda: RigL(.7, update=3, grad_accum=2, replace_step=False),
                  snfs=lambda: SNFS(.7, update=3), group=lambda: Group({'0.*': SET(.5, update=2), '*': RigL(.7, update=3)}))
OPTIMIZERS = dict(sgd=partial(SGD, mom=.9), adam=Adam, rmsprop=RMSProp, radam=RAdam, qhadam=QHAdam, lamb=Lamb, ranger=ranger, wrapped=partial(OptimWrapper, opt=torch.optim.AdamW), rprop=partial(OptimWrapper, opt=torch.optim.Rprop))


def learner(n=24, **kwargs):
    g = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(n, 1, 8, 8, generator=g), torch.randint(0, 4, (n,), generator=g))
    torch.manual_seed(0)
    learn = Learner(DataLoaders(TfmdDL(data, bs=4, shuffle=True, num_workers=0), TfmdDL(data, bs=8, num_workers=0)), net(), loss_func=CrossEntropyLossFlat(), **kwargs)
    learn.dls.train.rng = random.Random(0)
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn


class Probe(Callback):
    order = 90
    def __init__(self): self.counts,self.moves,self.masks = set(),0,None
    def look(self):
        if not getattr(self.learn.sparsify, 'sparsifier', None): return
        sp = self.learn.sparsify.sparsifier
        if not sp.sparsity: return
        self.counts.add(tuple(int(m.sum()) for m in sp.masks.values()))
        for k,t in sp.targets.items():
            off = ~sp.masks[k]
            for v in (t.param.detach(), *opt_state(self.learn.opt, t.param)): assert not v[off].count_nonzero(), k
        new = {k: m.clone() for k,m in sp.masks.items()}
        if self.masks is not None and any(not torch.equal(m, self.masks[k]) for k,m in new.items()): self.moves += 1
        self.masks = new
    def before_step(self):
        sp = self.learn.sparsify.sparsifier
        for k,t in sp.targets.items():
            if t.param.grad is not None: assert not t.param.grad[~sp.masks[k]].count_nonzero()
    def after_step(self): self.look()
    def after_epoch(self): self.look()
    def after_fit(self): self.look()


def checked(probe, moves=True): assert len(probe.counts)==1 and (probe.moves>0)==moves


@pytest.mark.parametrize('algorithm', ALGORITHMS)
@pytest.mark.parametrize('opt', OPTIMIZERS)
def test_optimizers(algorithm, opt):
    probe,learn = Probe(),learner(opt_func=OPTIMIZERS[opt])
    learn.fit(3, 1e-2, cbs=[SparsifyCallback(algorithm=ALGORITHMS[algorithm]()), probe])
    checked(probe)


LOOPS = dict(one_cycle=lambda l, cbs: l.fit_one_cycle(3, 1e-2, cbs=cbs), flat_cos=lambda l, cbs: l.fit_flat_cos(3, 1e-2, cbs=cbs), sgdr=lambda l, cbs: l.fit_sgdr(2, 1, 1e-2, cbs=cbs),
             clip=lambda l, cbs: l.fit(3, 1e-2, cbs=[*cbs, GradientClip(.1)]), accumulated=lambda l, cbs: l.fit(4, 1e-2, cbs=[*cbs, GradientAccumulation(8)]), mixup=lambda l, cbs: l.fit(3, 1e-2, cbs=[*cbs, MixUp()]))


@pytest.mark.parametrize('algorithm', ALGORITHMS)
@pytest.mark.parametrize('loop', LOOPS)
def test_loops(algorithm, loop):
    probe = Probe()
    LOOPS[loop](learner(), [SparsifyCallback(algorithm=ALGORITHMS[algorithm]()), probe])
    checked(probe)


@pytest.mark.parametrize('algorithm', ALGORITHMS)
def test_fine_tune(algorithm):
    "While the body is frozen nothing is pruned; after it the number is the target's"
    probe,learn = Probe(),learner(splitter=split)
    with pytest.warns(UserWarning, match='frozen'): learn.fine_tune(3, 1e-2, freeze_epochs=1, cbs=[SparsifyCallback(algorithm=ALGORITHMS[algorithm]()), probe])
    checked(probe)


@pytest.mark.parametrize('algorithm', ALGORITHMS)
def test_looking_changes_nothing(algorithm):
    "`validate`, `get_preds`, `lr_find`, `summary` and `export` leave masks and weights as they are"
    learn = learner()
    cb = SparsifyCallback(algorithm=ALGORITHMS[algorithm]())
    learn.fit(2, 1e-2, cbs=cb)
    learn.add_cb(cb)
    was = [p.detach().clone() for p in learn.model.parameters()],{k: m.clone() for k,m in cb.sparsifier.masks.items()}
    learn.validate(); learn.get_preds(); learn.lr_find(num_it=4, show_plot=False)
    assert all(map(torch.equal, was[0], learn.model.parameters())) and all(torch.equal(m, cb.sparsifier.masks[k]) for k,m in was[1].items())


@pytest.mark.parametrize('ends', [CancelFitException, KeyboardInterrupt, ValueError])
@pytest.mark.parametrize('algorithm', ALGORITHMS)
def test_broken_off(algorithm, ends):
    "In the middle of a fit; the next fit goes on at the same number"
    class End(Callback):
        def before_step(self):
            if self.train_iter==8: raise ends('here')
    probe,learn,cb = Probe(),learner(),SparsifyCallback(algorithm=ALGORITHMS[algorithm]())
    try: learn.fit(3, 1e-2, cbs=[cb, probe, End()])
    except (KeyboardInterrupt, ValueError): pass
    learn.fit(3, 1e-2, cbs=[cb, probe])
    checked(probe)


@pytest.mark.parametrize('algorithm', ALGORITHMS)
@pytest.mark.parametrize('at', [1, 2, 3])
def test_killed_and_resumed(algorithm, at, tmp_path):
    "After any epoch: a new process (here a new learner and a new callback) ends with the same bits as a run that was not killed"
    def run(start=0, until=4):
        learn = learner(path=tmp_path, opt_func=Adam)
        if start: learn.load('at')
        class Order(Callback):
            def before_epoch(self): self.learn.dls.train.rng = random.Random(self.epoch)
            def after_epoch(self):
                if self.epoch==until-1 and until<4: self.learn.save('at'); raise KeyboardInterrupt
        cb = SparsifyCallback(algorithm=ALGORITHMS[algorithm]())
        try: learn.fit(4, 1e-2, cbs=[cb, Order()], start_epoch=start)
        except KeyboardInterrupt: pass
        return [*learn.model.state_dict().values(), *cb.sparsifier.masks.values()]
    whole = run()
    run(until=at)
    assert all(map(torch.equal, whole, run(start=at)))


@pytest.mark.parametrize('algorithm', ['rigl', 'set', 'group'])
def test_the_file_is_plain(algorithm, tmp_path):
    "Loads into a dense model with `weights_only=True`, pruned weights zero"
    learn = learner(path=tmp_path)
    learn.fit(2, 1e-2, cbs=SparsifyCallback(algorithm=ALGORITHMS[algorithm]()))
    learn.save('a', with_opt=False)
    plain = net()
    plain.load_state_dict(torch.load(tmp_path/'models'/'a.pth', weights_only=True), strict=True)
    for k,m in learn.sparsify.sparsifier.masks.items(): assert not plain.get_parameter(k)[~m].count_nonzero()
