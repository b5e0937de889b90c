"Killed, interrupted, out of disk or memory, loaded elsewhere: what was sparse goes on, to the bit, and no file is ever half written"
import copy, errno, gc, io, os, pickletools, random, resource, signal, subprocess, sys, time, traceback, zipfile
from functools import partial
from pathlib import Path
import numpy as np
import pytest
import torch
import torch.nn as nn
from fastai.basics import Adam, Callback, CancelStepException, SGD, TensorBase, load_learner
from fastai.callback.all import SaveModelCallback
import resume_worker as worker
from helpers import N0, N3, conv_zeros, datasets, learner, n_zeros, net, obeys, pruned, quiet, same, snapshot, watch
from resume_worker import EPOCHS, EVENTS, WAYS, WRITES, Kill, Seeds, kill_at_write, last_file, load, train
from sparsify import criteria as C
from sparsify.algorithm import GMP, Static
from sparsify.callback import SparsifyCallback
from sparsify.progress import SparsityMetric
from sparsify.schedule import Schedule, lin, one_shot, sched_agp
from sparsify.sparsifier import Sparsifier

N = N0+N3                                   # 1224 weights in the convolutions
ROOT = Path(worker.__file__).parent.parent
pytestmark = pytest.mark.filterwarnings('error:You are shadowing', 'ignore:numpy.core is deprecated', 'ignore:.*mode.chained_assignment')
forks = pytest.mark.skipif(not hasattr(os, 'fork') or torch.cuda.is_available(), reason='a process that uses CUDA cannot fork')

def bits(x):
    "Tensors, and what is in lists and dicts, as something that is equal only if every bit is"
    if torch.is_tensor(x): return tuple(x.shape), x.dtype, x.detach().cpu().contiguous().numpy().tobytes()
    if isinstance(x, dict): return {k: bits(v) for k,v in x.items()}
    return [bits(o) for o in x] if hasattr(x, '__iter__') and not isinstance(x, str) else x

def content(file):
    "All that is in a file: weights, optimizer, and what is sparse"
    d = torch.load(file, weights_only=False)
    sparse = d['model']._metadata['']['sparsify']
    sparse['runs'].sort(key=lambda r: list(r['sparsifier']['masks']))      # their order is that of the callbacks
    return dict(opt=d['opt'], model=dict(d['model']), sparse=sparse)

def state_of(file, **kwargs):
    "The sparse state in a file that has no optimizer"
    return torch.load(file, **kwargs)._metadata['']['sparsify']

def edited(old, new, change):
    "A copy of a file of `learn.save(with_opt=False)` with `change(state)` in the place of its sparse state"
    d = torch.load(old)
    d._metadata['']['sparsify'] = change(copy.deepcopy(d._metadata['']['sparsify']))
    torch.save(d, new)

def globals_in(file):
    "The names that a file of `torch.save` imports"
    with zipfile.ZipFile(file) as z: raw = z.read(next(n for n in z.namelist() if n.endswith('data.pkl')))
    return {arg for op,arg,_ in pickletools.genops(raw) if op.name=='GLOBAL'}

def at(folder, name): return Path(folder)/'models'/f'{name}.pth'
def all_whole(folder):
    "Whether every file under a final name can be read"
    return all(torch.load(f, weights_only=False) for f in (Path(folder)/'models').glob('*.pth'))

# ---- killed

def forked(f, after=None):
    "How a child process that runs `f` ended: 0, or minus the signal; killed after some seconds, if they are given"
    sys.stdout.flush(); sys.stderr.flush()
    pid = os.fork()
    if not pid:
        signal.alarm(60)
        try: f()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    if after is not None:
        time.sleep(after)
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    "A function: what the uninterrupted run of a way wrote at its end, and the seconds it took"
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])      # imports much, once for all children
    runs = {}
    def get(way):
        if way not in runs:
            d,t = tmp_path_factory.mktemp(way),time.monotonic()
            assert forked(partial(train, d, way))==0
            runs[way] = content(at(d, 'end')),time.monotonic()-t
        return runs[way]
    return get

def kill_points(n=20):
    "Ways to train, the moments at which they are killed, and whether callbacks are the learner's own: `n`, each at random"
    rng,points = random.Random(8),[]
    kinds = ['event']*(n-12)+['clock']*4+list(WRITES)*2
    rng.shuffle(kinds)
    for i,kind in enumerate(kinds):
        if kind=='event': kill = rng.choice(EVENTS),rng.randrange(EPOCHS),rng.randrange(4),rng.choice((-20, 10.4, 10.6, 70))
        else: kill = kind,rng.random() if kind=='clock' else rng.randrange(EPOCHS)
        again = [(rng.choice(EVENTS), 5, rng.randrange(4), 10.6), (rng.choice(WRITES), rng.randrange(5))][i%2]
        points.append((list(WAYS)[i%len(WAYS)], [kill, again] if i%5==0 else [kill], rng.random()<.5))
    return points

def run_until(folder, way, attached, kill):
    "Train, and be killed"
    if kill[0] in WRITES: kill_at_write(*kill)
    train(folder, way, attached, [Kill(*kill)] if kill[0] in EVENTS else [])

def name_of(p): return '-'.join([p[0], *(str(o) for k in p[1] for o in (k if k[0]!='clock' else k[:1]))])

