"""What each of two processes does for `test_processes.py`, which starts it: `python processes_worker.py FOLDER SECONDS`

Both run the cases below one after the other, and leave what they have seen of each in `FOLDER/case-rank.pt`. After SECONDS they
show where they are and end."""
import faulthandler
import io
import os
import random
import sys
import warnings
from contextlib import redirect_stdout
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from fastai.basics import CrossEntropyLossFlat, DataLoaders, Learner, TfmdDL
from fastai.callback.tracker import SaveModelCallback
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.distributed import DistributedDL
from helpers import net, opt_state, split, watch
from torch.utils.data import TensorDataset

from sparsify.algorithm import GMP, Static
from sparsify.callback import SparsifyCallback
from sparsify.criteria import random_scores
from sparsify.dynamic import SNFS, SET, RigL
from sparsify.group import Group
from sparsify.schedule import lin
from sparsify.sparsifier import Sparsifier

RANK = int(os.environ['RANK'])
cases = {}


def broadcast(self, t, rank):
    "As fastai's own, which sends by way of a GPU"
    t = torch.LongTensor(t)
    dist.broadcast(t, rank)
    return t.tolist()


def learner(n=27, drop_last=False, shuffle=True, **kwargs):
    "A Learner on `n` items, the same in both processes; the weights it begins with, and the order it would shuffle to, are not"
    g = torch.Generator().manual_seed(0)
    xy = TensorDataset(torch.randn(n, 1, 8, 8, generator=g), torch.randint(0, 4, (n,), generator=g))
    train = TfmdDL(xy, bs=4, shuffle=shuffle, drop_last=drop_last, num_workers=0)
    valid = TfmdDL(TensorDataset(*xy[:8]), bs=4, num_workers=0)
    return Learner(DataLoaders(train, valid), net(), loss_func=CrossEntropyLossFlat(), lr=1e-2, path=FOLDER, **kwargs)


def together(learn): return learn.distrib_ctx(sync_bn=False, cpu=True)


def fit(learn, *args, **kwargs):
    with together(learn): learn.fit(*args, **kwargs)
    return learn


def seen(learn, **kwargs):
    "What is compared: masks, weights and all that the optimizer remembers of them"
    return dict(masks=dict(learn.sparsify.sparsifier.masks), model={k: v.clone() for k,v in learn.model.state_dict().items()},
                params={k: p.detach().clone() for k,p in learn.model.named_parameters()},
                opt={k: list(opt_state(learn.opt, p)) for k,p in learn.model.named_parameters()}, **kwargs)


def case(f):
    cases[f.__name__] = f
    return f


def _grid(how, cbs, **kwargs):
    def run(): return seen(fit(learner(), 3, cbs=[SparsifyCallback(.7, **kwargs), *(cb() for cb in cbs)]))
    run.__name__ = how
    case(run)

_ways = dict(local=dict(context='local'), everywhere=dict(context='global'), random=dict(criteria=random_scores))
for _how,_kwargs in _ways.items():
    _grid(_how, [], **_kwargs)
    _grid(f'{_how}_accumulated', [lambda: GradientAccumulation(8), lambda: GradientClip(.1)], **_kwargs)


@case
def filters(): return seen(fit(learner(), 3, cbs=SparsifyCallback(.5, 'filter', context='local')))


@case
def static(): return seen(fit(learner(), 2, cbs=SparsifyCallback(algorithm=Static(.7, init='random'))))


@case
def static_seeds(): return seen(fit(learner(), 2, cbs=SparsifyCallback(algorithm=Static(.7, init='random'), seed=RANK)))


_moving = dict(set=SET(.7, update=3), rigl=RigL(.7, update=3), snfs=SNFS(.7, update=3), group=Group({'0.*': SET(.5, update=2), '3.*': RigL(.7, update=3)}))

def _dynamic(how, algorithm, cbs, **kwargs):
    "With the masks after each step"
    def run():
        def masks(learn): return {k: m.clone() for k,m in learn.sparsify.sparsifier.masks.items()}
        after = watch(masks, 'after_batch')
        return seen(fit(learner(), 3, cbs=[SparsifyCallback(algorithm=algorithm, **kwargs), after, *(cb() for cb in cbs)]), after=after.seen)
    run.__name__ = how
    case(run)

for _how,_a in _moving.items():
    _dynamic(_how, _a, [])
    _dynamic(f'{_how}_accumulated', _a, [lambda: GradientAccumulation(8), lambda: GradientClip(.1)])
_dynamic('set_seeds', _moving['set'], [], seed=RANK)


@case
def seeds(): return seen(fit(learner(), 3, cbs=SparsifyCallback(.7, criteria=random_scores, seed=RANK)))


@case
def own_criterion():
    "Scores from the random numbers that the whole process shares, which differ between processes"
    drawn = []
    def scores(w):
        drawn.append(torch.rand_like(w))
        return drawn[-1]
    return seen(fit(learner(), 3, cbs=SparsifyCallback(.7, criteria=scores)), drawn=drawn[:2])


@case
def even(): return seen(fit(learner(n=32, drop_last=True), 3, cbs=SparsifyCallback(.7, schedule=lin)))


