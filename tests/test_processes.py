"""Two processes that train one network (CPU, gloo): one set of masks, exact counts, one voice.

`processes_worker.py` is what they run, once for all tests."""
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import N0, N3, learner, n_zeros, net, pruned

from sparsify.callback import SparsifyCallback

pytest.importorskip('accelerate', reason="training on several processes needs accelerate: pip install -e '.[distrib]'")

ROOT = Path(__file__).resolve().parent.parent
A,B = '0.weight','3.weight'
SECONDS = 150      # a run takes some 30 on two cores


def run_both(folder, seconds, *command):
    "Run `python command` as two processes; their exit codes. One that fails ends the other, and after `seconds` both are killed"
    def start(rank):
        path = os.pathsep.join([str(ROOT), str(ROOT/'tests'), os.environ.get('PYTHONPATH', '')])
        env = os.environ | dict(RANK=f'{rank}', LOCAL_RANK=f'{rank}', WORLD_SIZE='2', LOCAL_WORLD_SIZE='2',
                                PYTHONPATH=path, OMP_NUM_THREADS='1', OMP_WAIT_POLICY='PASSIVE')
        with open(folder/f'{rank}.out', 'wb') as out, open(folder/f'{rank}.err', 'wb') as err:
            return subprocess.Popen([sys.executable, *command], env=env, cwd=folder, stdout=out, stderr=err)
    both,end = [start(rank) for rank in (0, 1)],time.monotonic()+seconds
    try:
        while any(p.poll() is None for p in both) and time.monotonic()<end:
            if any(p.poll() for p in both): end = min(end, time.monotonic()+3)      # what it has to say of its peer's end
            time.sleep(.05)
    finally:
        for p in both: p.kill()
    return [p.wait() for p in both]


def said(folder, rank, kind):
    "What a process has written, without the lines in which gloo tells of its connections"
    text = (folder/f'{rank}.{kind}').read_text(encoding='utf-8', errors='replace').replace('\r', '\n')
    return '\n'.join(line for line in text.splitlines() if line.strip() and not line.startswith('[Gloo]'))


def everything(folder):
    "What both have written, without the frames of the progress bar"
    def shown(rank, kind):
        lines = said(folder, rank, kind).splitlines()
        return '\n'.join(line for line in lines if not line.startswith(('Epoch ', '█')))[-5000:]
    return '\n'.join(f'--- rank {rank}, {kind}\n{shown(rank, kind)}' for rank in (0, 1) for kind in ('out', 'err'))


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    "Where the two processes leave what they have seen"
    path = tmp_path_factory.mktemp('processes')
    worker = ROOT/'tests'/'processes_worker.py'
    codes = run_both(path, SECONDS+10, '-W', r'ignore::FutureWarning:torch.jit._script', str(worker), str(path), str(SECONDS))
    (path/'codes').write_text(' '.join(map(str, codes)))
    return path


@pytest.fixture
def both(folder):
    "What each process has seen of a case, rank 0 first"
    def load(name):
        files = [folder/f'{name}-{rank}.pt' for rank in (0, 1)]
        missing = f'the processes did not finish {name!r}\n{everything(folder)}'
        if not all(f.exists() for f in files): pytest.fail(missing, pytrace=False)
        return [torch.load(f, weights_only=True) for f in files]
    return load


def equal(a, b):
    "Whether two trees of tensors are equal to the bit"
    if isinstance(a, torch.Tensor): return (a.dtype, a.shape, a.numpy().tobytes())==(b.dtype, b.shape, b.numpy().tobytes())
    if isinstance(a, dict): return list(a)==list(b) and all(equal(a[k], b[k]) for k in a)
    return len(a)==len(b) and all(map(equal, a, b))