@pytest.fixture(scope='module')
def fresh(tmp_path_factory):
    "A run that was killed in its fourth epoch goes on in a new interpreter, beside the other tests, as its imports take seconds"
    way,folder = 'ranger_updating',tmp_path_factory.mktemp('fresh')
    assert forked(partial(run_until, folder, way, False, ('after_step', 3, 2, 10.6)))==-signal.SIGKILL and last_file(folder)==2
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join([str(ROOT), str(ROOT/'tests')])}
    process = subprocess.Popen([sys.executable, '-W', 'ignore', worker.__file__, folder, way, 'attached'], env=env, cwd=folder)
    yield way,folder,process
    process.kill()
    process.wait()

@forks
@pytest.mark.parametrize('point', kill_points(), ids=name_of)
def test_killed(point, whole, fresh, tmp_path):
    "On from the last whole file with everything new: weights, masks, optimizer and history are those of a run that nobody killed"
    way,kills,attached = point
    wanted,seconds = whole(way)
    for kill in kills:
        end = forked(partial(run_until, tmp_path, way, attached, kill), kill[1]*seconds if kill[0]=='clock' else None)
        assert end==-signal.SIGKILL or (kill[0]=='clock' and end==0)
        assert all_whole(tmp_path) and (kill[0]!='half' or list(tmp_path.rglob('*.part')))
    assert forked(partial(train, tmp_path, way, not attached))==0 and all_whole(tmp_path)
    got = content(at(tmp_path, 'end'))
    for k in 'sparse', 'model', 'opt': assert bits(got[k])==bits(wanted[k]), k

def test_kill_points_cover():
    "Twenty runs of twelve ways, four of them killed twice; each of the writes twice, and both ways to give a callback"
    points = kill_points()
    firsts = [k[0][0] for _,k,_ in points]
    assert len(points)==20 and {w for w,*_ in points}==set(WAYS) and {a for *_,a in points}=={True, False}
    assert all(firsts.count(w)==2 for w in WRITES)
    assert sum(len(k)==2 for _,k,_ in points)==4

COUNTS = dict(sgd=[1102], adam_random=[979], adamw_movement=[50+806], ranger_updating=[979], adam_filter=[612], ranger_filter=[18+864],
              sgd_static=[979], adamw_at=[1098], adam_dsd=[0], sgd_cycling=[979], adam_first=[979], ranger_two=[36, 48])

@forks
@pytest.mark.parametrize('way', WAYS)
def test_uninterrupted(way, whole):
    "What all others are compared with has reached its target: 122 whole kernels of 9 weights, 4 of 8 and 8 of 16 filters"
    runs = whole(way)[0]['sparse']['runs']
    assert [sum(r['records'][-1][2]) for r in runs]==COUNTS[way] and all(len(r['records'])==EPOCHS for r in runs)

@forks
def test_in_a_fresh_process(fresh, whole):
    "Nothing is in memory that is not in the file"
    way,folder,process = fresh
    assert process.wait(120)==0 and bits(content(at(folder, 'end')))==bits(whole(way)[0])

# ---- interrupted

class Raise(Callback):
    "Raise in the second epoch of a fit, or at its start"
    def __init__(self, ex, event, order):
        self.ex,self.event,self.order = ex,event,order
        setattr(self, event, self.fail)
    def fail(self):
        if self.event in ('before_fit', 'after_fit') or self.learn.epoch==1: raise self.ex('on purpose')

def hung_on(model):
    "All that is kept on modules and parameters, weights aside: names, and how many there are of what"
    def size(v): return len(v) if isinstance(v, (dict, set, list)) else type(v)
    mods = {n: {k: size(v) for k,v in vars(m).items()}|{'buffers': list(m._buffers), 'type': type(m)} for n,m in model.named_modules()}
    pars = {n: (vars(p), p._backward_hooks, getattr(p, '_post_accumulate_grad_hooks', None)) for n,p in model.named_parameters()}
    return mods,pars

def left_behind(learn):
    "Names in a learner, its callbacks and metrics, without what the design allows: the holder of the last callback"
    return (sorted(set(vars(learn))-{'_last_sparse'}), [type(o) for o in learn.cbs if not isinstance(o, SparsifyCallback)],
            [type(o) for o in learn.metrics if not isinstance(o, SparsityMetric)])

@pytest.mark.parametrize('event', ('before_fit', *EVENTS, 'after_fit'))
@pytest.mark.parametrize('ex,attached,order', [(KeyboardInterrupt, False, 10.6), (RuntimeError, True, 10.4)], ids=['given', 'attached'])
def test_interrupted(event, ex, attached, order, tmp_path):
    "No more is left than by a dense fit that is interrupted alike; files are whole, and the next fit is as if nothing had been"
    cb,learns = SparsifyCallback(.5, schedule=lin),[]
    for cbs in [cb], []:
        learn = learner(1, cbs=cbs if attached else None, path=tmp_path/str(len(learns)))
        more = [] if attached else cbs
        files = SaveModelCallback(every_epoch=True, with_opt=True)
        with pytest.raises(ex, match='on purpose'): learn.fit(2, cbs=[*more, files, Raise(ex, event, order)])
        learns.append(learn)
    learn,dense = learns
    assert hung_on(learn.model)==hung_on(dense.model) and left_behind(learn)==left_behind(dense)
    assert any(isinstance(o, SparsityMetric) for o in learn.metrics)<=attached and (cb in learn.cbs)==attached
    assert all_whole(tmp_path/'0') and not list(tmp_path.rglob('*.part'))
    quiet(learn.fit, 2, cbs=None if attached else cb)
    assert conv_zeros(learn)==612==sum(pruned(cb.sparsifier).values()) and learn.sparsify is cb
    assert learn.recorder.metric_names.count('sparsity')==1
    assert hung_on(learn.model)==hung_on(dense.model) and len(learn.metrics)==1
    with learn.added_cbs([] if attached else cb): assert obeys(learn)

