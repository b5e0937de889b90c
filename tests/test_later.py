"Faults of the callback that the last attack found and that are mended, each as a small case"
import sys
from pathlib import Path

import pytest
from fastai.callback.training import GradientAccumulation
from torch import nn
from torch.utils.data import DataLoader as TorchLoader

sys.path.insert(0, str(Path(__file__).parent))
from test_stumbles import N, fit, learner, zeros

from sparsify.algorithm import GMP, Static
from sparsify.callback import SparsifyCallback
from sparsify.schedule import dsd, lin


def split(m): return [list(m[:4].parameters()), list(m[4:].parameters())]


@pytest.mark.parametrize('algorithm', [Static(.5, context='local'), GMP(.5, lin, init='topk')])
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
