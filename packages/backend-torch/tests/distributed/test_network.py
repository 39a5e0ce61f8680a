"""Who can reach what ranks listen on."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from stratagem.errors import CommunicationError, ConfigurationError
from stratagem_torch.distributed import process_group
from stratagem_torch.distributed.socket_store import StoreServer
from stratagem_torch.launch import network

SCRIPTS = Path(__file__).parents[1] / "scripts"

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

    def look(
        *environments: Mapping[str, str], before: tuple[str, ...] = (), store: str = "FileStore"
    ) -> None:
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
        assert f"STORE {store}\n" in output
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
    assert_listens_on_loopback(
        before=("-m", "stratagem", "run", "--devices=2", *options),
        store="TCPStore" if options else "FileStore",  # a restart needs torchrun, with its store
    )


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
        *({**common, **more, **dict.fromkeys(rank_variables, rank)} for rank in "01"),
        store="TCPStore" if more else "FileStore",
    )


def test_the_store_of_one_node_is_in_a_folder_of_its_user(tmp_path: Path) -> None:
    path = network.make_store_file(tmp_path)
    assert path is not None
    assert Path(path).parent.stat().st_mode & 0o777 == 0o700
    network.remove_store_file(path)
    assert list(tmp_path.iterdir()) == []


def test_another_user_cannot_open_the_stores_of_one_node() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can act as another user; CI runs as root")
    path = network.make_store_file()
    assert path is not None
    StoreServer(f"{path}.socket")
    for each in (path, f"{path}.socket"):
        read = subprocess.run(
            ["cat", each], user=65534, capture_output=True, text=True, check=False
        )
        assert "Permission denied" in read.stderr
    network.remove_store_file(path)


def test_ranks_meet_at_a_port_if_files_cannot_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError("no locks")

    monkeypatch.setattr("stratagem.system.lock", refuse)
    assert network.make_store_file(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_folders_of_stores_of_killed_runs_are_removed_after_a_day(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory() as short:  # a socket has a short path
        monkeypatch.setattr(tempfile, "tempdir", short)
        paths = [network.make_store_file() for _ in ("killed", "running", "new")]
        killed, running, new = (Path(path).parent for path in paths if path)
        StoreServer(str(running / "store.socket"))
        for folder in (killed, running):
            os.utime(folder, (0, 0))
        last = network.make_store_file()
        assert last is not None
        assert set(Path(short).iterdir()) == {running, new, Path(last).parent}


def test_a_rank_that_does_not_join_is_named() -> None:
    ranks: Any = SimpleNamespace(global_rank=0, world_size=4)
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    store.append("stratagem_joining", "2,")
    with (
        pytest.raises(CommunicationError) as caught,
        process_group._naming_absent_ranks(store, ranks, 8.0),
    ):
        raise RuntimeError("Wait timeout")
    assert str(caught.value) == (
        "rank 1, 3 of 4 did not join the process group within 8 s: if it has failed, its output "
        "says why; if it needs longer until it joins, give the strategy a larger timeout="
    )


def test_a_group_that_is_destroyed_is_not_joined_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "_own_store", SimpleNamespace(path="/tmp/store.socket"))
    environment: Any = SimpleNamespace(store_file="/tmp/store")
    ranks: Any = SimpleNamespace(is_global_zero=True, world_size=2)
    limit = timedelta(seconds=1)
    with pytest.raises(ConfigurationError) as caught:
        process_group._join_store(ranks, environment, limit, several_nodes=False)
    assert str(caught.value) == (
        "this process has already joined a process group, which failed or was destroyed: remove "
        "calls of torch.distributed.destroy_process_group() (Stratagem leaves the group at the end "
        "of the script), or start the next run in new processes"
    )


def test_ranks_meet_at_a_port_if_no_folder_can_be_made(tmp_path: Path) -> None:
    assert network.make_store_file(tmp_path / "missing") is None
    long = tmp_path / ("a" * 100)
    long.mkdir()
    assert network.make_store_file(long) is None
    assert list(long.iterdir()) == []
    network.remove_store_file(None)
