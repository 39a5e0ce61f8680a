"""Runs pytest on one file after another, each in a fork of this process, which has imported torch.

Importing torch and the library takes longer than most files' tests. Requests come as lines of JSON
on stdin: arguments, environment, folder, log and time; a line on stdout answers each.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
from typing import Any, NoReturn

PRELOADED = (
    *("peer_plugin", "torch", "torch.distributed", "torch.optim", "torchmetrics", "sklearn"),
    "sklearn.datasets",
)


def run(request: dict[str, Any]) -> NoReturn:
    """Run pytest in this process, a session of its own, and end it."""
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    import pytest

    sys.argv = ["pytest", *request["arguments"]]
    code = pytest.main(request["arguments"])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code))


def wait(process: int, seconds: float) -> None:
    """Wait for a fork, and end it and what it has left behind: its session only."""
    end = time.monotonic() + seconds
    while os.waitpid(process, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return
        time.sleep(0.1)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)


def main() -> None:
    """Answer requests until stdin ends."""
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        process = os.fork()
        if process == 0:
            run(request)
        wait(process, request["seconds"])
        print("done", flush=True)


if __name__ == "__main__":
    main()