class Tight(nn.Module):
    "An identity that has no memory left at one call"
    def __init__(self):
        super().__init__()
        self.calls = 0
    def forward(self, x):
        self.calls += 1
        if self.calls==5: raise torch.OutOfMemoryError('out of memory')
        return x

@pytest.mark.parametrize('attached', (True, False))
def test_out_of_memory(attached, tmp_path):
    "In the forward pass of the fifth batch, after a mask update: the file of epoch 0 can be gone on from, and so can the learner"
    cb = SparsifyCallback(.5, schedule=lin)
    learn = learner(3, model=nn.Sequential(*net(), Tight()), cbs=cb if attached else None, path=tmp_path)
    more = [] if attached else [cb]
    with pytest.raises(torch.OutOfMemoryError): learn.fit(2, cbs=[*more, SaveModelCallback(every_epoch=True, with_opt=True)])
    assert hung_on(learn.model)==hung_on(nn.Sequential(*net(), Tight())) and [f.name for f in tmp_path.rglob('*.p*')]==['model_0.pth']
    load(learn, 'model_0', with_opt=True)
    assert conv_zeros(learn)==245      # at batch 2 of 0 to 5, .5·2/5 of 1224 is 244.8
    quiet(learn.fit, 2, start_epoch=1, cbs=more or None)
    assert conv_zeros(learn)==612 and len(learn.metrics)==1

# ---- out of disk

def full(): return OSError(errno.ENOSPC, 'No space left on device')

def fails(where, ex, monkeypatch):
    "Let the next files fail: half way, before they are on the disk, or before they get their name"
    def raises(*_): raise ex
    def half(obj, f, _save=torch.save, **kwargs):
        _save(obj, whole := io.BytesIO(), **kwargs)
        f.write(whole.getvalue()[:whole.tell()//2])
        raise ex
    if where=='half': monkeypatch.setattr(torch, 'save', half)
    else: monkeypatch.setattr(os, where, raises)

@pytest.mark.parametrize('where', ('half', 'fsync', 'replace'))
@pytest.mark.parametrize('ex', (full(), KeyboardInterrupt('on purpose')), ids=['disk', 'interrupt'])
def test_file_fails(where, ex, tmp_path, monkeypatch):
    "By hand and in a fit: the earlier file of that name stays, nothing else is left, and the next file and the next fit are right"
    cb = SparsifyCallback(.5, schedule=lin)
    learn = learner(2, path=tmp_path)
    quiet(learn.fit, 1, cbs=[cb, SaveModelCallback(every_epoch=True, with_opt=True)])
    file,clean = at(tmp_path, 'model_0'),hung_on(net())
    earlier = file.read_bytes()
    with monkeypatch.context() as m:
        fails(where, ex, m)
        with pytest.raises(type(ex)): learn.save('model_0', with_opt=True)
        assert hung_on(learn.model)==clean
        with pytest.raises(type(ex)): learn.fit(2, cbs=[cb, SaveModelCallback(every_epoch=True, with_opt=True)])
        assert hung_on(learn.model)==clean and cb not in learn.cbs and len(learn.metrics)==1
    assert [f for f in tmp_path.rglob('*') if f.is_file()]==[file] and file.read_bytes()==earlier
    learn.save('model_0', with_opt=True)
    assert all_whole(tmp_path) and file.read_bytes()!=earlier
    quiet(learn.fit, 1, cbs=SparsifyCallback(.9, schedule=lin))
    assert conv_zeros(learn)==1102

@forks
def test_disk_is_full(tmp_path):
    "With a limit of 12 kB, which is less than a file takes: it fails, the earlier one stays; without the limit all is well again"
    learn = learner(2, path=tmp_path)
    quiet(learn.fit, 1, cbs=SparsifyCallback(.5))
    learn.save('a', with_opt=True)
    earlier = at(tmp_path, 'a').read_bytes()
    def child():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        old = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, old[1]))
        try:
            for f in (lambda: learn.save('a', with_opt=True),
                      lambda: learn.fit(1, cbs=[SparsifyCallback(.7), SaveModelCallback(fname='a', every_epoch=True, with_opt=True)])):
                with pytest.raises((OSError, RuntimeError)): f()
                assert hung_on(learn.model)==hung_on(net()) and len(learn.metrics)==1
        finally: resource.setrlimit(resource.RLIMIT_FSIZE, old)
        assert [f.name for f in tmp_path.rglob('*') if f.is_file()]==['a.pth'] and at(tmp_path, 'a').read_bytes()==earlier
        quiet(learn.fit, 1, cbs=SparsifyCallback(.9))
        learn.save('a', with_opt=True)
        assert conv_zeros(learn)==1102 and all_whole(tmp_path)
    assert len(earlier)>12_000 and forked(child)==0

# ---- what is in a file

class Wide(nn.Module):
    "A million weights in one layer"
    def __init__(self):
        super().__init__()
        self.f,self.big,self.head = nn.Flatten(),nn.Linear(64, 16384, bias=False),nn.Linear(16384, 4)
    def forward(self, x): return self.head(self.big(self.f(x)))

