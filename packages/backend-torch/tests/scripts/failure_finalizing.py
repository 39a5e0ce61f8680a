# Run by test_failure.py: rank 1 dies while rank 0 is where an exception would be ignored.
import os
import sys
import time

from stratagem import Lite

lite = Lite(accelerator="cpu", devices=2, strategy="ddp")
lite.launch()
lite.barrier()


class Slow:
    def __del__(self):
        print("begins", flush=True)
        time.sleep(3)


if lite.global_rank == 1:
    time.sleep(0.5)
    os._exit(3)
Slow()
time.sleep(60)  # LINE after
sys.exit("NOT REACHED")
