"Faults that attacks on the core have found, each as a small case"
import pickle
import warnings

import pytest
import torch
from torch import nn

from sparsify.criteria import large_final
from sparsify.granularity import NM, Grouped, add_granularity, granularity_names
from sparsify.masks import n_pruned
from sparsify.sparsifier import Masks, Sparsifier
from sparsify.targets import as_fraction


def linear(*shape, **kwargs): return nn.Sequential(nn.Linear(*shape, bias=False)),dict(layer_type=nn.Linear, **kwargs)


def same_after(net, f, error):
    "`f` raises `error` and leaves every weight as it was"
    before = {k: v.clone() for k,v in net.state_dict().items()}
    with pytest.raises(error) as e: f()
    assert all(torch.equal(v.nan_to_num(7.), before[k].nan_to_num(7.)) for k,v in net.state_dict().items())
    return str(e.value)


def test_nan_of_a_unit():
    "A reduction that gives NaN is refused by name, although every weight is a number"
    net,kw = linear(1, 4)
    sp = Sparsifier(net, 'row', reduce=lambda s,dim: s.std(dim), **kw)
    assert '0.weight: 4 of 4 scores are NaN' in same_after(net, lambda: sp.sparsify_model(.5), ValueError)
    sp = Sparsifier(net, 'row', reduce=lambda s,dim: s.sum(), **kw)
    assert 'one score for each of 4 units' in same_after(net, lambda: sp.sparsify_model(.5), ValueError)


class Counting(nn.Module):
    "Writes to itself in `forward`, and draws"
    def __init__(self):
        super().__init__()
        self.c,self.calls = nn.Conv2d(2, 4, 3),0
        self.register_buffer('n', torch.zeros(()))
    def forward(self, x):
        self.calls,self.feat = self.calls+1,self.c(x)
        self.n += 1
        return self.feat*torch.rand(())


def test_tracing_leaves_no_trace():
    net = Counting()
    torch.manual_seed(0)
    rng = torch.get_rng_state()
    Sparsifier(net, 'filter')
    assert net.calls==0 and net.n==0 and not hasattr(net, 'feat') and torch.equal(torch.get_rng_state(), rng)
    pickle.dumps(net)


def test_criterion_in_place():
    net,kw = linear(4, 4)
    assert 'in place' in same_after(net, lambda: Sparsifier(net, criteria=lambda w: w.abs_(), **kw).sparsify_model(.5), ValueError)


@pytest.mark.parametrize('side', ['in', 'out'])
def test_one_group_is_no_group(side):
    "With a single group a balanced granularity prunes what plain weights would, in every update"
    torch.manual_seed(0)
    net,kw = linear(6, 6)
    plain = nn.Sequential(nn.Linear(6, 6, bias=False))
    plain.load_state_dict(net.state_dict())
    a,b = Sparsifier(net, Grouped(side, 1), **kw),Sparsifier(plain, **kw)
    for s in (.25, .5, .75): assert torch.equal(a.sparsify_model(s).masks['0.weight'], b.sparsify_model(s).masks['0.weight'])


def test_extra_matrix_has_no_follower():
    "Only the units of `weight` are outputs: the bias does not follow a matrix that is beside it"
    class LoRA(nn.Linear):
        def __init__(self):
            super().__init__(6, 5)
            self.lora_B,self.lora_A = nn.Parameter(torch.randn(5, 2)),nn.Parameter(torch.randn(2, 6))
    net = nn.Sequential(LoRA())
    sp = Sparsifier(net, 'row', layer_type=nn.Linear).sparsify_model(.4)
    assert [(k, of) for k,(_,of) in sp.followers.items()]==[('0.bias', '0.weight')]
    assert torch.equal(net[0].bias!=0, sp.outputs('0.weight'))


def test_norm_that_does_not_fit():
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(5))
    with pytest.warns(UserWarning, match='BatchNorm that follows 0'): sp = Sparsifier(net, 'row', layer_type=nn.Linear)
    assert list(sp.followers)==['0.bias']
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, affine=False))
    with pytest.warns(UserWarning, match='no weight and bias'): Sparsifier(net, 'filter')


def test_autograd_is_told():
    "A weight that is zeroed between forward and backward is an error of autograd's, not a silent mixture"
    net,kw = linear(4, 4)
    y = net(torch.randn(2, 4, requires_grad=True)).pow(2).sum()
    Sparsifier(net, **kw).sparsify_model(.5)
    with pytest.raises(RuntimeError, match='inplace'): y.backward()


def test_nm_of_a_first_mask():
    net,kw = linear(8, 4)
    sp = Sparsifier(net, nm=True, **kw)
    sp.init_masks('topk', {'0.weight': .9})
    assert (sp.masks['0.weight'].view(-1, 4).sum(1)==2).all()


def test_state_is_all_or_nothing():
    net,kw = linear(4, 4)
    sp = Sparsifier(net, criteria=lambda w: w.abs(), seed=3, **kw).sparsify_model(.5)
    good,mask = sp.state_dict(),sp.masks['0.weight'].clone()
    for bad in ({'version': 1}, good|{'masks': {'0.weight': 5}}, good|{'refs': {'init': {'0.weight': torch.ones(1)}}}, good|{'seed': 'a'}):
        same_after(net, lambda: sp.load_state_dict(bad), ValueError)
        assert sp.seed==3 and torch.equal(sp.masks['0.weight'], mask)
    from sparsify.criteria import movement
    sp = Sparsifier(net, criteria=movement, seed=3, **kw)
    for bad in ({'0.weight': torch.ones(1)}, {'other': torch.ones(4, 4)}):
        same_after(net, lambda: sp.load_state_dict(sp.state_dict()|{'seed': 9, 'refs': {'init': bad}}), ValueError)
        assert sp.seed==3 and sp.refs['init']['0.weight'].shape==(4, 4)


