"""Builds the package from the facts in `settings.ini`."""
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).resolve().parent
ini = ConfigParser(delimiters='=')
with open(here/'settings.ini', encoding='utf-8') as f: ini.read_file(f)
cfg = ini['DEFAULT']

setup(
    name=cfg['lib_name'],
    version=cfg['version'],
    description=cfg['description'],
    long_description=(here/'README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    author=cfg['author'],
    license=cfg['license'],
    python_requires=f">={cfg['min_python']}",
    packages=find_packages(include=['sparsify', 'sparsify.*']),
    install_requires=cfg['requirements'].split(),
    extras_require={extra: cfg[f'{extra}_requirements'].split() for extra in ('distrib', 'dev')},
    classifiers=['Programming Language :: Python :: 3', 'Programming Language :: Python :: 3 :: Only'],
)
