"Faults of targets, granularities and criteria that were found while their lessons were written, each as a small case"
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from sparsify.criteria import large_init, score
from sparsify.granularity import Blocks, as_granularity
from sparsify.masks import kth_magnitude
from sparsify.sparsifier import Sparsifier
from sparsify.targets import find_targets, spread


def odd(): return nn.Sequential(nn.Linear(2, 2), parametrizations.weight_norm(nn.Linear(2, 2)))


@pytest.mark.parametrize('which', [['0', '1'], '1', '1.weight'])
def test_a_computed_weight_that_is_named_is_refused(which):
    with pytest.raises(ValueError, match="the weight of '1(.weight)?' is computed"): find_targets(odd(), which)


@pytest.mark.parametrize('exclude', ['1', ['1']])
def test_what_is_excluded_is_not_reported_as_skipped(exclude):
    targets,skipped = find_targets(odd(), nn.Linear, exclude=exclude)
    assert list(targets)==['0.weight'] and not skipped


def test_a_type_whose_weights_are_all_computed_can_be_excluded():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), parametrizations.weight_norm(nn.Linear(2, 2)))
    targets,skipped = find_targets(net, (nn.Conv2d, nn.Linear), exclude=nn.Linear)
    assert list(targets)==['0.weight'] and not skipped


def test_a_layer_is_skipped_under_one_name():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    prune.identity(net[1], 'weight')
    assert list(find_targets(net, nn.Linear)[1])==['1.weight']


@pytest.mark.parametrize('keys', [('0.*', '*.0'), ('*.0', '0.*')])
def test_two_keys_as_exact_as_each_other(keys):
    net = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match='neither is more exact'): spread(dict(zip(keys, (.5, .8))), net, nn.Linear)
    assert spread(dict.fromkeys(keys, .5), net, nn.Linear)[1]=={'0.0.weight': .5}


def test_an_empty_name():
    with pytest.raises(ValueError, match='a name is empty'): find_targets(odd(), '')


def test_a_criterion_without_what_it_needs():
    with pytest.raises(ValueError, match="large_init needs 'init', which was not given"): score(large_init, torch.ones(2))


def test_blocks_of_a_transposed_convolution():
    "Its weight is inputs × outputs: two outputs by one input are (1, 2) there, and 3 × 2 × 4 blocks in all"
    m = nn.ConvTranspose2d(3, 4, 2)
    assert as_granularity(Blocks(2, 1), m.weight.shape, m).n==3*2*4
    sp = Sparsifier(nn.Sequential(m), Blocks(2, 1), layer_type=nn.ConvTranspose2d).sparsify_model(.5)
    kept = sp.masks['0.weight'].view(3, 2, 2, 2, 2)
    assert torch.equal(kept[:, :, 0], kept[:, :, 1]) and int(kept.sum())==24


def test_ranks_beyond_the_magnitudes():
    for k in (0, 4):
        with pytest.raises(ValueError, match=f'k is {k}: there are 3 magnitudes'): kth_magnitude([torch.ones(3)], k)


def test_a_rank_among_some():
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    some = x>0
    want = x[some].sort(descending=True).values
    for k in (1, 777, len(want)): assert kth_magnitude([x], k, [some])==want[k-1].item()
