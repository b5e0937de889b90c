"What a caller can get wrong is said before any weight has changed: with the value, and with what to do instead"
import math
import pytest
import torch.nn as nn
from fastai.callback.all import GradientAccumulation
from torch.nn.utils.prune import l1_unstructured
from helpers import conv_zeros, learner, mlp, net, quiet, same, snapshot, watch
from sparsify.algorithm import GMP, Static
from sparsify.callback import SparsifyCallback
from sparsify.context import global_
from sparsify.granularity import NM, Blocks, Grouped
from sparsify.schedule import At, Every, Schedule, cos, lin, sched_lin

def wants_gradients(w): return w.abs()
wants_gradients.needs = 'grad'

def blows_up(pos): return 1/(1-pos)*(1-pos)

CONSTRUCTOR = dict(
    nothing=({}, ValueError, ('sparsity is missing', 'a fraction in [0, 1] such as 0.9')),
    too_much=(dict(sparsity=150), ValueError, ('150', 'a fraction in [0, 1]')),
    negative=(dict(sparsity=-.1), ValueError, ('-0.1', '0.9 for 90 %')),
    nan=(dict(sparsity=math.nan), ValueError, ('nan', 'a fraction in [0, 1]')),
    infinite=(dict(sparsity=math.inf), ValueError, ('inf', 'a fraction in [0, 1]')),
    boolean=(dict(sparsity=True), TypeError, ('True', 'a fraction in [0, 1] such as 0.9')),
    text=(dict(sparsity='0.5'), TypeError, ("'0.5'", 'a number is needed')),
    empty_dict=(dict(sparsity={}), ValueError, ('empty dict', 'nothing would be pruned')),
    dict_too_much=(dict(sparsity={'0': 150}), ValueError, ("sparsity of '0' is 150", 'a fraction in [0, 1]')),
    dict_text=(dict(sparsity={'0': 'a'}), TypeError, ("sparsity of '0' is 'a'", 'a number is needed')),
    dict_global=(dict(sparsity={'0': .3}, context='global'), ValueError, ('a sparsity for each layer', "context='local'")),
    empty_list=(dict(sparsity=[]), ValueError, ('values=[]', 'at least one number')),
    list_of_text=(dict(sparsity=['a']), TypeError, ("'a'", 'a number is needed')),
    list_too_much=(dict(sparsity=[.3, 150]), ValueError, ('150', 'a fraction in [0, 1]')),
    list_and_schedule=(dict(sparsity=[.3, .5], schedule=lin), ValueError, ('is a function of the step already', 'leave out the schedule')),
    unknown_type=(dict(sparsity={'type': 'lin'}), ValueError, ("'lin'", "did you mean 'linear'")),
    granularity=(dict(sparsity=.5, granularity='wieght'), ValueError, ("'wieght'", "did you mean 'weight'", 'kernel, filter')),
    granularity_none=(dict(sparsity=.5, granularity=None), TypeError, ('None', 'a name, a tuple of dimensions')),
    granularity_number=(dict(sparsity=.5, granularity=3), TypeError, ('3', 'a name, a tuple of dimensions')),
    context=(dict(sparsity=.5, context='globl'), ValueError, ("'globl'", "did you mean 'global'", 'local, global, uniform, uniform_compensated, er, erk')),
    context_number=(dict(sparsity=.5, context=5), ValueError, ('5', 'local, global, uniform, uniform_compensated, er, erk')),
    criteria=(dict(sparsity=.5, criteria='large_final'), TypeError, ("'large_final'", 'a function from a weight to scores')),
    criteria_none=(dict(sparsity=.5, criteria=None), TypeError, ('None', 'such as large_final')),
    criteria_needs=(dict(sparsity=.5, criteria=wants_gradients), ValueError, ("wants_gradients needs 'grad'", 'init, previous, generator')),
    schedule=(dict(sparsity=.5, schedule='one_shot'), TypeError, ("'one_shot'", 'without the quotes', 'Ready-made: agp')),
    schedule_number=(dict(sparsity=.5, schedule=.3), TypeError, ('0.3', 'give a Schedule')),
    schedule_dict=(dict(sparsity=.5, schedule={'type': 'linear'}), TypeError, ('linear', 'give a Schedule')),
    schedule_short=(dict(sparsity=.5, schedule=lambda pos: .9*pos), ValueError, ('gives 0.9 at position 1', 'ends=0.9')),
    schedule_raises=(dict(sparsity=.5, schedule=blows_up), ValueError, ('blows_up raised ZeroDivisionError at position 1', 'answers every position')),
    lth=(dict(sparsity=.5, lth=True), ValueError, ('lth=True', 'leave lth at False')),
    rewind_epoch=(dict(sparsity=.5, rewind_epoch=2), ValueError, ('rewind_epoch=2', 'leave rewind_epoch at 0')),
    reset_end=(dict(sparsity=.5, reset_end=True), ValueError, ('reset_end=True', 'leave reset_end at False')),
    save_tickets=(dict(sparsity=.5, save_tickets=True), ValueError, ('save_tickets=True', 'leave save_tickets at False')),
    round_to=(dict(sparsity=.5, round_to=0), ValueError, ('round_to is 0', '1 or more')),
    round_to_half=(dict(sparsity=.5, round_to=2.5), ValueError, ('round_to is 2.5', 'a whole number')),
    round_to_global=(dict(sparsity=.5, round_to=4, context='global'), ValueError, ('round_to', "context='local'")),
    nm_filter=(dict(sparsity=.5, nm=True, granularity='filter'), ValueError, ('nm=True', "granularity='filter'", 'contradict')),
    update=(dict(sparsity=.5, update=0), ValueError, ('freq=0', 'at least 1')),
    update_true=(dict(sparsity=.5, update=True), TypeError, ('True', 'give None, an int')),
    update_text=(dict(sparsity=.5, update='x'), ValueError, ("'x'", 'give None, an int')),
    update_half=(dict(sparsity=.5, update=2.5), ValueError, ('2.5', 'give None, an int')),
    update_list=(dict(sparsity=.5, update=[1, 2]), ValueError, ('[1, 2]', 'At([...])')),
    hold=(dict(sparsity=.5, hold='yes'), TypeError, ("'yes'", 'True or False')),
    frozen=(dict(sparsity=.5, frozen='x'), ValueError, ("'x'", "'wait' or 'skip'")),
    algorithm=(dict(sparsity=.5, algorithm='gmp'), TypeError, ("'gmp'", 'such as GMP()')),
    algorithm_class=(dict(sparsity=.5, algorithm=GMP), TypeError, ('GMP', 'such as GMP()')),
    twice=(dict(sparsity=.5, algorithm=GMP(.6)), ValueError, ('0.5', '0.6', 'Leave one of them out')),
    twice_schedule=(dict(schedule=lin, algorithm=GMP(.6, schedule=cos)), ValueError, ('sched_lin', 'sched_cos', 'Leave one of them out')),
    twice_context=(dict(context='local', algorithm=GMP(.6, context='global')), ValueError, ("'local'", "'global'", 'Leave one of them out')),
    twice_granularity=(dict(granularity='filter', algorithm=GMP(.6, granularity='kernel')), ValueError, ("'filter'", "'kernel'", 'Leave one of them out')),
    static_schedule=(dict(schedule=lin, algorithm=Static(.5)), ValueError, ('one mask for the whole run', 'leave out schedule')),
    static_update=(dict(update=3, algorithm=Static(.5)), ValueError, ('one mask for the whole run', 'update')))

