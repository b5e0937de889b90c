"The demo, as a stranger runs it: the table, exact counts, refusals in one line, and an accuracy that stays."
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sparsify.__main__ import digits_learner, main, weights_of
from sparsify.masks import n_pruned

ROOT = Path(__file__).resolve().parent.parent
WEIGHTS = {'conv1': 144, 'conv2': 4608, 'conv3': 18432, 'head': 640}
TOTAL = sum(WEIGHTS.values())


def demo(*args):
    "The finished process of `python -m sparsify` with `args`."
    return subprocess.run([sys.executable, '-m', 'sparsify', *args], cwd=ROOT, capture_output=True, text=True)


def table(out):
    "The last block that was printed as `{row: (dense, sparse)}`, in numbers as they are written."
    head, *lines = out.strip().split('\n\n')[-1].splitlines()
    assert head.split() == ['dense', 'sparse', 'sparse/dense']
    rows = [re.split(r'\s{2,}', line.strip()) for line in lines]
    return {r[0].split(' (')[0].removeprefix('weights of '): tuple(float(o.rstrip('%').replace(',', '')) for o in r[1:3]) for r in rows}


def test_command():
    res = demo('--epochs', '1', '--sparsity', '.8')
    assert res.returncode == 0 and res.stderr == '', res.stderr
    t = table(res.stdout)
    assert list(t) == ['accuracy', *WEIGHTS, 'weights in all', 'bytes of the file', 'bytes, gzipped', 'seconds']
    assert {k: t[k][0] for k in WEIGHTS} == WEIGHTS
    assert t['weights in all'] == (TOTAL, TOTAL-n_pruned(TOTAL, .8)) == (TOTAL, sum(t[k][1] for k in WEIGHTS))
    assert t['bytes of the file'][0] == t['bytes of the file'][1] > 4*TOTAL
    assert t['bytes, gzipped'][1] < .4*t['bytes, gzipped'][0]
    heads = [line.split() for line in res.stdout.splitlines() if line.strip().startswith('epoch')]
    assert [h[-3:] for h in heads] == [['valid_loss', 'accuracy', 'time'], ['accuracy', 'sparsity', 'time']]
    assert max(map(len, res.stdout.split('\n'))) < 100 and '█' not in res.stdout


@pytest.mark.parametrize('schedule', ['cos', 'lin', 'one_shot', 'iterative', 'one_cycle'])
def test_schedules(schedule, capsys):
    main(schedule=schedule, context='erk', epochs=1)
    assert table(capsys.readouterr().out)['weights in all'] == (TOTAL, TOTAL-n_pruned(TOTAL, .9))


def test_local(capsys):
    main(.5, context='local', epochs=1, seed=3)
    t = table(capsys.readouterr().out)
    assert {k: t[k][1] for k in WEIGHTS} == {k: n-n_pruned(n, .5) for k, n in WEIGHTS.items()}


def test_filters(capsys):
    "Other units than weights leave the head alone, and the layers keep whole units."
    main(.5, context='local', granularity='filter', epochs=1)
    t = table(capsys.readouterr().out)
    assert {k: t[k][1] for k in WEIGHTS} == {'conv1': 72, 'conv2': 2304, 'conv3': 9216, 'head': 640}


def test_refused_in_one_line():
    res = demo('--schedule', 'agpp')
    assert res.returncode == 1 and res.stdout == ''
    assert res.stderr == "error: schedule is 'agpp': one of agp, cos, lin, one_shot, iterative, one_cycle is needed\n"


@pytest.mark.parametrize('bad, says', [
    (dict(context='globl'), "did you mean 'global'"), (dict(granularity='fliter'), "did you mean 'filter'"), (dict(sparsity=-.1), 'a fraction in [0, 1]'),
    (dict(sparsity=float('nan')), 'a fraction in [0, 1]'), (dict(epochs=0), '1 or more'), (dict(sparsity=.9999), 'min_keep'),
    (dict(granularity='layer', context='local'), "needs context='global'")])
def test_refused(bad, says, capsys):
    "Before anything is trained or printed."
    with pytest.raises(SystemExit) as e: main(**bad)
    assert says in str(e.value) and '\n' not in str(e.value)
    assert capsys.readouterr().out == ''


def test_same_start():
    "Both networks begin with the same weights and see the same batches in the same order."
    a, b = digits_learner(5), digits_learner(5)
    for w, v in zip(weights_of(a.model).values(), weights_of(b.model).values()): assert w.equal(v)
    for _ in range(2):
        for (x, y), (u, v) in zip(a.dls.train, b.dls.train): assert x.equal(u) and y.equal(v)


@pytest.mark.slow
@pytest.mark.parametrize('seed', [0, 1, 2])
def test_accuracy(seed, capsys):
    main(seed=seed)
    t = table(capsys.readouterr().out)
    assert t['weights in all'] == (TOTAL, TOTAL-n_pruned(TOTAL, .9))
    assert t['accuracy'][0] > 98 and t['accuracy'][1] >= t['accuracy'][0]-1.5
