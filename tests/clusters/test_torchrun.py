"""torchrun with nodes that join and leave, as two agents on this machine; needs no root."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.cluster


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_torchrun_training_survives_joined_and_lost_nodes(
    start: Callable[..., Any], train: Callable[..., list[str]], results: Any
) -> None:
    script = train(seconds=0.25, steps=160, save_every=4)[1:]
    torchrun = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1"),
        *("--max-restarts=5", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"),
        "--rdzv-conf=last_call_timeout=2",
    ]
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    first = start(*torchrun, *script, env=env)
    first.wait_for("step 8 of 1 ranks")

    second = start(*torchrun, *script, env=env)

    def resumed(program: Any) -> int:
        return int(program.text().count("was started again: resuming from "))

    def wait_until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 90
        while not condition():
            assert time.monotonic() < deadline, first.text() + second.text()
            time.sleep(0.2)

    wait_until(lambda: resumed(first) + resumed(second) == 1)
    wait_until(lambda: (first.text() + second.text()).count("of 2 ranks") > 4)
    # The node is lost, with all that runs on it.
    second.kill()
    before = resumed(first)
    wait_until(lambda: resumed(first) == before + 1)
    os.kill(first.children()[-1], signal.SIGKILL)
    first.wait(120)
    (rank,) = results()
    assert rank["world_size"] == 1
    assert rank["first_step"] > 8
    assert resumed(first) == before + 2
