"""Entry point of ``python -m hpcdist``; the commands are in ``hpcdist.cli.main``."""

import sys

from hpcdist.cli.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