def check(seen, **counts):
    "Both have the same masks and weights, the weights obey, and this many are pruned; where no layer is named, in all together"
    first,other = seen
    assert equal(first['masks'], other['masks']), 'masks differ'
    assert equal(first['params'], other['params']), 'weights differ'
    assert equal(first['opt'], other['opt']), 'what the optimizer remembers differs'
    assert list(first['masks'])==[A, B]
    n = {k: int((~m).sum()) for k,m in first['masks'].items()}
    assert sum(n.values())==counts['total'] if 'total' in counts else n=={A: counts['a'], B: counts['b']}
    for k,m in first['masks'].items():
        assert n_zeros(first['params'][k][~m])==n[k]
        assert all(v[m].any() and not v[~m].any() for v in first['opt'][k]) and first['opt'][k]


# .7 of 72 and 1152 weights are 50.4 and 806.4; of the 1224 of both, 856.8
@pytest.mark.parametrize('how, counts', dict(local=dict(a=50, b=806), everywhere=dict(total=857), random=dict(total=857)).items())
@pytest.mark.parametrize('kind', ['', '_accumulated'])
def test_masks_agree(both, how, kind, counts): check(both(how+kind), **counts)


def test_filters_agree(both):
    "4 of 8 filters of 9 weights, with their biases and the BatchNorm's weights, and 8 of 16 of 72"
    seen = both('filters')
    check(seen, a=4*9, b=8*72)
    dead = (seen[0]['masks'][A]==0).flatten(1).all(1)
    for k in '0.bias','1.weight','1.bias': assert n_zeros(seen[0]['params'][k][dead])==4


@pytest.mark.parametrize('name', ['static', 'static_seeds', 'seeds'])
def test_random_masks_agree(both, name): check(both(name), total=857)


def test_masks_of_other_seeds_are_those_of_the_first(both):
    "With a seed of its own in each process: the first one's, 0, counts"
    assert equal(both('static_seeds')[0]['masks'], both('static')[0]['masks'])


# of 1224 weights .7 are 857 (856.8); of 72 a half is 36, of 1152 .7 are 806
@pytest.mark.parametrize('how, counts', dict(set=dict(total=857), rigl=dict(total=857), snfs=dict(total=857), set_seeds=dict(total=857), group=dict(a=36, b=806)).items())
@pytest.mark.parametrize('kind', ['', '_accumulated'])
def test_moving_masks_agree(both, how, kind, counts):
    "After every step of both processes the same masks, which moved, at a constant count"
    if how=='set_seeds' and kind: pytest.skip('once is enough')
    seen = both(how+kind)
    check(seen, **counts)
    first,other = (o['after'] for o in seen)
    assert len(first)==len(other) and all(equal(a, b) for a,b in zip(first, other))
    assert len({tuple(int(m.sum()) for m in a.values()) for a in first})==1 and sum(not equal(a, b) for a,b in zip(first, first[1:]))>=1


def test_own_criterion_agrees(both):
    seen = both('own_criterion')
    assert not torch.equal(seen[0]['drawn'][0], seen[1]['drawn'][0])      # their scores were different indeed
    check(seen, total=857)


def test_two_fits_agree(both): check(both('two_fits'), total=857)


def test_even_batches_dropped(both): check(both('even'), total=857)


def test_uneven_batches_dropped(both):
    "fastai drops what fills no batch when it shuffles; on two processes one batch fewer is run than the loader's length says"
    seen = both('last_batch_dropped')
    assert (seen[0]['length'], seen[0]['batches'])==([4]*3, [3, 6, 9])
    check(seen, total=857)


def test_best_epoch_agrees(both): check(both('best'), total=857)


@pytest.mark.parametrize('name', ['alone_first', 'alone_first_static', 'alone_first_other', 'alone_first_static_other'])
def test_masks_of_training_alone(both, name):
    "Each process has masks of its own from training alone; then they train together"
    seen = both(name)
    assert not equal(seen[0]['alone'], seen[1]['alone'])
    check(seen, total=857)