@pytest.mark.parametrize('sparsity,gone,least', [(.9, 943718, 61473), (.5, 524288, 131072)])     # .9·1048576 = 943718.4
def test_at_most_a_bit_for_each_weight(sparsity, gone, least, tmp_path):
    """64·16384 weights are 131072 bytes of masks, beside at most 3 kB; with or without the optimizer, and however often it is saved. At 90 % the entropy of a mask is .469 bits a weight,
    which are 61473 bytes, and compressed it takes less than 80000; at 50 % it is a bit"""
    cb = SparsifyCallback(sparsity, layer_type='big', schedule=one_shot)
    dense,learn = (learner(2, model=Wide(), path=tmp_path, opt_func=SGD) for _ in range(2))
    quiet(dense.fit, 1)
    quiet(learn.fit, 1, cbs=cb)
    assert pruned(cb.sparsifier)=={'big.weight': gone}
    for with_opt in True, False:
        dense.save('dense', with_opt=with_opt)
        for _ in range(2): learn.save('sparse', with_opt=with_opt)
        assert least<=at(tmp_path, 'sparse').stat().st_size-at(tmp_path, 'dense').stat().st_size<=(80000 if sparsity==.9 else 131072+3000)

def sparse_file(folder, cb=None, n=4, name='a', **kwargs):
    "A learner after a fit of one epoch to 50 %, 612 zeros, in a file without optimizer"
    learn = learner(n, path=folder)
    quiet(learn.fit, 1, cbs=cb or SparsifyCallback(.5, schedule=lin, **kwargs))
    learn.save(name, with_opt=False)
    return learn

def test_a_plain_model_loads_it(tmp_path):
    "Strictly, with `weights_only=True`; no name of this library is in the file; keys, order, shapes and types are those of a dense model"
    learn = sparse_file(tmp_path)
    sd,plain = torch.load(at(tmp_path, 'a'), weights_only=True),net()
    assert [(k, v.shape, v.dtype) for k,v in sd.items()]==[(k, v.shape, v.dtype) for k,v in plain.state_dict().items()]
    plain.load_state_dict(sd, strict=True)
    x = torch.ones(1, 1, 8, 8)
    assert conv_zeros(plain)==612 and torch.equal(plain.eval()(x), learn.model.eval()(x))
    assert not any(a.startswith('sparsify') for a in globals_in(at(tmp_path, 'a')))

def test_what_a_file_holds(tmp_path):
    "Each mask as bits and a shape; tensors, numbers, strings, lists and dicts, nothing else"
    learn = sparse_file(tmp_path)
    state = state_of(at(tmp_path, 'a'))
    masks,sp = state['runs'][0]['sparsifier']['masks'],learn.sparsify.sparsifier
    assert state['version']==1 and len(state['runs'])==1 and {k: (tuple(m['shape']), m['bits'].numel()) for k,m in masks.items()}=={
        '0.weight': ((8, 1, 3, 3), 9), '3.weight': ((16, 8, 3, 3), 144)}
    for k,m in masks.items():
        kept = np.unpackbits(m['bits'].numpy(), bitorder='little')[:sp.masks[k].numel()].astype(bool)
        assert (torch.from_numpy(kept).view(m['shape'])==sp.masks[k]).all()
    def plain(x):
        if isinstance(x, dict): return all(isinstance(k, str) and plain(v) for k,v in x.items())
        return all(map(plain, x)) if isinstance(x, list) else x is None or type(x) in (torch.Tensor, int, float, str, bool)
    assert plain(state)

def test_a_dense_file_drops_live_masks(tmp_path):
    "With a warning that names them; the weights are the file's, to the bit, and the next fit begins dense and reaches its target"
    learner(2, path=tmp_path).save('dense', with_opt=False)
    cb,want = SparsifyCallback(.5, schedule=lin),torch.load(at(tmp_path, 'dense'))
    learn = learner(2, cbs=cb, path=tmp_path)
    quiet(learn.fit, 1)
    says = 'holds no masks: those of 0.weight, 3.weight are dropped'
    with pytest.warns(UserWarning, match=says) as found: learn.load('dense', with_opt=False)
    assert sum(w.category is UserWarning for w in found)==1 and same(learn.model.state_dict(), want) and cb.sparsifier is None
    seen = watch(conv_zeros)
    quiet(learn.fit, 1, cbs=seen)
    assert seen.seen==[0, 612] and conv_zeros(learn)==612
    learn.save('after', with_opt=False)
    assert len(state_of(at(tmp_path, 'after'))['runs'])==1

# ---- damaged or of something else

def put(*path):
    "A change of a state: the value, the last argument, comes to this place; without one the key goes"
    def change(value):
        def f(state, value=value):
            d = state
            for k in path[:-1]: d = d[k]
            if value is GONE: del d[path[-1]]
            else: d[path[-1]] = value(d[path[-1]]) if callable(value) else value
            return state
        return f
    return change

GONE = object()
RUN, SP = ('runs', 0), ('runs', 0, 'sparsifier')
BITS = (*SP, 'masks', '3.weight', 'bits')

