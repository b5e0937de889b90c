#!/usr/bin/env python3
"""Makes README.md, and its pictures in README_files/, from nbs/index.ipynb; `--check` only compares."""
import argparse
import base64
import json
import posixpath
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTE = '<!-- Made from nbs/index.ipynb by .ci/readme.py: edit the notebook, not this file. -->'
PICTURES = {'image/png': 'png', 'image/jpeg': 'jpg', 'image/svg+xml': 'svg'}


def text(field):
    "A notebook's text field, which is a string or a list of lines."
    return field if isinstance(field, str) else ''.join(field)


def split(source):
    "The `#|` directives at the top of a cell as `{name: value}`, and the rest of its source."
    lines, directives = source.splitlines(), {}
    while lines and (m := re.match(r'#\s*\|\s*([\w-]+):?\s*(.*)', lines[0])):
        directives[m[1]] = m[2].strip()
        lines.pop(0)
    return directives, '\n'.join(lines).strip('\n')


def fence(s, lang=''):
    "`s` as a fenced block, the fence longer than any run of backticks in it."
    ticks = '`' * max(3, 1 + max(map(len, re.findall('`+', s)), default=0))
    return f'{ticks}{lang}\n{s}\n{ticks}'


def relink(md):
    "Relative links, written in the notebook from its own folder, as they read from the root; code stays as it is."
    def from_root(m): return '](' + posixpath.normpath(posixpath.join('nbs', m[1]))
    parts = re.split(r'(```.*?```|`[^`]*`)', md, flags=re.S)
    parts[::2] = [re.sub(r'\]\((?![a-z]+:|[/#])([^)\s]+)', from_root, p) for p in parts[::2]]
    return ''.join(parts)


def output(out, pictures, alt=''):
    "One output as markdown; a picture's bytes go into `pictures` under its file name."
    if out['output_type'] == 'error': return fence(f"{out['ename']}: {out['evalue']}")
    if out['output_type'] == 'stream': return fence(text(out['text']).rstrip())
    data = {mime: text(v) for mime, v in out['data'].items() if mime.startswith(('text/', 'image/'))}
    md = data.get('text/markdown', '').strip()
    if md and not md.startswith('```html'): return md  # fastprogress's markdown is its table's HTML source, fenced
    for mime, ext in PICTURES.items():
        if mime not in data: continue
        name = f'{len(pictures) + 1}.{ext}'
        pictures[name] = data[mime].encode() if ext == 'svg' else base64.b64decode(data[mime])
        return f'![{alt}](README_files/{name})'
    tables = re.findall(r'<table.*?</table>', data.get('text/html', ''), flags=re.S)
    if tables: return '\n\n'.join(re.sub(r'\n\s*\n', '\n', t) for t in tables)
    plain = data.get('text/plain', '').rstrip()
    return '' if not plain or plain.startswith('<IPython.core.display.') else fence(plain)


def render(nb):
    "The notebook as markdown, and its pictures as `{file name: bytes}`."
    parts, pictures = [NOTE], {}
    for cell in nb['cells']:
        directives, source = split(text(cell['source']))
        if 'hide' in directives or cell['cell_type'] == 'raw': continue
        if cell['cell_type'] == 'markdown': parts.append(relink(source))
        else:
            if source and directives.get('echo') != 'false': parts.append(fence(source, 'python'))
            if directives.get('output') != 'false':
                parts += [output(o, pictures, directives.get('fig-alt', '')) for o in cell['outputs']]
    return '\n\n'.join(filter(None, parts)) + '\n', pictures


def main():
    "Write what differs, or with `--check` name it and exit with 1."
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--check', action='store_true', help='write nothing; exit 1 if a file differs')
    check = parser.parse_args().check
    md, pictures = render(json.loads((ROOT/'nbs'/'index.ipynb').read_text(encoding='utf-8')))
    want = {ROOT/'README.md': md.encode(), **{ROOT/'README_files'/n: b for n, b in pictures.items()}}
    have = {p: p.read_bytes() for p in [ROOT/'README.md', *ROOT.glob('README_files/*')] if p.is_file()}
    stale = sorted(p for p in want.keys() | have.keys() if want.get(p) != have.get(p))
    if check:
        names = ', '.join(p.relative_to(ROOT).as_posix() for p in stale)
        if stale: sys.exit(f'not what nbs/index.ipynb gives: {names}\nrun: python .ci/readme.py')
        return
    for p in stale:
        if p not in want: p.unlink(); continue
        p.parent.mkdir(exist_ok=True)
        p.write_bytes(want[p])


if __name__ == '__main__': main()
