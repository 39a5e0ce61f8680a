"""torchrun with nodes that join and leave, as two agents on this machine; needs no root."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.cluster


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_training_goes_on_when_a_node_joins_when_it_is_lost_and_when_a_rank_is_killed(
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

    def said(text: str) -> int:
        return sum(program.text().count(text) for program in (first, second))

    def goes_on(times: int) -> bool:
        return said("was started again: resuming from ") >= times

    from_here = pytest.importorskip("time").monotonic
    deadline = from_here() + 120
    while not (goes_on(1) and said("of 2 ranks") > 4):
        assert from_here() < deadline, first.text() + second.text()
    # The node is lost, with all that runs on it.
    second.kill()
    restarts = first.text().count("was started again: resuming from ")
    while first.text().count("was started again: resuming from ") == restarts:
        assert from_here() < deadline + 120, first.text()
    os.kill(_rank_of(first.process.pid), signal.SIGKILL)
    first.wait(240)
    (rank,) = results()
    assert rank["world_size"] == 1
    assert rank["first_step"] > 8
    assert first.text().count("was started again: resuming from ") == restarts + 2


def _rank_of(agent: int) -> int:
    """Return the process id of the rank that an agent of torchrun has started."""
    with open(f"/proc/{agent}/task/{agent}/children") as children:  # noqa: PTH123
        return int(children.read().split()[0])
