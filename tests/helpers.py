"Small nets, data and learners, and what a sparse network must be at any time: shared by the tests of the callback"
import random
import warnings
import torch
import torch.nn as nn
from fastai.basics import (Callback, CrossEntropyLossFlat, DataLoaders, Datasets, Learner, TfmdDL, accuracy, noop)
from fastai.callback.progress import ProgressCallback
from torch.utils.data import TensorDataset

torch.set_num_threads(1)   # threads on tensors this small wait for each other, most of all on a busy machine

N0, N3, N7 = 8*1*3*3, 16*8*3*3, 4*16   # weights of `net`: convolutions '0' and '3' (1224 together), Linear '7'

def net():
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1, stride=2), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))

def mlp(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 8, bias=False), nn.ReLU(), nn.Linear(8, 4, bias=False))

def split(m):
    "Two parameter groups: up to the first convolution and its norm, and the rest"
    return [list(m[:3].parameters()), list(m[3:].parameters())]

def data(n=8, bs=4, n_valid=1):
    "`n` batches to train on and `n_valid` to validate on, the same on every call"
    g = torch.Generator().manual_seed(0)
    random.seed(0)      # fastai's loader draws the seed of its shuffling from there
    def dl(k, **kw):
        xy = TensorDataset(torch.randn(k*bs, 1, 8, 8, generator=g), torch.randint(0, 4, (k*bs,), generator=g))
        return TfmdDL(xy, bs=bs, num_workers=0, **kw)
    return DataLoaders(dl(n, shuffle=True), dl(n_valid))

def get_x(i): return torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(i))
def get_y(i): return torch.tensor(i%4)
def datasets(): return Datasets(list(range(24)), [[get_x], [get_y]], splits=[list(range(16)), list(range(16, 24))]).dataloaders(bs=4, num_workers=0)

def learner(n=8, model=None, **kwargs):
    "A quiet Learner on `n` batches"
    torch.manual_seed(0)
    kwargs = dict(dls=data(n) if 'dls' not in kwargs else None, model=net() if model is None else model, loss_func=CrossEntropyLossFlat(), metrics=accuracy, lr=1e-2)|kwargs
    learn = Learner(**kwargs)
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

def watch(f, *events, order=10.6, valid=False):
    "A callback that appends `f(learn)` to its `seen` at each of `events`"
    def event(self): self.seen.append(f(self.learn))
    cb = Callback(**dict.fromkeys(events or ('after_pred',), event))
    cb.order, cb.run_valid, cb.seen = order, valid, []
    return cb

def n_zeros(*ws):
    "How many entries are +0.0, by their bits"
    ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return sum(int((w.detach().contiguous().view(ints[w.element_size()])==0).sum()) for w in ws)

def conv_zeros(learn_or_model):
    "Zeros in the convolutions' weights"
    m = learn_or_model.model if isinstance(learn_or_model, Learner) else learn_or_model
    return n_zeros(*(o.weight for o in m.modules() if isinstance(o, nn.Conv2d)))

def pruned(sp):
    "`{name: weights that the mask prunes}`"
    return {k: int((~m).sum()) for k,m in sp.masks.items()}

def opt_state(opt, p):
    "Everything of `p`'s shape that an optimizer, or one that it wraps, remembers"
    while opt is not None:
        d = vars(opt)
        if 'state' in d and p in d['state']: yield from (v for v in d['state'][p].values() if torch.is_tensor(v) and v.shape==p.shape)
        for ps,ss in zip(opt.param_lists, d['slow_weights']) if d.get('slow_weights') else (): yield from (s for q,s in zip(ps, ss) if q is p)
        opt = d.get('opt')

def obeys(learn):
    "Whether every pruned weight is +0.0, and all that the optimizer remembers of it is 0"
    for sp in {id(cb.sparsifier): cb.sparsifier for cb in learn.cbs if getattr(cb, 'sparsifier', None)}.values():
        for k,m in sp.masks.items():
            p = sp.targets[k].param
            if n_zeros(p[~m])!=int((~m).sum()) or any(v[~m].any() for v in opt_state(learn.opt, p)): return False
    return True

def snapshot(model): return {k: v.clone() for k,v in model.state_dict().items()}

def same(a, b):
    "Whether two state dicts have the same keys in the same order and the same bits"
    return list(a)==list(b) and all(torch.equal(a[k], b[k]) and a[k].dtype==b[k].dtype for k in a)

def quiet(f, *args, but=None, **kwargs):
    "`f(...)`, any warning an error, except one that begins like `but`"
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        if but: warnings.filterwarnings('ignore', but)
        return f(*args, **kwargs)
