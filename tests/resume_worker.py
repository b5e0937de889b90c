"Train in one of several ways, in a process that may be killed at any moment: from the start, or on from the last whole file"
import io, os, random, signal, sys
from functools import partial
from pathlib import Path
import torch
import torch.nn as nn
from fastai.basics import SGD, Adam, Callback, OptimWrapper, ranger
from fastai.callback.all import GradientAccumulation, SaveModelCallback
from helpers import learner, net, quiet
from sparsify import criteria as C
from sparsify.algorithm import GMP, Static
from sparsify.callback import SparsifyCallback
from sparsify.schedule import At, Every, Schedule, cos, dsd, iterative, lin, one_cycle, sched_agp

EPOCHS, BATCHES = 6, 4

def dropped():
    "`net`, with dropout before the head: what it computes depends on torch's own random numbers"
    m = net()
    return nn.Sequential(*m[:7], nn.Dropout(.2), m[7])

class Seeds(Callback):
    "fastai keeps no state of a random generator in its files: here each epoch's numbers depend on the epoch alone"
    order,run_valid = -5,False
    def before_train(self):
        e = self.learn.epoch
        random.seed(e); torch.manual_seed(e); self.learn.dls.train.rng.seed(e)

adamw = partial(OptimWrapper, opt=torch.optim.AdamW)
def accumulation(): return GradientAccumulation(8)      # two batches of 4 in a step, two steps in an epoch

WAYS = dict(      # optimizer, and what is new in each run
    sgd=(SGD, lambda: [SparsifyCallback(.9)]),
    adam_random=(Adam, lambda: [SparsifyCallback(.8, criteria=C.random_scores, update=3)]),
    adamw_movement=(adamw, lambda: [SparsifyCallback(.7, context='local', criteria=C.movement, schedule=lin), accumulation()]),
    ranger_updating=(ranger, lambda: [SparsifyCallback(.8, criteria=C.updating_movement, schedule=one_cycle)]),
    adam_filter=(Adam, lambda: [SparsifyCallback(.5, 'filter', 'local', schedule=lin)]),
    ranger_filter=(ranger, lambda: [SparsifyCallback({'0': .25, '3': .75}, 'filter', schedule=cos, update=Every(2, 1)), accumulation()]),
    sgd_static=(SGD, lambda: [SparsifyCallback(.8, algorithm=Static(init='random'), seed=3)]),
    adamw_at=(adamw, lambda: [SparsifyCallback(.9, 'kernel', schedule=iterative, update=At([2, 5, 11, 12, 20]))]),
    adam_dsd=(Adam, lambda: [SparsifyCallback(.6, schedule=dsd, criteria=C.updating_magnitude_increase, update=2)]),
    sgd_cycling=(partial(SGD, mom=.9), lambda: [SparsifyCallback([.2, .4, .5, .6, .7, .75, .8], update=3)]),
    adam_first=(Adam, lambda: [SparsifyCallback(algorithm=GMP(.8, Schedule(sched_agp, start_val=.5), init='random'), criteria=C.movmag)]),
    ranger_two=(ranger, lambda: [SparsifyCallback(.5, schedule=lin, layer_type='0', criteria=C.random_scores),
                                 SparsifyCallback(.75, layer_type=nn.Linear, context='local')]))

def last_file(folder):
    "The number of the last epoch that has a file, -1 if there is none"
    return max((int(f.stem.split('_')[1]) for f in (Path(folder)/'models').glob('model_*.pth')), default=-1)

def load(learn, name, **kwargs):
    "`learn.load`, any warning an error but the one that fastai's use of numpy is met with"
    return quiet(learn.load, name, but='numpy.core is deprecated', **kwargs)

def train(folder, way, attached=False, extra=()):
    "A new learner and new callbacks, from the last file on if there is one, to the end and into the file `end.pth`"
    opt,make = WAYS[way]
    cbs,start = [*make(), Seeds()],last_file(folder)+1
    learn = learner(BATCHES, model=dropped(), opt_func=opt, path=folder, cbs=cbs if attached else None)
    if start: load(learn, f'model_{start-1}', with_opt=True)
    files = SaveModelCallback(every_epoch=True, with_opt=True)
    quiet(learn.fit, EPOCHS, start_epoch=start, cbs=[*([] if attached else cbs), files, *extra], but='the sparsity is ')
    quiet(learn.save, 'end', with_opt=True)

def die(): os.kill(os.getpid(), signal.SIGKILL)

class Kill(Callback):
    "Kill this process at an event of a batch of an epoch"
    def __init__(self, event, epoch, batch, order):
        self.epoch_,self.batch_,self.order = epoch,None if event in OUTER else batch,order
        setattr(self, event, self.kill)
    def kill(self):
        if self.epoch_==self.learn.epoch and (self.batch_ is None or self.batch_==self.learn.iter): die()

OUTER = 'before_epoch', 'before_train', 'after_train', 'before_validate', 'after_validate', 'after_epoch'
EVENTS = (*OUTER, 'before_batch', 'after_pred', 'after_loss', 'before_backward', 'after_backward', 'before_step', 'after_step',
          'after_batch')
WRITES = 'half', 'fsync', 'before_replace', 'after_replace'

def kill_at_write(where, n):
    "Kill this process within its `n`-th write of a file, from 0: when half is there, before it is safe, before it has its name, or after"
    old,count = dict(save=torch.save, fsync=os.fsync, replace=os.replace),iter(range(10**6))
    def half(obj, f, **kwargs):
        if next(count)<n: return old['save'](obj, f, **kwargs)
        old['save'](obj, whole := io.BytesIO(), **kwargs)
        f.write(whole.getvalue()[:whole.tell()//2])
        f.flush()
        die()
    def fsync(fd): return old['fsync'](fd) if next(count)<n else die()
    def replace(a, b):
        now = next(count)==n
        if now and where=='before_replace': die()
        old['replace'](a, b)
        if now: die()
    if where=='half': torch.save = half
    elif where=='fsync': os.fsync = fsync
    else: os.replace = replace

if __name__=='__main__': train(sys.argv[1], sys.argv[2], sys.argv[3]=='attached')
