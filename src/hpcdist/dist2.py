"""Object-oriented groups: the public name of ``hpcdist.c10d.compat.dist2``."""

from hpcdist.c10d.compat.dist2 import *  # noqa: F403  # the names of its __all__
from hpcdist.c10d.compat.dist2 import __all__ as __all__