DAMAGED = dict(     # the change, and what the message says of it
    version=(put('version')(2), 'version 2'),
    no_version=(put('version')(GONE), 'version'),
    no_runs=(put('runs')(GONE), 'runs'),
    runs_none=(put('runs')(None), 'damaged'),
    not_a_dict=(lambda s: 'masks', 'damaged'),
    no_sparsifier=(put(*SP)(GONE), 'sparsifier'),
    no_algorithm=(put(*RUN, 'algorithm')(GONE), 'algorithm'),
    no_masks=(put(*SP, 'masks')(GONE), 'masks'),
    no_bits=(put(*BITS)(GONE), 'bits'),
    no_shape=(put(*SP, 'masks', '3.weight', 'shape')(GONE), 'shape'),
    cut_bits=(put(*BITS)(lambda b: b[:-1]), '143 values.*144 bytes'),
    more_bits=(put(*BITS)(lambda b: torch.cat([b, b])), '288 values.*144 bytes'),
    float_bits=(put(*BITS)(lambda b: b.float()), 'float32.*144 bytes'),
    wrong_shape=(put(*SP, 'masks', '3.weight', 'shape')([16, 8, 9]), '3.weight'),
    negative_shape=(put(*SP, 'masks', '3.weight', 'shape')([-16, -8, 3, 3]), '3.weight|damaged'),
    other_layers=(put(*SP, 'masks')(lambda m: {'5.weight': m['0.weight'], '3.weight': m['3.weight']}), '5.weight'))

@pytest.fixture(scope='module')
def whole_file(tmp_path_factory):
    "A function: the file of one epoch to 50 % with this criterion, which each test damages in its own way"
    files = {}
    def get(criterion):
        if criterion not in files:
            folder = tmp_path_factory.mktemp(criterion.__name__)
            sparse_file(folder, criteria=criterion)
            files[criterion] = at(folder, 'a')
        return files[criterion]
    return get

@pytest.mark.parametrize('name', DAMAGED)
@pytest.mark.parametrize('live', (False, True), ids=['new', 'live'])
def test_damaged(name, live, whole_file, tmp_path):
    "Refused by name when it is loaded, in a new learner and under live masks: weights, masks and what a fit then does are as before"
    change,says = DAMAGED[name]
    edited(whole_file(C.large_final), bad := tmp_path/'bad.pth', change)
    cb = SparsifyCallback(.7, schedule=lin)
    learn = learner(1, cbs=cb, path=tmp_path)
    if live: quiet(learn.fit, 1)
    before,masks = snapshot(learn.model),bits(dict(cb.sparsifier.masks)) if live else None
    with pytest.raises(ValueError, match=says): learn.load(bad.with_suffix(''), with_opt=False)
    assert same(before, learn.model.state_dict()) and hung_on(learn.model)==hung_on(net())
    assert not live or bits(dict(cb.sparsifier.masks))==masks
    quiet(learn.fit, 1)
    assert conv_zeros(learn)==857

LATER = dict(       # found when it is loaded, or when a run is to go on
    **{f'no_{k}': (put(*SP, k)(GONE), k) for k in ('seed', 'updates', 'memory', 'refs')},
    inner_version=(put(*SP, 'version')(5), 'version'), seed_of_text=(put(*SP, 'seed')('x'), 'seed'),
    refs_gone=(put(*SP, 'refs')({}), 'remembers'), refs_of_one=(put(*SP, 'refs', 'init', '0.weight')(GONE), "0.weight"),
    refs_of_another_shape=(put(*SP, 'refs', 'init', '3.weight')(torch.zeros(2)), '3.weight'),
    memory_of_text=(put(*SP, 'memory')('x'), 'damaged|memory'), records_of_text=(put(*RUN, 'records')(3), 'damaged|records'),
    **{f'no_{k}': (put(*RUN, k)(GONE), k) for k in ('records', 'epochs', 'step', 'since', 'fresh', 'begun', 'fit')})

@pytest.mark.parametrize('name', LATER)
def test_damaged_for_a_run_that_goes_on(name, whole_file, tmp_path):
    "Refused by name at the latest by `fit(start_epoch=...)`, with the weights and the masks as they were before that call"
    change,says = LATER[name]
    edited(whole_file(C.movement), tmp_path/'bad.pth', change)
    cb,bad = SparsifyCallback(.5, schedule=lin, criteria=C.movement),tmp_path/'bad'
    learn = learner(2, path=tmp_path)
    before = snapshot(learn.model)
    try: learn.load(bad, with_opt=False)
    except ValueError: assert same(before, learn.model.state_dict())
    else: before = snapshot(learn.model)
    with pytest.raises(ValueError, match=says):
        learn.load(bad, with_opt=False)
        learn.fit(2, start_epoch=1, cbs=cb)
    assert same(before, learn.model.state_dict()) and len(learn.metrics)==1
    quiet(learn.fit, 1, cbs=cb)
    assert conv_zeros(learn)==612

def test_another_algorithm_goes_not_on(tmp_path):
    "GMP's file and Static: refused with both names, the weights as they are; from epoch 0 the masks are taken over"
    sparse_file(tmp_path)
    cb = SparsifyCallback(.5, algorithm=Static(init='topk'), context='global')
    learn = learner(4, path=tmp_path).load('a', with_opt=False)
    before = snapshot(learn.model)
    with pytest.raises(ValueError, match='GMP.*Static'): learn.fit(2, start_epoch=1, cbs=cb)
    assert same(before, learn.model.state_dict())
    quiet(learn.fit, 1, cbs=cb)
    assert conv_zeros(learn)==612 and all(torch.equal(m, before[k]!=0) for k,m in cb.sparsifier.masks.items())

@pytest.mark.parametrize('options', (dict(layer_type='3'), dict(layer_type=[nn.Conv2d, nn.Linear])), ids=['part', 'more'])
@pytest.mark.parametrize('attached', (True, False))
def test_other_layers_go_not_on(options, attached, tmp_path):
    "The file's layers are '0' and '3': a callback with one of them, or with a third, is refused with the difference"
    sparse_file(tmp_path)
    cb = SparsifyCallback(.5, **options)
    learn = learner(4, cbs=cb if attached else None, path=tmp_path).load('a', with_opt=False)
    before = snapshot(learn.model)
    with pytest.raises(ValueError, match=f"{'0' if options['layer_type']=='3' else '7'}.weight on one side only"):
        learn.fit(2, start_epoch=1, cbs=None if attached else cb)
    assert same(before, learn.model.state_dict())