def test_messages(both):
    "One message when the fit begins and one at each update that is due, in batches 0, 3, 6, 9 and 11, of one bit a weight; nothing else is sent"
    for seen in both('messages'): assert seen['sent']==[N0//8+N3//8]*6


def test_buffers(both):
    "`DistributedDataParallel` sends the buffers at each step: those of the BatchNorm, and the state dict is that of the network"
    for seen in both('messages'):
        assert seen['buffers']==[['1.running_mean', '1.running_var', '1.num_batches_tracked']]*12
        assert seen['shared']==[3]*12
        assert seen['keys']==[list(net().state_dict())]*12


def test_wrapped_names(both):
    "Case 31"
    for seen in both('wrapped'):
        assert seen['names']==[A, B]
        assert equal(seen['masks'], seen['other'])


def test_one_file(both, folder):
    both('saved')
    assert [sorted(f.name for f in (folder/f'of-{rank}').rglob('*') if f.is_file()) for rank in (0, 1)]==[['ours.pth'], []]
    assert sorted(f.name for f in (folder/'models').iterdir())==['best.pth', *(f'epoch_{i}.pth' for i in range(3))]


def test_load_in_both(both):
    seen = both('saved')
    check([o['ours'] for o in seen], a=50, b=806)
    assert int((~seen[0]['masks'][B]).sum())==round(.3*1152)      # those that the file replaces
    check([o['live'] for o in seen], a=50, b=806)
    check([o['fresh'] for o in seen], a=50, b=806)      # its target, .2, lets nothing come back
    for o in seen:
        assert equal(o['live']['masks'], seen[0]['ours']['masks']) and equal(o['live']['params'], seen[0]['ours']['params'])
        assert equal(o['fresh']['masks'], seen[0]['ours']['masks'])


def test_load_in_one_process(both, folder):
    "A file of two processes, in one that knows nothing of others"
    ours = both('saved')[0]['ours']
    learn = learner()
    learn.load(folder/'of-0'/'models'/'ours')
    assert equal(ours['params'], {k: p.detach() for k,p in learn.model.named_parameters()})
    learn.fit(1, cbs=SparsifyCallback(.2, context='local'))
    assert equal(ours['masks'], dict(learn.sparsify.sparsifier.masks)) and pruned(learn.sparsify.sparsifier)=={A: 50, B: 806}


@pytest.mark.parametrize('name', ['resumed', 'resumed_random', 'resumed_static'])
def test_resume(both, name):
    "Masks, weights, buffers, what the optimizer remembers, and the history are those of the run that was not interrupted"
    seen = both(name)
    for part in 'whole','part': check([o[part] for o in seen], total=857)
    for o in seen:
        assert equal(o['whole'], o['part'])
        assert o['history'][0]==o['history'][1] and len(o['history'][0])==3


def test_only_the_first_speaks(both, folder):
    "The first process shows the progress and warns; the other is silent"
    both('frozen')
    assert 'frozen: 0.weight' in said(folder, 0, 'err')
    assert said(folder, 0, 'out').count('epoch     train_loss  valid_loss  sparsity')>=20
    assert said(folder, 1, 'out')=='' and said(folder, 1, 'err')==''


def test_warnings_of_the_first(both, folder):
    "It warns of what is to be warned of, once, and of nothing else"
    both('frozen')
    warned = [line for line in said(folder, 0, 'err').splitlines() if 'Warning' in line]
    assert len(warned)==1 and 'frozen' in warned[0]


def test_all_ends_well(folder): assert (folder/'codes').read_text()=='0 0', everything(folder)


def test_a_process_that_fails_ends_the_other(tmp_path):
    code = "import os, sys, time\nif os.environ['RANK']=='1': sys.exit('no more')\nprint('here', flush=True)\ntime.sleep(600)"
    start = time.monotonic()
    assert run_both(tmp_path, 60, '-c', code)==[-9, 1]
    assert time.monotonic()-start<30 and 'no more' in everything(tmp_path) and 'here' in everything(tmp_path)


def test_processes_that_hang_are_killed(tmp_path):
    assert run_both(tmp_path, 2, '-c', "import time; print('here', flush=True); time.sleep(600)")==[-9, -9]
    assert everything(tmp_path).count('here')==2
