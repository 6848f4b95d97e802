"""A call is watched though the process has many descriptors open, beyond what ``select`` takes, or none left."""

from __future__ import annotations

import pytest

from tests.faults.launch import FIRST, Job

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]
PROGRAM = """
import resource

def overdue(event):
    try:
        dist.recv(torch.ones(3), 0)
    except RuntimeError as error:
        tell(event, text=str(error))

dist.init_process_group(timeout=timedelta(seconds=60))
dist.barrier()
dist.group.WORLD.timeout = timedelta(seconds=1)
if dist.get_rank() == 0:
    tell("waits")
    time.sleep(60)
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(1200, hard), hard))
kept = [os.open("/dev/null", os.O_RDONLY) for _ in range(1050)]
overdue("many")
try:
    while True:
        kept.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    tell("none left", count=len(kept))
overdue("none")
time.sleep(60)
"""


@pytest.mark.parametrize("launcher", FIRST)
def test_many_descriptors_and_none_left(launcher: str) -> None:
    with Job(launcher, 2, script=PROGRAM, is_forked=False) as job:
        for event in ("many", "none"):
            (told,) = job.wait(event)
            assert "rank 0 is not in a call of hpcdist" in told["text"], job.stderr()
        assert "Traceback" not in job.stderr()