def test_zeros_that_are_gone(tmp_path):
    "Dense training after `load` fills them: no run can go on from there, and from epoch 0 one begins dense"
    sparse_file(tmp_path)
    learn = learner(4, path=tmp_path).load('a', with_opt=False)
    quiet(learn.fit, 1)
    before = snapshot(learn.model)
    with pytest.raises(ValueError, match='zeros are gone.*load it again'): learn.fit(2, start_epoch=1, cbs=SparsifyCallback(.5))
    assert same(before, learn.model.state_dict()) and conv_zeros(learn)<612
    load(learn, 'a', with_opt=False)
    quiet(learn.fit, 2, start_epoch=1, cbs=SparsifyCallback(.5))
    assert conv_zeros(learn)==612

def test_a_file_of_another_model(tmp_path):
    "Refused for its masks, by name, before torch loads what fits and complains of the rest"
    sparse_file(tmp_path)
    small = learner(2, model=nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 4)), path=tmp_path)
    before = snapshot(small.model)
    with pytest.raises(ValueError, match='0.weight, 3.weight'): small.load('a', with_opt=False)
    assert same(before, small.model.state_dict())

# ---- loaded elsewhere

def uninterrupted(folder):
    "A learner after four epochs, and the file that it wrote after the second"
    learn = learner(3, path=folder, opt_func=Adam)
    files = watch(lambda l: l.epoch==1 and l.save('half', with_opt=True), 'after_epoch', order=61)
    quiet(learn.fit, 4, cbs=[SparsifyCallback(.9, criteria=C.random_scores), Seeds(), files])
    return learn

WRAPS = dict(plain=lambda m: m, parallel=nn.DataParallel, in_place=lambda m: (m.compile(backend='eager'), m)[1],
             compiled=partial(torch.compile, backend='eager'))

@pytest.mark.parametrize('first,then', [('plain', 'parallel'), ('parallel', 'plain'), ('in_place', 'plain'), ('plain', 'in_place'),
                                        ('compiled', 'compiled')])
def test_wrapped(first, then, tmp_path):
    "What one wrapper saves another one goes on with, under the names of the model itself, to the bit"
    sps,params = [],[]
    files = watch(lambda l: l.epoch==0 and l.save('half', with_opt=True), 'after_epoch', order=61)
    for name,start in (first, 0), (then, 1):
        learn = learner(3, model=WRAPS[name](net()), path=tmp_path, opt_func=Adam)
        if start: load(learn, 'half', with_opt=True)
        quiet(learn.fit, 2, start_epoch=start, cbs=[SparsifyCallback(.9, criteria=C.movement), Seeds(), *([] if start else [files])])
        sps.append(learn.sparsify.sparsifier)
        params.append([bits(p) for p in learn.model.parameters()])
        assert conv_zeros(learn)==1102
    a,b = sps
    assert list(a.masks)==list(b.masks)==['0.weight', '3.weight'] and bits(dict(a.masks))==bits(dict(b.masks)) and params[0]==params[1]

@pytest.mark.parametrize('first', WRAPS)
@pytest.mark.parametrize('then', WRAPS)
def test_sparsifiers_of_wrapped_models(first, then):
    "The state of one loads in the other"
    a,b = (Sparsifier(WRAPS[k](net())) for k in (first, then))
    a.sparsify_model(.5)
    b.load_state_dict(a.state_dict())
    assert pruned(b)=={'0.weight': 36, '3.weight': 576} and bits(dict(a.masks))==bits(dict(b.masks)) and conv_zeros(b.model)==612

@pytest.mark.parametrize('attached', (True, False))
@pytest.mark.parametrize('look', (False, True), ids=['', 'lr_find'])
def test_goes_on_elsewhere(attached, look, tmp_path):
    "A learner that has only the file, also after an lr_find in between, ends as the run that was not interrupted"
    whole = uninterrupted(tmp_path)
    cbs = [SparsifyCallback(.9, criteria=C.random_scores), Seeds()]
    learn = learner(3, path=tmp_path, opt_func=Adam, cbs=cbs if attached else None)
    load(learn, 'half', with_opt=True)
    if look:
        before = snapshot(learn.model)
        learn.lr_find(show_plot=False, num_it=5)
        assert same(before, learn.model.state_dict())
    learn.validate()
    quiet(learn.fit, 4, start_epoch=2, cbs=None if attached else cbs)
    assert same(whole.model.state_dict(), learn.model.state_dict()) and conv_zeros(learn)==1102
    assert cbs[0].history.equals(whole.sparsify.history)
    assert bits(dict(cbs[0].sparsifier.masks))==bits(dict(whole.sparsify.sparsifier.masks))

@pytest.mark.parametrize('attached', (True, False))
def test_from_epoch_0_the_masks_are_taken_over(attached, tmp_path):
    "612 zeros, all of them kept, and 857 of 1224 at the end; so also after an lr_find, which holds or restores them"
    old = sparse_file(tmp_path).sparsify.sparsifier.masks
    cb = SparsifyCallback(.7, schedule=lin)
    seen = watch(lambda l: (conv_zeros(l), all(not m[~old[k]].any() for k,m in cb.sparsifier.masks.items())))
    learn = learner(2, cbs=cb if attached else None, path=tmp_path).load('a', with_opt=False)
    learn.lr_find(show_plot=False, num_it=6)
    assert conv_zeros(learn)==612
    quiet(learn.fit, 2, cbs=[seen] if attached else [cb, seen])
    assert [n for n,_ in seen.seen]==[612, 612, 612, 857] and all(k for _,k in seen.seen)      # .7·2/3 of 1224 is 571.2

