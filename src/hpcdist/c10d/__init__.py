"""The facade: torch.distributed's names and signatures, each a thin call on the engine."""

import hpcdist.public  # noqa: F401  # whoever imports a part of it has all names, and torch knows them
