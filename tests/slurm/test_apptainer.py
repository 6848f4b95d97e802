"""``apptainer.sbatch`` as it is in real Apptainer, with MPI started outside the containers and used inside.

The jobs run as an ordinary user's do where Apptainer is not setuid: each container in a user namespace of its own, the
image mounted by FUSE.
"""

import re
import tempfile
from pathlib import Path

import pytest

from tests.cluster.slurm import OWN, wait_until
from tests.slurm import image
from tests.slurm.mpis import MPIS, mpi_of

TRAIN = image.ROOT / "slurm/jobs/train_digits.py"
IN_IMAGE = "/opt/hpcdist/lib/python3.11/site-packages/hpcdist"

pytestmark = [
    pytest.mark.skipif(bool(image.why_not()), reason=image.why_not()),
    pytest.mark.timeout(2 * image.BUILD_S),  # the first test builds the image
]


@pytest.fixture(scope="session")
def sif(request, cluster):
    cache = getattr(request.config, "cache", None)
    return image.image(cluster.shared if cache is None else cache.mkdir("hpcdist-image"))


@pytest.fixture(scope="session")
def base(sif):
    """What every job of this file has in its environment."""
    return {
        "HPCDIST_IMAGE": str(sif),
        "HPCDIST_CONTAINER": image.CONTAINER,
        "HPCDIST_PYTHON": "python3",
        "HPCDIST_BIND": str(image.ROOT / "src"),  # on the cluster's PYTHONPATH
        "APPTAINER_USERNS": "1",
    }


@pytest.fixture(scope="session")
def own_mpi(base):
    """The MPI that the image has, and srun's --mpi= for it."""
    name = mpi_of(image.CONTAINER, "exec", "--userns", base["HPCDIST_IMAGE"], "python3")
    assert name, f"the image has none of {', '.join(MPIS)}"
    return name, base | {"HPCDIST_MPI": MPIS[name]}


@pytest.fixture(scope="session")
def mpich(own_mpi, base, cluster):
    """MPICH: the image's own, or this machine's in its place, as a site's MPI is bound."""
    name, environment = own_mpi
    if name == "MPICH":
        return environment
    unpacked = Path(tempfile.mkdtemp(dir=cluster.shared))
    image.pip("install", "--no-deps", "--ignore-installed", "--prefix", unpacked, "mpich>=5.0")
    return base | {
        "HPCDIST_MPI": MPIS["MPICH"],
        "HPCDIST_BIND": f"{base['HPCDIST_BIND']},{unpacked}:/opt/mpich",
        "MPI4PY_LIBMPI": "/opt/mpich/lib/libmpi.so.12",
    }


def line(job, pattern):
    """Return the one line of a job's output that a pattern matches."""
    (found,) = re.findall(rf"^{pattern}$", job.output, re.MULTILINE)
    return found


ONE_NODE = ["--nodes=1", "--ntasks-per-node=2"]
TWO_NODES = ["--nodes=2", "--ntasks-per-node=2"]


def test_the_images_mpi_makes_one_world_and_arguments_reach_it_unharmed(completed, jobs, own_mpi):
    arguments = ["a b", "$HOME", "`id`", "*", "it's", 'say "x"', "", "back\\slash"]
    job = completed("apptainer", jobs / "mpi_sum.py", *arguments, options=ONE_NODE, **own_mpi[1])
    assert line(job, "world.*") == f"world=2 sum=1 nodes=1 threads=1 arguments={arguments}"


def test_mpich_by_pmi2_on_two_nodes(completed, jobs, mpich):
    job = completed("apptainer", jobs / "mpi_sum.py", options=TWO_NODES, **mpich)
    assert line(job, "world.*") == "world=4 sum=6 nodes=2 threads=1 arguments=[]"


def test_it_trains_on_two_nodes(completed, mpich):
    """Messages within a node are large enough for MPICH to want the memory of a rank in another container."""
    job = completed("apptainer", TRAIN, "--epochs", "5", options=TWO_NODES, seconds=180, **mpich)
    accuracy = line(job, r"held-out accuracy ([\d.]+) after 5 epochs on 4 ranks")
    assert float(accuracy) > 0.9


def test_the_status_of_the_script_is_that_of_the_job(cluster, submit, jobs, own_mpi):
    job = cluster.wait(submit("apptainer", jobs / "exit_with.py", "7", options=ONE_NODE, **own_mpi[1]))
    assert (job.state, job.exit_status) == ("FAILED", 7), job.output
    assert "with status 7" in job.output


def test_the_doctor_of_the_image_finds_nothing_wrong(completed, own_mpi):
    name, environment = own_mpi
    alone = environment | {"PYTHONPATH": ""}  # without the checkout's hpcdist
    job = completed("apptainer", "-m", "hpcdist", "doctor", options=ONE_NODE, **alone)
    for text in ("hpcdist doctor, 2 ranks", IN_IMAGE, name, "MPI_COMM_WORLD has 2 ranks", " 0 wrong"):
        assert text in job.output


def test_pmix_works_where_slurms_temporary_folder_is_bound(completed, jobs, own_mpi):
    name, environment = own_mpi
    if name != "Open MPI":
        pytest.skip(f"the image has {name}, which does not use PMIx")
    # Without /tmp in the containers these nodes' TmpFS and spool folders are as far away as those of other sites.
    bound = f"{environment['HPCDIST_BIND']},{OWN}/tmp"
    where = {"APPTAINER_NO_MOUNT": "tmp", "HPCDIST_BIND": bound}
    job = completed("apptainer", jobs / "mpi_sum.py", options=ONE_NODE, **environment | where)
    assert line(job, "world.*") == "world=2 sum=1 nodes=1 threads=1 arguments=[]"


FOUND = """
import os, site, sys
print("found", sys.prefix, os.getcwd(), site.ENABLE_USER_SITE, open("beside.txt").read(), os.environ["MINE"])
"""


def test_a_job_finds_its_folder_and_its_variables_and_no_package_of_the_home(completed, base, tmp_path):
    (tmp_path / "found.py").write_text(FOUND)
    (tmp_path / "beside.txt").write_text("read")
    environment = base | {"HPCDIST_PYTHON": "/usr/bin/python3", "HPCDIST_MPI": "none", "MINE": "kept"}
    environment["APPTAINER_MESSAGELEVEL"] = "3"
    one = ["--nodes=1", "--ntasks-per-node=1"]
    job = completed("apptainer", "found.py", options=[*one, "--gpus-per-node=1"], **environment)
    assert line(job, "found.*") == f"found /usr {tmp_path} False read kept"
    # There is no GPU behind Slurm's: that --nv was given shows in what it looked for.
    assert "nvidia" in job.output


def mounts(cluster):
    """Return what is mounted on each host."""
    return [host.run(["cat", "/proc/self/mounts"]).stdout for host in cluster.hosts]


def test_a_cancelled_job_leaves_nothing_behind(cluster, submit, jobs, own_mpi):
    before = mounts(cluster)
    number = submit("apptainer", jobs / "endless.py", options=ONE_NODE, **own_mpi[1])
    assert wait_until(lambda: "running" in cluster.output(number), seconds=60), cluster.output(number)
    assert any("endless.py" in process for process in cluster.processes())
    assert cluster.run("scancel", number).returncode == 0
    assert cluster.wait(number).state == "CANCELLED"
    assert wait_until(lambda: not cluster.processes()), cluster.processes()
    assert mounts(cluster) == before