def test_saved_after_the_callback_has_gone(tmp_path):
    "`fit(cbs=cb)`, `save` later, also by a learner that only loaded it: the masks are in each file"
    learn = sparse_file(tmp_path)
    again = learner(2, path=tmp_path).load('a', with_opt=False)
    again.save('b', with_opt=False)
    a,b = (state_of(at(tmp_path, k)) for k in 'ab')
    assert bits(a)==bits(b) and conv_zeros(again)==612
    quiet(learn.fit, 1)
    learn.save('c', with_opt=False)      # the zeros are gone, and so are the masks
    assert conv_zeros(learn)<612 and 'sparsify' not in torch.load(at(tmp_path, 'c'))._metadata['']

def test_two_callbacks(tmp_path):
    "Each finds its own masks, in whatever order; one that wants both layers is told which"
    def two(): return [SparsifyCallback(.5, layer_type='0', schedule=lin), SparsifyCallback(.75, layer_type=nn.Linear, schedule=lin)]
    learn = learner(2, path=tmp_path)
    quiet(learn.fit, 1, cbs=two())
    learn.save('a', with_opt=False)
    assert [list(r['sparsifier']['masks']) for r in state_of(at(tmp_path, 'a'))['runs']]==[['7.weight'], ['0.weight']]
    for cbs in two(), two()[::-1]:
        other = learner(2, path=tmp_path).load('a', with_opt=False)
        first = watch(lambda l: (n_zeros(l.model[0].weight), n_zeros(l.model[7].weight)))
        quiet(other.fit, 2, start_epoch=1, cbs=[*cbs, first])
        assert first.seen==[(36, 48)]*2 and n_zeros(other.model[0].weight, other.model[7].weight)==84
    other = learner(2, path=tmp_path).load('a', with_opt=False)
    with pytest.raises(ValueError, match='3.weight on one side only'): other.fit(2, start_epoch=1, cbs=SparsifyCallback(.5))
    learn = learner(2, path=tmp_path, cbs=two()).load('a', with_opt=False)
    quiet(learn.fit, 2, start_epoch=1)
    assert n_zeros(learn.model[0].weight, learn.model[7].weight)==84

def test_file_objects(tmp_path):
    "What is written to a `BytesIO` is what is written to a file"
    learn = sparse_file(tmp_path)
    for with_opt in True, False:
        learn.save(f := io.BytesIO(), with_opt=with_opt)
        f.seek(0)
        other = learner(4, path=tmp_path).load(f, with_opt=with_opt)
        quiet(other.fit, 2, start_epoch=1, cbs=(cb := SparsifyCallback(.5)))
        assert conv_zeros(other)==612 and bits(dict(cb.sparsifier.masks))==bits(dict(learn.sparsify.sparsifier.masks))
    assert not list(tmp_path.rglob('*.part'))

def test_paths(tmp_path):
    "A name, a path and a name with a folder end where fastai puts them, and `save` returns where"
    learn = sparse_file(tmp_path)
    for d in tmp_path/'other', tmp_path/'models'/'sub': d.mkdir()
    for file in 'b', tmp_path/'other'/'c', 'sub/d':
        got = learn.save(file, with_opt=False)
        assert Path(got).suffix=='.pth' and Path(got).is_file() and bits(state_of(got))==bits(state_of(at(tmp_path, 'a')))
        assert conv_zeros(learner(2, path=tmp_path).load(file, with_opt=False))==612

def test_hold(tmp_path):
    "What is held is saved, is held on after it is loaded, and gives way to what another file holds"
    learn = sparse_file(tmp_path, SparsifyCallback(.5, schedule=lin, hold=True))
    other = sparse_file(tmp_path, SparsifyCallback(.75, schedule=lin), name='b')
    quiet(learn.fit, 1)
    learn.save('held', with_opt=False)
    assert conv_zeros(learn)==612 and bits(state_of(at(tmp_path, 'held'))['runs'][0]['sparsifier']['masks'])==bits(
        state_of(at(tmp_path, 'a'))['runs'][0]['sparsifier']['masks'])
    for name,n in ('b', 918), ('held', 612):
        load(learn, name, with_opt=False)
        assert conv_zeros(learn)==n
        quiet(learn.fit, 1)
        assert conv_zeros(learn)==n and obeys(learn)
    load(other, 'held', with_opt=False)
    quiet(other.fit, 1, cbs=SparsifyCallback(.5, hold=True))
    quiet(other.fit, 1)
    assert conv_zeros(other)==612

def test_export_after_load(tmp_path):
    "Nothing of this library is in the pickle, and what was exported can be trained on"
    old = learner(path=tmp_path, dls=datasets())
    quiet(old.fit, 1, cbs=SparsifyCallback(.5))
    old.save('a')
    learn = load(learner(path=tmp_path, dls=datasets()), 'a')
    learn.export('a.pkl')
    used = globals_in(tmp_path/'a.pkl')
    assert any(a.startswith('fastai') for a in used) and not any(a.startswith('sparsify') for a in used)
    with pytest.warns(UserWarning, match='pickle'): loaded = load_learner(tmp_path/'a.pkl')
    loaded.dls = learn.dls
    quiet(loaded.fit, 1, cbs=SparsifyCallback(.7))
    assert conv_zeros(loaded)==857
    quiet(learn.fit, 2, start_epoch=1, cbs=SparsifyCallback(.5))      # the exported learner itself goes on as before
    assert conv_zeros(learn)==612

