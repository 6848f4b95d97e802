"""The command ``bench`` with the subjects that only concern those who work on hpcdist.

mpirun -n 2 python -m tests.bench [SUBJECT] [OPTION...]
"""

import sys

from hpcdist.cli import bench

SUBJECTS = ("latency", "arrays", "objects", "varied", "halo", "groups", "overlap", "reproducible")

if __name__ == "__main__":
    bench.SUBJECTS |= {name: f"tests.bench.{name}" for name in SUBJECTS}
    sys.exit(bench.run(sys.argv[1:]))
