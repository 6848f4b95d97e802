"""Job that listens for a warning after some seconds, and ends when it has received it."""

import time

time.sleep(3)  # importing torch on a thousand nodes takes longer

import hpcdist as dist  # noqa: E402  late, as on a slow file system

dist.init_process_group()
while not dist.stop_requested():
    time.sleep(0.1)
dist.destroy_process_group()