@case
def last_batch_dropped():
    "7 batches in the 30 items: of a half, 15, the loader drops what fills no batch and gives 3 batches, where its length says 4"
    n_batches = watch(lambda learn: len(learn.dl), 'after_train')
    n_run = watch(lambda learn: learn.train_iter, 'after_train')
    learn = fit(learner(n=30, drop_last=True), 3, cbs=[SparsifyCallback(.7, schedule=lin), n_batches, n_run])
    return seen(learn, length=n_batches.seen, batches=n_run.seen)


@case
def messages():
    "What is sent, and what `DistributedDataParallel` has to send at each step"
    send,sent = dist.broadcast,[]
    def broadcast(t, *args, **kwargs):
        if t.dtype==torch.uint8: sent.append(t.numel())
        return send(t, *args, **kwargs)
    buffers = watch(lambda learn: [n for n,_ in learn.model.module.named_buffers()], 'after_pred')
    shared = watch(lambda learn: len(learn.model.modules_buffers), 'after_pred')
    keys = watch(lambda learn: list(learn.model.module.state_dict()), 'after_pred')
    dist.broadcast = broadcast
    try: fit(learner(), 3, cbs=[SparsifyCallback(algorithm=GMP(.7, schedule=lin, update=3)), buffers, shared, keys])
    finally: dist.broadcast = send
    return dict(sent=sent, buffers=buffers.seen, shared=shared.seen, keys=keys.seen)


@case
def wrapped():
    "Names and masks of a wrapped network are those of the network, and masks of the one fit the other"
    model = net()
    sp,other = (Sparsifier(m) for m in (torch.nn.parallel.DistributedDataParallel(model), net()))
    other.load_state_dict(sp.sparsify_model(.7).state_dict())
    return dict(names=list(sp.targets), masks=dict(sp.masks), other=dict(other.masks))


@case
def two_fits():
    learn = fit(learner(), 2, cbs=SparsifyCallback(.3))
    return seen(fit(learn, 2, cbs=SparsifyCallback(.7)))


@case
def saved():
    "Each process has a folder of its own, to see who writes there, and then loads what the first has written"
    learn = learner()
    learn.path = FOLDER/f'of-{RANK}'
    with together(learn):
        learn.fit(2, cbs=SparsifyCallback(.7, context='local'))
        learn.save('ours')
        dist.barrier()
    path = FOLDER/'of-0'/'models'/'ours'
    fresh = learner()
    with together(fresh):
        fresh.load(path)
        fresh.fit(1, cbs=SparsifyCallback(.2, context='local'))
    live = fit(learner(cbs=SparsifyCallback(.3, context='local')), 1)
    masks = dict(live.sparsify.sparsifier.masks)
    with together(live): live.load(path)
    return dict(ours=seen(learn), fresh=seen(fresh), live=seen(live), masks=masks)


def _resumed(**kwargs):
    "A run of 3 epochs, and one that goes on from the file of its second"
    whole = learner(shuffle=False)
    fit(whole, 3, cbs=[SparsifyCallback(**kwargs), SaveModelCallback(fname='epoch', every_epoch=1, with_opt=True)])
    part = learner(shuffle=False)
    with together(part):
        part.load('epoch_1')
        part.fit(3, start_epoch=2, cbs=SparsifyCallback(**kwargs))
    return dict(whole=seen(whole), part=seen(part), history=[o.sparsify.history['total'].tolist() for o in (whole, part)])


@case
def resumed(): return _resumed(sparsity=.7)


@case
def resumed_random(): return _resumed(sparsity=.7, criteria=random_scores, seed=RANK)


@case
def resumed_static(): return _resumed(algorithm=Static(.7, init='random'), seed=RANK)


@case
def best():
    "fastai says on every process which epoch is the best so far"
    cbs = [SparsifyCallback(.7), SaveModelCallback(fname='best')]
    with redirect_stdout(io.StringIO()): return seen(fit(learner(), 5, cbs=cbs))


@case
def frozen():
    "A warning of the library"
    learn = learner(splitter=split)
    learn.freeze()
    return seen(fit(learn, 1, cbs=SparsifyCallback(.7)))


def _alone_first(algorithm, again=True):
    "Each trains for itself, then both together, with the same callback or another; a new optimizer, as fastai sends no state of it"
    learn,cbs = learner(),[SparsifyCallback(algorithm=algorithm, seed=RANK) for _ in range(2)]
    with redirect_stdout(io.StringIO()): learn.fit(1, cbs=cbs[0])
    masks = dict(cbs[0].sparsifier.masks)
    return seen(fit(learn, 2, cbs=cbs[0 if again else 1], reset_opt=True), alone=masks)


@case
def alone_first(): return _alone_first(GMP(.7))


@case
def alone_first_other(): return _alone_first(GMP(.7), again=False)


@case
def alone_first_static(): return _alone_first(Static(.7, init='random'))


@case
def alone_first_static_other(): return _alone_first(Static(.7, init='random'), again=False)


def main():
    DistributedDL._broadcast = broadcast
    dist.init_process_group('gloo', init_method=f'file://{FOLDER}/store', rank=RANK, world_size=2, timeout=timedelta(seconds=30))
    warnings.simplefilter('always', UserWarning)
    for name,f in cases.items():
        for seed in torch.manual_seed,np.random.seed,random.seed: seed(RANK+1)
        torch.save(f(), FOLDER/f'{name}-{RANK}.pt')
    dist.barrier()
    dist.destroy_process_group()


if __name__=='__main__':
    FOLDER = Path(sys.argv[1])
    faulthandler.dump_traceback_later(float(sys.argv[2]), exit=True)
    main()