@pytest.mark.parametrize('name', CONSTRUCTOR)
def test_constructor(name):
    kwargs,ex,says = CONSTRUCTOR[name]
    with pytest.raises(ex) as e: SparsifyCallback(**kwargs)
    assert [s for s in says if s not in str(e.value)]==[]

@pytest.mark.parametrize('make,ex,says', [
    (lambda: GMP(.5, schedule={'type': 'exp'}), TypeError, ('pass it as sparsity',)), (lambda: GMP(.5, init='zzz'), ValueError, ("'zzz'", 'random, topk')),
    (lambda: GMP(150), ValueError, ('150', 'a fraction')), (lambda: Static(1), ValueError, ('1', 'a float in [0, 1)')), (lambda: Static(1.), ValueError, ('1.0', 'a float in [0, 1)')),
    (lambda: Static(-.1), ValueError, ('-0.1', 'a float in [0, 1)')), (lambda: Static(True), ValueError, ('True', 'a float in [0, 1)')), (lambda: Static({'0': .5}), ValueError, ('0.5', 'a float in [0, 1)')),
    (lambda: Schedule(sched_lin, start=.5, end=.2), ValueError, ('end=0.2 < start=0.5', 'set both')),
    (lambda: NM(5, 4), ValueError, ('5:4', '0 < N <= M')), (lambda: At([]), ValueError, ('at least one',))], ids=range(11))
def test_parts(make, ex, says):
    with pytest.raises(ex) as e: make()
    assert [s for s in says if s not in str(e.value)]==[]

@pytest.mark.parametrize('s', [0, 0., .5])
def test_static_takes(s): assert Static(s).sparsity==s

