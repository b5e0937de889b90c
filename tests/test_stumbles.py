"What newcomers stumbled over, each as a small case"
import warnings

import pytest
import torch
from fastai.basics import CrossEntropyLossFlat, DataLoader, DataLoaders, Learner
from torch import nn

from sparsify.algorithm import GMP, Static
from sparsify.callback import SparsifyCallback

N = 8*1*9+16*8*9      # convolutional weights of the network below


def learner(**kwargs):
    torch.manual_seed(0)
    data = [(torch.randn(1, 6, 6), torch.tensor(i%3)) for i in range(32)]
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    return Learner(DataLoaders(DataLoader(data, bs=8), DataLoader(data, bs=32)), net, loss_func=CrossEntropyLossFlat(), **kwargs)


def fit(learn, n=1, **kwargs):
    with learn.no_bar(), learn.no_logging(): learn.fit(n, **kwargs)
    return learn


def zeros(learn): return sum(int((learn.model[i].weight==0).sum()) for i in (0, 2))


def test_list_of_percentages():
    with pytest.warns(FutureWarning, match='20'): cb = SparsifyCallback([20, 50])
    assert zeros(fit(learner(), cbs=cb))==round(.5*N)


def test_warnings_name_the_line():
    "A warning points at the line of the one who can mend it"
    learn = learner(splitter=lambda m: [list(m[:4].parameters()), list(m[4:].parameters())])
    learn.freeze()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        fit_cb = SparsifyCallback(90)
        with learn.no_bar(), learn.no_logging(): learn.fit(1, cbs=fit_cb)
    ours = [w for w in seen if 'sparsity is 90' in str(w.message) or 'frozen' in str(w.message)]
    assert len(ours)==2 and all(w.filename==__file__ for w in ours)


def test_pruning_on_after_hold():
    "A new callback takes over from a holder: one column with its value, the new target, and it is held on"
    learn = fit(learner(), cbs=SparsifyCallback(.8, hold=True))
    fit(learn, cbs=SparsifyCallback(.9))
    assert list(learn.recorder.metric_names)==['epoch', 'train_loss', 'valid_loss', 'sparsity', 'time']
    assert len(learn.recorder.values[-1])==3 and learn.recorder.values[-1][-1]==round(.9*N)/N
    fit(learn)
    assert zeros(learn)==round(.9*N)


def test_holder_keeps_the_rest():
    "Where the new callback has some of its layers only, the holder holds the others"
    learn = fit(learner(), cbs=SparsifyCallback({'0': .5, '2': .5}, hold=True))
    fit(learn, cbs=SparsifyCallback(.8, exclude='0'))
    fit(learn)
    assert [int((learn.model[i].weight==0).sum()) for i in (0, 2)]==[36, round(.8*16*72)]


def test_everything_asked_for():
    "On the way to 1 as many go as may"
    with pytest.warns(UserWarning, match='nothing is left'): learn = fit(learner(), cbs=SparsifyCallback(1))
    assert zeros(learn)==N


def test_nothing_to_hold():
    with pytest.warns(UserWarning, match='there is no zero'): fit(learner(), cbs=SparsifyCallback(algorithm=Static(init='from_zeros')))


def test_said_in_the_constructor():
    with pytest.warns(UserWarning, match='2:4 leaves 2'): SparsifyCallback(.9, nm=True)
    with pytest.raises(TypeError, match='hold'): SparsifyCallback(.9, hold='no')
    with pytest.raises(ValueError, match='Static needs'): SparsifyCallback(algorithm=Static())
    assert SparsifyCallback(.9, algorithm=Static()).algorithm==Static(.9) and GMP(.5).sparsity==.5
