"""The length of the flight recorder, also for the default group."""

from __future__ import annotations

import pickle
import signal
from pathlib import Path

from tests.forked import python
from tests.programs import run

PROGRAM = f"""
import os, signal, sys, time
import torch
import hpcdist as dist

dist.init_process_group("loopback")
for count in range(1, 10):
    dist.all_reduce(torch.ones(count))
os.kill(os.getpid(), {int(signal.SIGUSR1)})
while not os.path.exists(sys.argv[1] + "0"):
    time.sleep(0.02)
time.sleep(0.2)
"""


def test_the_last_calls_are_kept(tmp_path: Path) -> None:
    prefix = str(tmp_path / "trace_")
    result = run([*python(), "-c", PROGRAM, prefix], TORCH_FR_BUFFER_SIZE="5", TORCH_FR_DUMP_TEMP_FILE=prefix)
    assert result.returncode == 0, result.stderr
    trace = pickle.loads(Path(f"{prefix}0").read_bytes())
    assert [each["input_sizes"] for each in trace["entries"]] == [[[count]] for count in range(5, 10)]