FIT = dict(
    unknown_key=(dict(sparsity={'00': .3}), ValueError, ("'00' matches no weight", "Near names: '0'", 'Layers with weights: 0, 3, 7')),
    key_of_another_type=(dict(sparsity={'1': .3}), ValueError, ("'1' matches no weight", 'BatchNorm2d', 'one dimension')),
    dict_global=(dict(sparsity={'0': .3}, context=global_), ValueError, ('a sparsity for each layer', "context='local'")),
    layer_local=(dict(sparsity=.5, granularity='layer', context='local'), ValueError, ("'layer'", "context='global'")),
    layer_dict=(dict(sparsity={'0': .5}, granularity='layer'), ValueError, ("'layer'", "context='global'")),
    layer_type=(dict(sparsity=.5, layer_type=nn.Conv3d), ValueError, ('no Conv3d layer', "Conv2d ('0', '3'), Linear ('7')", 'pass layer_type=nn.Conv2d')),
    layer_type_name=(dict(sparsity=.5, layer_type='conv1'), ValueError, ("'conv1'", 'Layers with weights: 0, 3, 7')),
    layer_type_pattern=(dict(sparsity=.5, layer_type='re:x.*'), ValueError, ("'re:x.*'", 'Layers with weights: 0, 3, 7')),
    layer_type_number=(dict(sparsity=.5, layer_type=5), TypeError, ('5', 'a layer type such as nn.Conv2d')),
    layer_type_empty=(dict(sparsity=.5, layer_type=[]), ValueError, ('empty', 'at least one')),
    exclude=(dict(sparsity=.5, exclude='zz'), ValueError, ("exclude: 'zz'", 'Layers with weights: 0, 3, 7')),
    exclude_number=(dict(sparsity=.5, exclude=5), TypeError, ('5', 'a layer type such as nn.Conv2d')),
    exclude_all=(dict(sparsity=.5, exclude=nn.Conv2d), ValueError, ('exclude=', 'Conv2d', 'leaves nothing of 2')),
    model=(dict(sparsity=.5, model=nn.Conv2d(1, 8, 3)), ValueError, ('model is a Conv2d', 'a submodule of learn.model')),
    model_number=(dict(sparsity=.5, model=5), TypeError, ('int', 'an nn.Module is needed')),
    dict_of_zeros=(dict(sparsity={'0': 0, '3': 0.}), ValueError, ('every sparsity is 0', 'nothing would be pruned')),
    reduce=(dict(sparsity=.5, granularity='filter', reduce='foo'), ValueError, ("reduce is 'foo'", 'mean, sum, max')),
    seed=(dict(sparsity=.5, seed='x'), ValueError, ("seed is 'x'", 'a whole number, 0 or more')),
    seed_negative=(dict(sparsity=.5, seed=-1), ValueError, ('seed is -1', 'a whole number, 0 or more')),
    min_keep=(dict(sparsity=.5, min_keep=-1), ValueError, ('min_keep is -1', '0 or more')),
    min_keep_all=(dict(sparsity=.5, min_keep=2000, context='local'), ValueError, ('min_keep=2000', 'nothing could be pruned')),
    unreachable=(dict(sparsity=.9999), ValueError, ('0.9999', '1224 of 1224', 'only 1222 can go', 'ask for 0.9983 at most', 'min_keep=0')),
    unreachable_erk=(dict(sparsity=.9999, context='erk'), ValueError, ('0.9999', 'only 1222 can go', 'min_keep=0')),
    round_to_erk=(dict(sparsity=.5, granularity='filter', round_to=4, context='erk'), ValueError, ('round_to', "context='local'")),
    unreachable_min_keep=(dict(sparsity=.5, min_keep=1000), ValueError, ('min_keep=1000', 'min_keep=0')),
    unreachable_filter=(dict(sparsity=.95, granularity='filter'), ValueError, ('0.95', 'only 1143 can go', 'ask for 0.9338 at most')),
    unreachable_static=(dict(algorithm=Static(.9999)), ValueError, ('0.9999', 'only 1222 can go', 'min_keep=0')),
    nm=(dict(sparsity=.5, nm=3), TypeError, ('nm is 3', 'True (2:4)')),
    nm_named=(dict(sparsity=.5, nm=True, layer_type='0'), ValueError, ('0.weight', '4 does not divide')),
    nm_nothing=(dict(sparsity=.5, nm=True, exclude='3'), ValueError, ('nothing is left', '0.weight: 4 does not divide')),
    nm_global=(dict(sparsity=.5, nm=True, layer_type='3', context='global'), ValueError, ('3.weight', "context='local'")),
    grouped_global=(dict(sparsity=.5, granularity=Grouped('in', 2), layer_type='3', context='global'), ValueError, ('3.weight', "context='local'")),
    granularity=(dict(sparsity=.5, granularity='filter', layer_type=(nn.Conv2d, nn.Linear)), ValueError, ("7.weight: a Linear has no granularity 'filter'", 'weight, column, row')),
    dimensions=(dict(sparsity=.5, granularity=(0, 9)), ValueError, ('(0, 9)', 'different numbers from 0 to 3')),
    blocks=(dict(sparsity=.5, granularity=Blocks(3, 3)), ValueError, ('3x3', 'must divide')),
    update=(dict(sparsity=.5, update=9), ValueError, ('every 9 steps', 'the fit has 8', 'at most 8')),
    update_every=(dict(sparsity=.5, update=Every(9)), ValueError, ('every 9 steps', 'at most 8')),
    update_start=(dict(sparsity=.5, update=Every(2, start=8)), ValueError, ('due at step 8', 'ends after 8')),
    update_at=(dict(sparsity=.5, update=At([8, 9])), ValueError, ('due at step 8', 'ends after 8')),
    function_nan=(dict(sparsity=lambda step: math.nan), ValueError, ('nan', 'a fraction in [0, 1]')))

