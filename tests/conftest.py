"Threads that wait do not spin: on a busy machine that costs more than the work. And the table of `test_matrix`."
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_configure(config):
    config.addinivalue_line('markers', 'row(number, feature): a row of the matrix of test_matrix.py')


def _cut(s, n): return s if len(s)<=n else s[:n-1]+'…'

def pytest_terminal_summary(terminalreporter):
    "What test_matrix found: a line for each thing that was looked at, or one for a row that was skipped or broke off"
    lines = []
    for outcome in 'passed', 'failed', 'skipped':
        for r in terminalreporter.getreports(outcome):
            found = dict(getattr(r, 'user_properties', ())).get('row')
            if found is None or r.when!='call': continue
            seen = [v for k,v in r.user_properties if k=='seen']
            if outcome=='skipped' or outcome=='failed' and all(ok for *_,ok in seen): seen.append(('', '', outcome, False))
            lines += [(found[0], found[1], *o) for o in seen]
    if not lines: return
    terminalreporter.section('features of fastai and magnitude pruning')
    if terminalreporter.verbosity<1:
        return terminalreporter.write_line(f"{sum(ok for *_,ok in lines)} of {len(lines)} lines as expected; pytest -v tests/test_matrix.py shows them")
    terminalreporter.write_line(f"{'row':>3} {'feature':52} {'expected':54} {'seen':54} ok")
    for n,feature,what,expected,seen,ok in sorted(lines, key=lambda o: o[0]):
        terminalreporter.write_line(f"{n:>3} {_cut(feature, 52):52} {_cut(f'{what}: {expected}', 54):54} {_cut(seen, 54):54} {'ok' if ok else 'NO'}")
