"""Who can reach what ranks listen on."""

from __future__ import annotations

import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from stratagem.launch import network

SCRIPTS = Path(__file__).parent / "scripts"

# What /proc/net/tcp and tcp6 call 127.0.0.1.
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}

ONE_NODE_OF_SLURM = {
    "SLURM_JOB_ID": "31",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_STEP_NODELIST": socket.gethostname(),
    "SLURM_NODEID": "0",
}
ONE_NODE_OF_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "2342977537",
}
ONE_NODE_BY_HAND = {
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": socket.gethostname(),
}


@pytest.fixture
def assert_listens_on_loopback(
    tmp_path: Path, script_environment: dict[str, str]
) -> Callable[..., None]:
    """Start commands, all at once, and assert that their processes listen on loopback only."""

    def look(*environments: Mapping[str, str], before: tuple[str, ...] = ()) -> None:
        mark = {"LISTENING_MARK": uuid.uuid4().hex, "HOME": str(tmp_path)}
        strategy = "ddp"
        if before and not before[0].startswith("-"):
            (strategy,), before = before, ()
        started = [
            subprocess.Popen(
                [sys.executable, *before, str(SCRIPTS / "listening.py"), strategy],
                env={**script_environment, **mark, **environment},
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for environment in environments or ({},)
        ]
        output = "".join(program.communicate(timeout=90)[0] for program in started)
        assert not any(program.returncode for program in started), output
        (line,) = (line for line in output.splitlines() if line.startswith("LISTENING"))
        *addresses, _, world_size = line.split()[1:]
        assert world_size == "2"
        assert addresses
        assert set(addresses) <= LOOPBACK, f"listens on {addresses}\n{output}"

    return look


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn", "ddp_fork"])
def test_launchers_listen_on_loopback_only(
    strategy: str, assert_listens_on_loopback: Callable[..., None]
) -> None:
    assert_listens_on_loopback(before=(strategy,))


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--max-restarts=1",)], ids=["plain", "restarts"])
def test_stratagem_run_listens_on_loopback_only(
    options: tuple[str, ...], assert_listens_on_loopback: Callable[..., None]
) -> None:
    assert_listens_on_loopback(before=("-m", "stratagem", "run", "--devices=2", *options))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("common", "rank_variables"),
    [
        (ONE_NODE_OF_SLURM, ("SLURM_PROCID", "SLURM_LOCALID")),
        (ONE_NODE_OF_MPI, ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")),
        (ONE_NODE_BY_HAND, ("RANK", "LOCAL_RANK")),
    ],
    ids=["slurm", "mpi", "by hand"],
)
def test_ranks_of_one_node_that_a_cluster_has_started_listen_on_loopback_only(
    common: Mapping[str, str],
    rank_variables: tuple[str, ...],
    assert_listens_on_loopback: Callable[..., None],
) -> None:
    more = {"MASTER_PORT": str(network.free_port())} if "MASTER_ADDR" in common else {}
    assert_listens_on_loopback(
        *({**common, **more, **dict.fromkeys(rank_variables, rank)} for rank in "01")
    )