def refused(learn, kwargs, ex, says, **more):
    "A fit that fails before its first batch, with every weight, and the learner's metrics, as before"
    before,batches = snapshot(learn.model),watch(lambda l: l.iter, 'before_batch', order=-100)
    with pytest.raises(ex) as e: learn.fit(1, cbs=[SparsifyCallback(**kwargs), batches, *more.get('cbs', ())])
    assert [s for s in says if s not in str(e.value)]==[]
    assert not batches.seen and same(before, snapshot(learn.model)) and len(learn.metrics)==1

@pytest.mark.parametrize('name', FIT)
@pytest.mark.filterwarnings('ignore:not pruned', 'ignore:never pruned')
def test_fit(name): refused(learner(8), *FIT[name])

def test_steps_under_accumulation():
    "Two steps in eight batches"
    refused(learner(8), dict(sparsity=.5, update=3), ValueError, ('every 3 steps', 'the fit has 2', 'at most 2'), cbs=[GradientAccumulation(16)])

def test_no_layer_of_the_type():
    "The default is Conv2d: a network without one is not pruned in silence"
    refused(learner(2, mlp()), dict(sparsity=.5), ValueError, ('no Conv2d layer', "Linear ('1', '3')", 'pass layer_type=nn.Linear'))

def test_lazy():
    m = nn.Sequential(nn.LazyConv2d(8, 3, padding=1), *list(net())[1:])
    learn = learner(2, m)
    with pytest.raises(ValueError, match='0.weight.*it has no shape yet: run a batch through the model first'): learn.fit(1, cbs=SparsifyCallback(.5, layer_type='0'))

@pytest.mark.parametrize('wrap,says', [(nn.utils.parametrizations.weight_norm, 'parametrization'), (nn.utils.parametrizations.spectral_norm, 'parametrization'),
    (lambda m: l1_unstructured(m, 'weight', 3), 'prune.remove it first')], ids=['weight_norm', 'spectral_norm', 'prune'])
def test_computed_weights(wrap, says):
    "A weight that is computed from another is refused by name, or skipped with a warning where it was chosen by type"
    m = nn.Sequential(wrap(nn.Conv2d(1, 8, 3, padding=1)), *list(net())[1:])
    name = next(n for n,p in m.named_parameters() if p.ndim==4)
    refused(learner(2, m), dict(sparsity=.5, layer_type=name), ValueError, (name, 'cannot be made sparse', says))
    learn = learner(2, m)
    with pytest.warns(UserWarning, match='not pruned: 0.weight'): learn.fit(1, cbs=SparsifyCallback(.5))
    assert list(learn.sparsify.sparsifier.masks)==['3.weight']

def test_nan_is_named():
    "Also in the first batch: before anything is pruned"
    learn = learner(2)
    learn.model[3].weight.data[0, 0, 0, 0] = math.nan
    before,seen = snapshot(learn.model)['0.weight'],watch(lambda l: 1)
    with pytest.raises(ValueError, match='3.weight: 1 of 1152 scores are NaN'): learn.fit(1, cbs=[SparsifyCallback(.5, schedule=lin.but(end=0.)), seen])
    assert not seen.seen and same({'w': before}, {'w': learn.model[0].weight.detach()})

def test_goes_on_after_a_refusal():
    "By a callback that was given, and by one that stays"
    learn = learner(4)
    refused(learn, *FIT['unknown_key'])
    quiet(learn.fit, 1, cbs=SparsifyCallback(.5))
    assert conv_zeros(learn)==612
    learn = learner(4, mlp(), cbs=SparsifyCallback(.5))
    with pytest.raises(ValueError, match='no Conv2d layer'): learn.fit(1)
    learn.model = net()
    learn.create_opt()
    quiet(learn.fit, 1)
    assert conv_zeros(learn)==612 and len(learn.metrics)==1

def test_report_before_a_fit():
    with pytest.raises(ValueError, match='nothing to report before the first fit'): SparsifyCallback(.5).report()
