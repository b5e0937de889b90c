"What a user types: `from sparsify.all import *`. Left out is what fastai exports under the same name: `Lambda`, and two curves that are equal to fastai's."
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
from .copies import *
from .callback import *

del Lambda, sched_lin, sched_cos
