"""Launches two ranks without a cluster; tells where Ray listened and what it has left."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from stratagem import Lite


def job(lite: Lite, word: str) -> list[Any]:
    total = lite.all_reduce(torch.tensor(float(lite.global_rank)), reduce_op="sum")
    time.sleep(2.0)  # while the other process looks at the ports
    return [word, lite.world_size, float(total)]


def rays_processes() -> list[int]:
    """Return what has been started by this process, and by what it has started."""
    found = [os.getpid()]
    for process in found:
        for file in Path(f"/proc/{process}/task").glob("*/children"):
            found += map(int, file.read_text().split())
    return found[1:]


def listening() -> set[str]:
    """Return the addresses that Ray's processes listen on."""
    own = {*rays_processes(), os.getpid()}
    table = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout
    found = set()
    for line in table.splitlines():
        if own & set(map(int, re.findall(r"pid=(\d+)", line))):
            found.add(line.split()[3].rpartition(":")[0])
    return found


def main() -> None:
    before = dict(os.environ)
    seen: set[str] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.5):
            seen.update(listening())

    looking = threading.Thread(target=look)
    looking.start()
    lite = Lite(accelerator="cpu", strategy="ddp", devices=2, plugins="ray")
    result = lite.launch(job, "hello")
    over.set()
    looking.join()
    told = {
        "result": result,
        "listening": sorted(seen),
        "left": [Path(f"/proc/{p}/cmdline").read_text() for p in rays_processes()],
        "variables_before": sorted(before),
        "variables_after": sorted(os.environ),
    }
    print(json.dumps(told))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