def test_masks_are_all_or_nothing():
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sp = Sparsifier(net, layer_type=nn.Linear)
    same_after(net, lambda: sp.set_masks({'0.weight': torch.zeros(4, 4, dtype=torch.bool), '1.weight': torch.ones(2, dtype=torch.bool)}), ValueError)
    assert sp.masks['0.weight'].all()
    for f in (lambda: sp.masks.update({'0.weight': torch.ones(4, 4)}), lambda: Masks(sp.targets).setdefault('0.weight', 1)):
        with pytest.raises(ValueError): f()


@pytest.mark.parametrize('x', [0, -1, 1.5, 'a', True])
def test_round_to(x):
    net,kw = linear(8, 8)
    for f in (lambda: Sparsifier(net, 'row', round_to=x, **kw), lambda: Sparsifier(net, 'row', **kw).sparsify_model(.5, round_to=x),
              lambda: Sparsifier(net, 'row', **kw).sparsify_layer('0', .5, round_to=x)): assert repr(x) in same_after(net, f, ValueError)


@pytest.mark.parametrize('context', ['er', 'erk', 'global'])
def test_round_to_is_local(context):
    net,kw = linear(8, 8)
    assert "context='local'" in same_after(net, lambda: Sparsifier(net, 'row', context, round_to=2, **kw).sparsify_model(.5), ValueError)


def test_sparsify_layer():
    net,kw = linear(8, 8)
    sp = Sparsifier(net, 'weight', 'global', **kw)
    for x in (None, '', [], False):
        with pytest.raises(TypeError): sp.sparsify_layer('0', x)
    assert sp.sparsify_layer('0', .5).report().pruned.tolist()==[32, 32]
    assert sp.sparsify_layer('0', 0).report().pruned.tolist()==[0, 0]


@pytest.mark.parametrize('kw,says', [(dict(exclude=nn.LSTM), 'no LSTM'), (dict(exclude=nn.Linear), 'leaves nothing'), (dict(min_keep=100), 'every unit'),
    (dict(reduce='zzz'), 'zzz'), (dict(seed='a'), 'seed'), (dict(sparsity={'0': 0}), 'every sparsity is 0'), (dict(sparsity={0: .5}), 'key 0'),
    (dict(sparsity={nn.Linear: .5}), 'key'), (dict(within='0'), 'str'), (dict(granularity=NM), 'NM'), (dict(context=lambda *a: {}), 'None'),
    (dict(context=lambda *a: None), 'whole number')], ids=str)
def test_refused(kw, says):
    net = nn.Sequential(nn.Linear(8, 8))
    assert says in same_after(net, lambda: Sparsifier(net, **dict(layer_type=nn.Linear)|kw).sparsify_model(.5), (ValueError, TypeError))


def test_refused_elsewhere():
    for f in (lambda: Sparsifier('a'), lambda: Sparsifier(nn.Sequential(nn.Linear(2, 2)), layer_type=nn.Conv2d(1, 1, 1)), lambda: n_pruned(10, 'a'),
              lambda: n_pruned(10, True), lambda: add_granularity('x', {nn.Conv2d: 3}), lambda: add_granularity('x', {nn.Conv2d: ('a',)}),
              lambda: Sparsifier(nn.Sequential(nn.Linear(2, 2)), layer_type=nn.Linear, criteria=lambda w: w+1j).sparsify_model(.5)):
        with pytest.raises(TypeError): f()
    assert 'row' in granularity_names(nn.LSTM(2, 2))
    with pytest.raises(ValueError, match='meta'): Sparsifier(nn.Sequential(nn.Linear(2, 2, device='meta')), layer_type=nn.Linear)
    with pytest.raises(ValueError, match='float8'): Sparsifier(nn.Sequential(nn.Linear(2, 2).to(torch.float8_e4m3fn)), layer_type=nn.Linear)
    assert as_fraction(1.0000001)==1.


def test_computed_weight_is_named():
    net = nn.Sequential(nn.Linear(2, 2), nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match='remove_parametrizations'): Sparsifier(net, sparsity={'1': .5})
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.w_orig,self.k_v,self.k_g = (nn.Parameter(torch.randn(4, 4)) for _ in range(3))
    sp = Sparsifier(nn.Sequential(Own()), layer_type=Own)
    assert list(sp.targets)==['0.w_orig', '0.k_v', '0.k_g']


def test_a_layer_alone_has_no_graph_to_lose():
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        Sparsifier(nn.Linear(4, 4), 'row', layer_type=nn.Linear)


def test_a_hook_that_raises():
    "Weights, masks and memory are those of the update when a hook fails"
    net,kw = linear(8, 8)
    sp = Sparsifier(net, criteria=large_final, **kw)
    sp.on_mask(lambda *a: 1/0)
    with pytest.raises(ZeroDivisionError): sp.sparsify_model(.5)
    assert sp.updates==1 and int((net[0].weight==0).sum())==32
