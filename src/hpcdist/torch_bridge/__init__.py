"""Bridge to ``torch.distributed``: registers our groups there, makes groups for its calls, uses its private names.

torch's libraries look groups up in private tables of ``torch.distributed``. These are written here, and other private
names of torch are used here, and nowhere else (``tests/project/test_private_torch.py``). Each module lists the names
that it uses, and the versions with which they were checked:

- ``mirror``: our groups in torch's tables, and the store that goes with them.
- ``registration``: the backend "hpcdist", ``env://`` under MPI's launchers, and the diversion of unmodified scripts.
- ``replaced``: functions of torch. ``profiler``: events. ``compiler``: torch.compile.
- ``dispatch``: c10d's operators on our groups, which modes and subclasses see.
- ``private_names``: single names.

Importing the package installs the events, and the dispatcher's part if this torch has its names.
"""

from contextlib import suppress

from hpcdist.torch_bridge import profiler as _profiler  # noqa: F401  # it installs itself

with suppress(ImportError):  # a torch without its private names
    from hpcdist.torch_bridge import dispatch as _dispatch  # noqa: F401  # it installs itself


def registered() -> None:
    """Do nothing: importing this package has registered the backend.

    torch calls this by an entry point from 2.14 on, if ``hpcdist_autoload`` is switched off.
    """
