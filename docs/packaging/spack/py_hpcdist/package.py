"""Spack package of hpcdist.

Copy its folder to the packages of a Spack repository; ``spack dev-build py-hpcdist@0.1.0`` then builds a checkout.
"""

from spack.package import depends_on, license, version
from spack_repo.builtin.build_systems.python import PythonPackage


class PyHpcdist(PythonPackage):
    """PyTorch's torch.distributed API on the MPI that your cluster already has."""

    homepage = "https://pypi.org/project/hpcdist/"
    pypi = "hpcdist/hpcdist-0.1.0.tar.gz"

    license("BSD-3-Clause")

    # not released yet: the first release brings the checksum
    version("0.1.0")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-hatchling@1.25:", type="build")
    depends_on("py-torch@2.8:2", type=("build", "run"))
    depends_on("py-numpy@1.26:", type=("build", "run"))
    # built with the MPI that this Spack has
    depends_on("py-mpi4py@4.1:4", type=("build", "run"))
    depends_on("py-python-hostlist@2.1:", type=("build", "run"))
    depends_on("py-rich@13:", type=("build", "run"))
