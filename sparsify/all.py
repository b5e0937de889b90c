"What a user types: `from sparsify.all import *`. Left out is what fastai exports under the same name: `Lambda`, two curves that are equal to fastai's, and the functions of `prune`, which bear torch's names."
from .masks import *
from .schedule import *
from .granularity import *
from .criteria import *
from .context import *
from .targets import *
from .sparsifier import *
from .algorithm import *
from .dynamic import *
from .group import *
from .flops import *
from .copies import *
from .callback import *
from .prune import from_prune, load_masks, save_masks

del Lambda, sched_lin, sched_cos
