"""Arithmetic of a forward pass and of training: against torch's own counter, published figures, and sums by hand."""
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from sparsify.algorithm import GMP, Static
from sparsify.dynamic import SNFS, SET, RigL
from sparsify.flops import forward_flops, inference_flops, training_flops
from sparsify.group import Group
from sparsify.sparsifier import Sparsifier


class WRN(nn.Module):
    "WRN-22-2 for 32×32: three groups of three blocks, 16, 32, 64 and 128 channels"
    def __init__(self):
        super().__init__()
        def conv(a, b, k, s=1): return nn.Conv2d(a, b, k, s, k//2, bias=False)
        self.first,self.blocks,self.shorts = conv(3, 16, 3),nn.ModuleList(),nn.ModuleList()
        c = 16
        for g,width in enumerate((32, 64, 128)):
            for i in range(3):
                s = 2 if g and not i else 1
                self.blocks.append(nn.ModuleList([conv(c, width, 3, s), conv(width, width, 3)]))
                self.shorts.append(conv(c, width, 1, s) if not i else nn.Identity())
                c = width
        self.fc = nn.Linear(128, 10)
    def forward(self, x):
        x = self.first(x)
        for (a,b),s in zip(self.blocks, self.shorts): x = b(a(x).relu())+s(x)
        return self.fc(x.mean((2, 3)))


def test_wrn():
    "1076912 weights with the head and 3.155e8 FLOPs, of which ERK at 80 % takes .3521; RigL trains at .3542 of dense, and 90 and 95 % take .1736 and .0881"
    net,x = WRN(),torch.zeros(1, 3, 32, 32)
    assert sum(p.numel() for p in net.parameters() if p.ndim>1)==1076912
    assert sum(forward_flops(net, x).values())/1e8==pytest.approx(3.155, abs=5e-4)
    for s,want in ((.8, .3521), (.9, .1736), (.95, .0881)): assert training_flops(Static(s), net, x, 2000).inference_ratio==pytest.approx(want, abs=1e-4)
    assert training_flops(RigL(.8), net, x, 2000, paper=True).ratio==pytest.approx(.3542, abs=1e-4)
    for s,want in ((.8, .2022), (.9, .1025), (.95, .0527)): assert training_flops(Static(s, context='uniform'), net, x, 10).inference_ratio==pytest.approx(want, abs=1e-4)
    assert training_flops(RigL(.8, context='uniform'), net, x, 2000, paper=True).ratio==pytest.approx(.2049, abs=2e-4)


def test_resnet_uniform():
    "With a dense first layer .2231, .1260 and .0774 of dense; RigL at 80 % trains at .2257"
    from torchvision.models import resnet50
    net,x = resnet50(weights=None),torch.zeros(1, 3, 224, 224)
    for s,want in ((.8, .2231), (.9, .1260), (.95, .0774)): assert training_flops(Static(s, context='uniform'), net, x, 10).inference_ratio==pytest.approx(want, abs=1e-4)
    assert training_flops(RigL(.8, context='uniform'), net, x, 2000, paper=True).ratio==pytest.approx(.2257, abs=1e-4)


LAYERS = dict(linear=(nn.Linear(6, 4), (5, 7, 6)), conv1d=(nn.Conv1d(4, 6, 3, 2), (5, 4, 11)), conv2d=(nn.Conv2d(4, 6, 3, padding=1, dilation=2), (5, 4, 9, 8)), grouped=(nn.Conv2d(4, 6, 3, groups=2), (5, 4, 9, 8)),
              depthwise=(nn.Conv2d(4, 4, 3, groups=4, bias=False), (5, 4, 9, 8)), conv3d=(nn.Conv3d(2, 3, 2), (5, 2, 4, 5, 6)), transposed=(nn.ConvTranspose2d(4, 6, 3, 2), (5, 4, 5, 6)))

@pytest.mark.parametrize('kind', LAYERS)
def test_torch_counts_the_same(kind):
    layer,shape = LAYERS[kind]
    x,net = torch.randn(shape),nn.Sequential(layer)
    with FlopCounterMode(display=False) as counter: net(x)
    assert sum(forward_flops(net, x).values())*shape[0]==counter.get_total_flops()


def test_a_shared_layer_counts_at_each_use():
    layer = nn.Linear(4, 4)
    assert forward_flops(nn.Sequential(layer, nn.ReLU(), layer), torch.zeros(3, 4))=={'0.weight': 2*2*16}


def test_the_model_is_left_alone():
    "Modes, BatchNorm's statistics, gradients and random numbers"
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(.5), nn.Linear(4, 2))
    net[1].eval()
    was,rng,modes = {k: v.clone() for k,v in net.state_dict().items()},torch.get_rng_state(),[m.training for m in net.modules()]
    training_flops(RigL(.5), net, torch.randn(8, 4, generator=torch.Generator()), 100)
    assert all(torch.equal(v, was[k]) for k,v in net.state_dict().items()) and torch.equal(rng, torch.get_rng_state())
    assert modes==[m.training for m in net.modules()] and not any(m._forward_hooks for m in net.modules()) and all(p.grad is None for p in net.parameters())


