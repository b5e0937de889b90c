"""What the step path may not do, whatever the machine: ask a device for a number, copy, or compute an update that changes nothing. Times are measured in `benchmarks/`."""
import pytest
import torch
from fastai.basics import Callback, DataLoaders, Learner, SGD, noop
from fastai.callback.progress import ProgressCallback
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import sparsify.masks as masks
from sparsify.algorithm import Static
from sparsify.callback import SparsifyCallback
from sparsify.schedule import Schedule, agp, iterative, one_shot, sched_lin

SYNCS = {'aten::_local_scalar_dense', 'aten::is_nonzero', 'aten::item', 'aten::nonzero', 'aten::masked_select', 'aten::equal', 'aten::_to_copy', 'aten::copy_'}


class Counter(TorchDispatchMode):
    "Names of the operations that wait for a device, or copy to another"
    def __init__(self): super().__init__(); self.seen = []
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name in SYNCS: self.seen.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def learner(n=40):
    torch.manual_seed(0)
    batch = torch.randn(4, 3, 8, 8),torch.randint(0, 2, (4,))
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
    learn = Learner(DataLoaders([batch]*n, [batch]), net, loss_func=nn.CrossEntropyLoss(), opt_func=SGD)
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn


def syncs_of_steps(monkeypatch, cb, n=40, others=()):
    "For each batch, what waits for the device in the events of `cb`, on the path that CUDA takes"
    monkeypatch.setattr(masks, '_bits', lambda t, mask: (None, None))
    found,updates,call = {},{},SparsifyCallback.__call__
    def counted(self, name):
        if name not in ('before_batch', 'after_pred', 'after_loss', 'before_backward', 'after_backward', 'before_step', 'after_step', 'after_batch'): return call(self, name)
        before = self.sparsifier.updates
        with Counter() as c: out = call(self, name)
        found.setdefault(self.learn.iter, []).extend(c.seen)
        updates[self.learn.iter] = updates.get(self.learn.iter, 0)+self.sparsifier.updates-before
        return out
    monkeypatch.setattr(SparsifyCallback, '__call__', counted)
    learner(n).fit(1, 1e-2, cbs=[cb, *others])
    assert sorted(found)==list(range(n))
    return found,updates


@pytest.mark.parametrize('make', [lambda: SparsifyCallback(.5, schedule=agp), lambda: SparsifyCallback(.5, context='local', schedule=iterative),
                                  lambda: SparsifyCallback(algorithm=Static(.5, init='topk')), lambda: SparsifyCallback(.5, granularity='filter', context='local', schedule=one_shot)],
                         ids=['agp', 'iterative', 'static', 'filter'])
def test_no_step_waits_for_the_device(make, monkeypatch):
    "Only those with an update, and the first one, whose end is checked once"
    found,updates = syncs_of_steps(monkeypatch, make())
    assert [i for i,seen in found.items() if seen and not updates[i] and i]==[]
    assert any(found.values())      # an update does: the counter counts


def test_no_step_waits_where_nobody_is_trusted(monkeypatch):
    "With a callback of the user's own, weights are zeroed after every step, which waits for nothing either"
    class Mine(Callback): order = 70
    found,updates = syncs_of_steps(monkeypatch, SparsifyCallback(.5, schedule=agp), others=[Mine()])
    assert [i for i,seen in found.items() if seen and not updates[i] and i]==[]


def test_an_update_that_changes_no_count_is_not_computed(monkeypatch):
    "Of 216+576 weights a line to 1 % over 400 batches prunes round(.01·792)=8 one by one: eight updates, though it is due at every 20th batch and each is due earlier"
    calls = []
    real = masks.topk_masks
    import sparsify.context as context
    monkeypatch.setattr(context, 'topk_masks', lambda *a, **k: calls.append(1) or real(*a, **k))
    cb = SparsifyCallback(.01, schedule=Schedule(sched_lin), context='global', update=1)
    learner(400).fit(1, 1e-2, cbs=cb)
    assert cb.sparsifier.updates==8 and len(calls)==8
    assert sum(int((~m).sum()) for m in cb.sparsifier.masks.values())==8
