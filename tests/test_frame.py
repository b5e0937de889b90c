"The frame around the library: one version, a README in step with its notebook, and rooms that import only downwards."
import ast
import base64
import json
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

import sparsify

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT/'sparsify'
LAYERS = {  # module: layer, in reading order
    'masks': 0, 'schedule': 0,
    'granularity': 1, 'criteria': 1, 'context': 1, 'targets': 1, 'followers': 1,
    'sparsifier': 2,
    'algorithm': 3, 'dynamic': 3, 'group': 3, 'flops': 3, 'rewind': 3,
    'optimizer': 4, 'checkpoint': 4, 'progress': 4, 'copies': 4, 'processes': 4, 'handover': 4, 'callback': 4,
    'lottery': 5, 'analyze': 5, 'deploy': 5, 'sensitivity': 5, 'recipe': 5, 'prune': 5, '__main__': 5}
MODULES = [m for m in LAYERS if (PACKAGE/f'{m}.py').exists()]


def run(*args, cwd=ROOT):
    "The finished process of this Python with `args`."
    return subprocess.run([sys.executable, *args], cwd=cwd, capture_output=True, text=True)


def run_code(code):
    "What `code` prints in a fresh process."
    res = run('-c', code)
    assert res.returncode == 0, res.stderr
    return res.stdout


def imports(source):
    "The modules of `sparsify` that `source`, a module of it, imports anywhere in its code."
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import): names += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = '.'.join(filter(None, ['sparsify' if node.level else '', node.module]))
            names += [f'sparsify.{a.name}' for a in node.names] if base == 'sparsify' else [base]
    return {n.split('.')[1] for n in names if n.startswith('sparsify.')}


def test_version():
    ini = ConfigParser(delimiters='=')
    ini.read(ROOT/'settings.ini', encoding='utf-8')
    assert ini['DEFAULT']['version'] == sparsify.__version__


def test_extras():
    "Each extra that `setup.py` offers is in `settings.ini`, and who develops has what the others bring."
    ini = ConfigParser(delimiters='=')
    ini.read(ROOT/'settings.ini', encoding='utf-8')
    facts = ini['DEFAULT'].items()
    extras = {k.removesuffix('_requirements'): set(v.split()) for k, v in facts if k.endswith('_requirements')}
    assert extras.keys() == {'distrib', 'dev'}
    names = {k: {re.match(r'[\w-]+', r)[0] for r in v} for k, v in extras.items()}
    assert names['distrib'] == {'accelerate'} and names['distrib'] <= names['dev']
    res = run('-c', """
import setuptools
setuptools.setup = lambda **kw: print(*(f'{k}:{r}' for k, v in kw['extras_require'].items() for r in v))
exec(open('setup.py', encoding='utf-8').read(), {'__file__': 'setup.py', '__name__': '__main__'})""")
    assert res.returncode == 0, res.stderr
    assert set(res.stdout.split()) == {f'{k}:{r}' for k, v in extras.items() for r in v}


def test_needs_no_accelerate():
    "No module imports accelerate, nor fastai's module for several processes, which without accelerate fails with a NameError."
    for p in PACKAGE.glob('*.py'):
        assert not re.search(r'accelerate|fastai\.distributed', p.read_text(encoding='utf-8')), p.name


def test_readme():
    res = run('.ci/readme.py', '--check')
    assert res.returncode == 0, res.stderr


def test_readme_commands():
    block = re.search(r'^```sh\n(.*?)^```', (ROOT/'README.md').read_text(encoding='utf-8'), flags=re.M | re.S)
    assert len([line for line in block[1].splitlines() if line.strip()]) == 2