# ---- from zeros

def zeroed(folder, share, granularity='weight', context='global'):
    "A learner whose model has this share of zeros and no masks"
    learn = learner(4, path=folder)
    Sparsifier(learn.model, granularity, context).sparsify_model(share)
    return learn

@pytest.mark.parametrize('through_a_file', (False, True))
def test_from_zeros(through_a_file, tmp_path):
    "70 % of 1224 is 857: the first mask is `w != 0`, there are never fewer zeros, and at the end there are 1102"
    learn = zeroed(tmp_path, .7)
    if through_a_file:
        (tmp_path/'models').mkdir()
        torch.save({**learn.model.state_dict()}, at(tmp_path, 'a'))
        learn = load(learner(4, path=tmp_path), 'a', with_opt=False)
    masks = {k: learn.model.get_parameter(k)!=0 for k in ('0.weight', '3.weight')}
    cb = SparsifyCallback(algorithm=GMP(.9, init='from_zeros'))
    first = watch(lambda l: bits(dict(cb.sparsifier.masks))==bits(masks), order=10.6)
    count,held = watch(conv_zeros, 'after_pred', 'after_step'),watch(obeys, 'after_step', 'after_batch')
    quiet(learn.fit, 2, cbs=[cb, first, count, held])
    assert first.seen[0] and count.seen==sorted(count.seen) and count.seen[0]==857 and count.seen[-1]==conv_zeros(learn)==1102
    assert all(held.seen) and len(set(count.seen))>2 and [sum(pruned(cb.sparsifier).values())]==[1102]

def test_from_zeros_of_filters(tmp_path):
    "Two of 8 and four of 16 filters on the way to six and twelve: those that were silent are so to the end"
    learn = zeroed(tmp_path, .25, 'filter', 'local')
    dead = {k: (learn.model.get_parameter(k)==0).flatten(1).all(1) for k in ('0.weight', '3.weight')}
    cb = SparsifyCallback(algorithm=GMP(.75, lin, init='from_zeros', granularity='filter', context='local'))
    seen = watch(conv_zeros)
    quiet(learn.fit, 2, cbs=[cb, seen])
    assert seen.seen[0]==2*9+4*72 and seen.seen[-1]==6*9+12*72 and [int(d.sum()) for d in dead.values()]==[2, 4]
    assert all(not learn.model.get_parameter(k)[d].any() for k,d in dead.items())

@pytest.mark.parametrize('kwargs', (dict(), dict(schedule=Schedule(sched_agp, start_val=.5))), ids=['from 0', 'from half'])
def test_more_zeros_than_the_target(kwargs, tmp_path):
    "A model with 95 %, 1163 of 1224, asked for 90 %: all stay"
    learn = zeroed(tmp_path, .95)
    seen = watch(conv_zeros)
    quiet(learn.fit, 2, cbs=[SparsifyCallback(algorithm=GMP(.9, init='from_zeros', **kwargs)), seen])
    assert set(seen.seen)=={1163} and conv_zeros(learn)==1163

# ---- nothing piles up

def living():
    "How many tensors there are, and the bytes they hold"
    gc.collect()
    found = [o for o in gc.get_objects() if type(o) in (torch.Tensor, nn.Parameter) or issubclass(type(o), TensorBase)]
    stores = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in found if t.layout==torch.strided and t.device.type=='cpu')}
    return len(found),sum(stores.values())

@pytest.mark.parametrize('files', (False, True), ids=['', 'files'])
@pytest.mark.parametrize('new', (False, True), ids=['same', 'new'])
def test_nothing_piles_up(new, files, tmp_path):
    "Six fits: tensors and bytes are the same from the second on, with a new callback each time from the third on"
    gc.collect()
    gc.freeze()      # what was there before is not looked at
    learn,cb,seen = learner(2, path=tmp_path),None,[]
    for _ in range(6):
        if new or cb is None: cb = SparsifyCallback(.5, schedule=lin, criteria=C.updating_movement)
        quiet(learn.fit, 1, cbs=[cb, SaveModelCallback(every_epoch=True, with_opt=True)] if files else cb)
        if files: load(learn, 'model_0', with_opt=True)
        assert conv_zeros(learn)==612
        seen.append(living())
    gc.unfreeze()
    assert len(set(seen[2 if new else 1:]))==1


def test_steps_go_on(tmp_path):
    "Every second step cancelled, a sparsity of a 16th for each real step: epoch 1 begins at step 4, not 8, and ends at 8"
    def cancel(self):
        if self.train_iter%2: raise CancelStepException
    def skip():
        cb = Callback(before_step=cancel)
        cb.order = 10.6
        return cb
    class Keep(Callback):
        order = 70
        def after_epoch(self):
            if self.epoch==0: self.learn.save('half')
    def epoch_1(learn, **kwargs):
        seen = watch(conv_zeros)
        learn.fit(2, cbs=[SparsifyCallback(lambda step: step/16), skip(), seen, Keep()], **kwargs)
        return seen.seen[-8:]
    want = [round(1224*s/16) for s in (4, 5, 5, 6, 6, 7, 7, 8)]
    assert epoch_1(learner(8, path=tmp_path))==want
    assert epoch_1(learner(8, path=tmp_path).load('half'), start_epoch=1)==want
