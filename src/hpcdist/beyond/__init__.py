"""What c10d does not have, on top of the facade and the backends' optional parts; only the public names import it."""

import hpcdist.public  # noqa: F401  # whoever imports a part of it has all names, and torch knows them