def test_readme_rules(tmp_path):
    "What `.ci/readme.py` keeps of a notebook, and that `--check` sees each kind of difference."
    def data(**kw): return dict(output_type='display_data', metadata={}, data={k.replace('_', '/'): v for k, v in kw.items()})
    def code(source, *outputs): return dict(cell_type='code', metadata={}, source=source, outputs=list(outputs))
    cells = [
        dict(cell_type='markdown', metadata={}, source='# T\n\nSee [a](01_a.ipynb#x), [b](../B.md), [c](https://c.org) and `d[0](e)`.'),
        code('#| hide\nsecret'),
        code('#| slow\n#| fig-alt: dots\nplot()', data(text_plain='<Figure>', image_png=base64.b64encode(b'dots').decode())),
        code('#| echo: false\nreport', data(text_plain='plain', text_html='<table>', text_markdown='|a|\n|-|')),
        code('frame', data(text_plain='plain', text_html='<style>s</style><table>\n\n<tr/></table>')),
        code('fit', data(text_markdown='```html\n<div>\n```', text_html='<div>\n<table class="f"></table></div>')),
        code('1 + 1', dict(output_type='stream', name='stdout', text=['two\n']))]
    for folder in '.ci', 'nbs': (tmp_path/folder).mkdir()
    shutil.copy(ROOT/'.ci'/'readme.py', tmp_path/'.ci')
    (tmp_path/'nbs'/'index.ipynb').write_text(json.dumps(dict(cells=cells)))
    def readme(*args): return run('.ci/readme.py', *args, cwd=tmp_path)

    assert readme('--check').returncode == 1
    assert readme().returncode == 0 and readme('--check').returncode == 0
    made, picture = tmp_path/'README.md', tmp_path/'README_files'/'1.png'
    assert made.read_text().split('\n\n', 1)[1] == '''\
# T

See [a](nbs/01_a.ipynb#x), [b](B.md), [c](https://c.org) and `d[0](e)`.

```python
plot()
```

![dots](README_files/1.png)

|a|
|-|

```python
frame
```

<table>
<tr/></table>

```python
fit
```

<table class="f"></table>

```python
1 + 1
```

```
two
```
'''
    assert picture.read_bytes() == b'dots'
    extra = picture.with_name('2.png')
    extra.write_bytes(b'')
    picture.write_bytes(b'dot')
    made.write_text('')
    res = readme('--check')
    assert res.returncode == 1
    assert 'README.md, README_files/1.png, README_files/2.png' in res.stderr
    readme()
    assert readme('--check').returncode == 0 and not extra.exists()


def test_imports():
    source = '''
import torch, sparsify.a
from sparsify import b
from sparsify.c import x
from . import d
from .e import *
from fastcore.f import y
def f(): from .g import z'''
    assert imports(source) == set('abcdeg')


def test_modules_known():
    "A new module takes its place in the list above."
    assert {p.stem for p in PACKAGE.glob('*.py')} - {'__init__', '_modidx', 'all'} <= LAYERS.keys()


def test_layers():
    "A module imports only from modules above it."
    order = list(LAYERS)
    for m in MODULES:
        above = set(order[:order.index(m)])
        assert imports((PACKAGE/f'{m}.py').read_text(encoding='utf-8')) <= above, f'{m} may import from {sorted(above)}'


def test_no_fastai_below_callback():
    "Importing layers 0 to 3 does not import fastai."
    low = [m for m in MODULES if LAYERS[m] <= 3]
    run_code(f'''
import importlib, sys
for m in {low}:
    importlib.import_module('sparsify.' + m)
    assert 'fastai' not in sys.modules, m''')


def test_all_complete():
    "`from sparsify.all import *` brings each name of the modules that `all` lists, but those which fastai exports too."
    tree = ast.parse((PACKAGE/'all.py').read_text(encoding='utf-8'))
    listed = [n.module.removeprefix('sparsify.') for n in ast.walk(tree)
              if isinstance(n, ast.ImportFrom) and [a.name for a in n.names] == ['*']]
    assert listed and set(listed) <= set(MODULES)
    missing = run_code(f'''
import importlib
got = {{}}
exec('from sparsify.all import *', got)
for m in {listed}:
    mod = importlib.import_module('sparsify.' + m)
    for n in mod.__all__:
        if n not in ('random', 'Lambda', 'Identity', 'sched_lin', 'sched_cos') and got.get(n) is not getattr(mod, n): print(m, n)''')
    assert missing == ''


def test_all_shadows_nothing():
    "`from sparsify.all import *` after fastai's own star import changes the meaning of no name of fastai."
    shadowed = run_code('''
ns = {}
exec('from fastai.vision.all import *', ns)
before = dict(ns)
exec('from sparsify.all import *', ns)
assert {'random', 'Lambda', 'Identity'} <= before.keys() and len(ns) > len(before)
print(*[n for n in before if ns[n] is not before[n]])''')
    assert shadowed.split() == []


@pytest.mark.parametrize('module', sorted(p.stem for p in PACKAGE.glob('*.py')))
def test_exported_from_existing_notebooks(module):
    for nb in re.findall(r'^# %% (\S+\.ipynb)', (PACKAGE/f'{module}.py').read_text(encoding='utf-8'), flags=re.M):
        assert (PACKAGE/nb).exists(), f'{module}.py comes from {nb}, which is gone'