def line(): return nn.Sequential(nn.Linear(10, 1, bias=False))

def test_zeros_and_masks():
    "Of ten weights 30 % by the mask, and by the zeros themselves"
    net,x = line(),torch.zeros(1, 10)
    sp = Sparsifier(net, layer_type=nn.Linear).sparsify_model(.3)
    assert inference_flops(net, x, sp)==pytest.approx(14) and inference_flops(net, x)==pytest.approx(14) and inference_flops(net, x, dict(sp.masks))==pytest.approx(14)
    assert inference_flops(net, x, {'0.weight': .5})==10


# of 20 FLOPs forward, half; 100 steps; updates every 5 until 75: 5, 10 … 70 are 14
@pytest.mark.parametrize('a,want', [(Static(.5), 3*10), (SET(.5), 3*10), (SNFS(.5), 2*10+20), (RigL(.5), (86*3*10+14*(2*10+20))/100), (RigL(.0), 3*20), (GMP(0.), 3*20)], ids=['static', 'set', 'snfs', 'rigl', 'rigl dense', 'gmp dense'])
def test_by_hand(a, want): assert training_flops(a, line(), torch.zeros(1, 10), 100).train==pytest.approx(want)


def test_gradual_pruning_takes_what_each_step_takes():
    "At once after the half of 10 steps: 5 dense steps, and 5 at one half"
    from sparsify.schedule import one_shot
    r = training_flops(GMP(.5, schedule=one_shot, context='local'), line(), torch.zeros(1, 10), 10)
    seen = [one_shot.at(t, 10) for t in range(10)]
    assert r.train==pytest.approx(sum(3*20*(1-.5*p) for p in seen)/10) and r.sparse==10


def test_a_group_is_the_sum_of_its_members():
    "Three layers of 2·12·30, 2·30·20 and 2·20·3; the last has no filter and stays dense"
    net,x = nn.Sequential(nn.Linear(12, 30), nn.ReLU(), nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 3)),torch.zeros(2, 12)
    r = training_flops(Group({'0.*': Static(.5), '2.*': SNFS(.75)}), net, x, 50)
    assert r.dense==720+1200+120 and r.sparse==360+300+120 and r.train==pytest.approx(3*360+2*300+1200+3*120)


@pytest.mark.parametrize('args,error,says', [((5, line(), torch.zeros(1, 10), 9), TypeError, 'algorithm is 5'), ((RigL(.5), line(), torch.zeros(1, 10), 0), ValueError, 'steps is 0'),
    ((RigL(.5), line(), 'x', 9), TypeError, "example is 'x'"), ((RigL(.5), nn.Sequential(nn.ReLU()), torch.zeros(1, 10), 9), ValueError, 'nothing to count')])
def test_errors(args, error, says):
    with pytest.raises(error, match=says): training_flops(*args)
