"""Bridge to ``torch.distributed``: shows it our groups, takes its calls to make some, and holds torch's private names.

torch's libraries look groups up in tables that ``torch.distributed`` keeps for itself. They are written here, and what
else torch keeps private is used here, and nowhere else (``tests/project/test_private_torch.py``). Each module lists
what it touches, and the versions where that was checked:

- ``mirror``: our groups in torch's tables, and the store that goes with them.
- ``registration``: the backend "hpcdist", ``env://`` under MPI's launchers, and the diversion of unmodified scripts.
- ``replaced``: functions of torch. ``profiler``: events. ``compiler``: torch.compile.
- ``dispatch``: c10d's operators on our groups, which modes and subclasses see.
- ``private_names``: single names.

Importing the package installs the events, and the dispatcher's part if this torch has the names for it.
"""

from contextlib import suppress

from hpcdist.torch_bridge import profiler as _profiler  # noqa: F401  # it installs itself

with suppress(ImportError):  # a torch without the private names that it uses
    from hpcdist.torch_bridge import dispatch as _dispatch  # noqa: F401  # it installs itself


def registered() -> None:
    """Do nothing: importing this package has registered the backend.

    From 2.14 on torch calls this by an entry point, where ``hpcdist_autoload`` is switched off.
    """
