"""Cluster environments: which is taken, why not the others, and what each reads.

The variables are those that SLURM 22.05, Open MPI 4.1 and torchrun set; those of LSF and Kubeflow
are taken from their documents.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from stratagem.discovery.registry import get_registry
from stratagem.environments import (
    ClusterEnvironment,
    KubeflowEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    PlainEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from stratagem.errors import ConfigurationError
from stratagem.plan.plan import RunPlan, RunRequest
from stratagem.plan.resolution import resolve
from stratagem_torch.distributed.diagnosis.status_exchange import BoundedStore
from stratagem_torch.environments import rendezvous, slurm
from stratagem_torch.launch import network

# A batch script on the first of two nodes, whose job has two tasks on each.
BATCH_SCRIPT = {
    "SLURM_JOB_ID": "31",
    "SLURM_JOB_NAME": "train.sh",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
# The last task of `srun python train.py` in it.
STEP = {
    **BATCH_SCRIPT,
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "2342977537",
}
JSRUN = {
    "LSB_JOBID": "512",
    "LSB_HOSTS": "batch5 a1 a1 a2 a2",
    "JSM_NAMESPACE_SIZE": "4",
    "JSM_NAMESPACE_RANK": "3",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
}
POD = {
    "KUBERNETES_PORT": "tcp://10.0.0.1:443",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "3",
    "RANK": "2",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
}


def plan(environ: Mapping[str, str], **asked: Any) -> RunPlan:
    asked = {"accelerator": "cpu", "interactive": False, **asked}
    return resolve(RunRequest(environ=environ, **asked), get_registry())


def refused(environ: Mapping[str, str], **asked: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        plan(environ, **asked)
    return str(caught.value)


def why_not(name: str, environ: Mapping[str, str]) -> str:
    (found,) = (each for each in plan(environ).rejected_environments if each.name == name)
    return found.why


@pytest.fixture
def set_environ(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, str]], None]:
    def set_all(environ: Mapping[str, str]) -> None:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)

    return set_all


# -- which is taken


@pytest.mark.parametrize(
    ("environ", "name", "shape"),
    [
        (STEP, "SLURM", (2, 2, 4)),
        (MPIRUN, "MPI", (2, 2, 4)),
        (JSRUN, "LSF", (2, 2, 4)),
        (POD, "Kubeflow", (1, 3, 3)),
        (TORCHRUN, "TorchElastic", (2, 2, 4)),
    ],
)
def test_cluster_is_detected_with_its_world_size(
    environ: Mapping[str, str], name: str, shape: tuple[int, int, int]
) -> None:
    made = plan(environ)
    assert made.cluster_environment.name == name
    assert (len(made.devices), made.num_nodes, made.world_size) == shape
    assert (made.strategy.name, made.launcher.name) == ("ddp", "external")


@pytest.mark.parametrize(
    ("environ", "name", "ranks"),
    [
        (STEP, "SLURM", (4, 2, 3, 1, 1)),
        (MPIRUN, "MPI", (4, 2, 3, 1, 1)),
        (JSRUN, "LSF", (4, 2, 3, 1, 1)),
        (POD, "Kubeflow", (3, 1, 2, 0, 2)),
        (TORCHRUN, "TorchElastic", (4, 2, 3, 1, 1)),
    ],
)
def test_environment_agrees_with_the_ranks_of_the_plan(
    environ: Mapping[str, str], name: str, ranks: tuple[int, ...], set_environ: Any
) -> None:
    set_environ(environ)
    environment: ClusterEnvironment = plan(environ).cluster_environment.build()
    assert environment.creates_processes_externally
    assert ranks == (
        environment.world_size(),
        environment.local_world_size(),
        environment.global_rank(),
        environment.local_rank(),
        environment.node_rank(),
    )


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        # An sbatch script has SLURM_PROCID and SLURM_LOCALID, as if it were rank 0.
        (BATCH_SCRIPT, "SLURM"),
        ({"LSB_JOBID": "512"}, "LSF"),
    ],
)
def test_cluster_job_without_ranks_is_plain_and_explained(
    environ: Mapping[str, str], name: str
) -> None:
    made = plan(environ, strategy="ddp", devices=2)
    assert (made.cluster_environment.name, made.launcher.name) == ("plain", "script")
    text = why_not(name, environ)
    assert f", though {name[:2]}" in text
    assert "has not started this process; start the script with " in text
    assert text in made.explain(why=True)


def test_the_shell_of_an_interactive_step_is_no_rank() -> None:
    shell = {**STEP, "SLURM_NTASKS": "1", "SLURM_PTY_PORT": "41319"}
    assert plan(shell).cluster_environment.name == "plain"
    text = why_not("SLURM", shell)
    assert text.startswith("SLURM_PTY_PORT is set: this is an interactive shell of `srun --pty`")
    assert "use `srun --overlap`" in text


@pytest.mark.parametrize("on_terminal", [True, False])
def test_a_step_that_is_started_in_an_interactive_step_has_ranks(
    on_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM_PTY_PORT is inherited; the terminal is not."""
    monkeypatch.setattr(sys, "stdin", type("Stdin", (), {"isatty": lambda self: on_terminal})())
    made = plan({**STEP, "SLURM_PTY_PORT": "41319"})
    assert made.cluster_environment.name == ("plain" if on_terminal else "SLURM")


def test_a_process_that_another_launcher_started_in_a_pod_is_no_rank_of_kubeflow() -> None:
    inside = {**POD, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert plan(inside).cluster_environment.name == "plain"
    assert why_not("Kubeflow", inside).startswith("LOCAL_RANK is set: another launcher")


def test_inner_launcher_takes_precedence_over_the_cluster() -> None:
    assert plan({**STEP, **MPIRUN}).cluster_environment.name == "MPI"
    assert plan({**MPIRUN, **JSRUN}).cluster_environment.name == "LSF"
    assert plan({**STEP, **TORCHRUN}).cluster_environment.name == "TorchElastic"
    assert why_not("SLURM", {**STEP, **TORCHRUN}) == "TorchElastic goes before it"


def test_detection_is_switched_off_by_one_variable() -> None:
    made = plan({**STEP, "STRATAGEM_CLUSTER": "none"}, strategy="ddp", devices=2)
    assert (made.cluster_environment.name, made.launcher.name) == ("plain", "script")
    assert made.rejected_environments == ()


@pytest.mark.parametrize("name", ["slurm", "SLURMEnvironment"])
def test_an_environment_is_named_by_a_variable_or_an_argument(name: str) -> None:
    both = {**STEP, **MPIRUN}
    assert plan({**both, "STRATAGEM_CLUSTER": name}).cluster_environment.name == "SLURM"
    assert plan(both, cluster_environment=name).cluster_environment.name == "SLURM"


def test_a_named_environment_that_has_not_started_the_process_is_refused() -> None:
    text = refused(BATCH_SCRIPT, cluster_environment="slurm", strategy="ddp", devices=2)
    assert "'SLURM' (your argument) has not started this process: SLURM_STEP_ID is not set" in text
    assert "Start one process for each of the 2 ranks with the cluster's launcher" in text
    # Alone, it is a process like any other.
    assert plan(BATCH_SCRIPT, cluster_environment="slurm", devices=1).world_size == 1


# -- what does not fit


def test_devices_have_to_agree_with_the_tasks_of_the_step() -> None:
    text = refused(STEP, devices=3, strategy="ddp")
    assert text == (
        "devices=3 means 3 process(es) on each node, but SLURM has started 2 here "
        "(SLURM_STEP_TASKS_PER_NODE=2(x2), SLURM_NTASKS=4): make the two agree, or leave "
        "devices='auto'"
    )


def test_nodes_have_to_agree_with_the_tasks_of_the_step() -> None:
    text = refused(STEP, devices=2, num_nodes=3, strategy="ddp")
    assert "make 6 processes, but SLURM has started 4 (SLURM_NTASKS=4): make the two agree" in text


def test_the_tasks_per_node_of_the_job_do_not_count_in_a_step_that_has_others() -> None:
    """`srun --ntasks-per-node=1` in a job of two a node leaves SLURM_NTASKS_PER_NODE at 2."""
    step = {**STEP, "SLURM_NTASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1"}
    made = plan(step)
    assert (len(made.devices), made.num_nodes) == (1, 2)


def test_nodes_with_different_numbers_of_tasks_are_refused() -> None:
    text = refused({**STEP, "SLURM_NTASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1"})
    assert text.startswith("SLURM_STEP_TASKS_PER_NODE=2,1: expected as many tasks on every node")
    assert "--ntasks-per-node" in text


@pytest.mark.parametrize(
    ("environ", "variable", "said"),
    [
        (STEP, "SLURM_NTASKS", "expects a number in SLURM_NTASKS, received SLURM_NTASKS='many'"),
        (STEP, "SLURM_STEP_TASKS_PER_NODE", "received SLURM_STEP_TASKS_PER_NODE='many'"),
        (MPIRUN, "OMPI_COMM_WORLD_SIZE", "received OMPI_COMM_WORLD_SIZE='many'"),
        (JSRUN, "JSM_NAMESPACE_SIZE", "received JSM_NAMESPACE_SIZE='many'"),
        (POD, "WORLD_SIZE", "received WORLD_SIZE='many'"),
    ],
)
def test_a_variable_that_is_no_number_is_named(
    environ: Mapping[str, str], variable: str, said: str
) -> None:
    assert said in refused({**environ, variable: "many"})


def test_an_environment_that_was_made_by_hand_names_the_variable_too(set_environ: Any) -> None:
    with pytest.raises(ConfigurationError, match="variable SLURM_NTASKS, received nothing: it is"):
        SLURMEnvironment().world_size()
    set_environ({"SLURM_PROCID": "first"})
    with pytest.raises(ConfigurationError, match="SLURM_PROCID, received 'first'"):
        SLURMEnvironment().global_rank()


def test_tasks_of_jsrun_that_do_not_divide_evenly_are_refused() -> None:
    text = refused({**JSRUN, "JSM_NAMESPACE_SIZE": "3"})
    assert "'LSF' expects as many tasks on each of the hosts a1, a2" in text
    assert "received JSM_NAMESPACE_SIZE='3' and JSM_NAMESPACE_LOCAL_SIZE=None" in text


# -- SLURM


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[1-2,5]", "node1"),
        ("node[005-012]", "node005"),
        ("rack[7,9]-node[03-04]-x,login", "rack7-node03-x"),
        ("a.cluster.example,b", "a.cluster.example"),
        ("alpha beta", "alpha"),
    ],
)
def test_the_first_host_of_a_list_in_the_form_of_slurm(hosts: str, first: str) -> None:
    assert slurm.first_host(hosts) == first


@pytest.mark.parametrize("hosts", ["", "[", "node[1-2", "node[]"])
def test_bad_slurm_nodelist_is_shown(hosts: str) -> None:
    with pytest.raises(ConfigurationError, match="a list of hosts such as") as caught:
        slurm.first_host(hosts)
    assert f"SLURM_STEP_NODELIST, received {hosts!r}" in str(caught.value)


def test_rank_0_is_on_the_first_node_of_the_step_not_of_the_job(set_environ: Any) -> None:
    set_environ({"SLURM_NODELIST": "old[7-9]"})
    assert SLURMEnvironment().main_address == "old7"
    set_environ({**STEP, "SLURM_STEP_NODELIST": "node[2-3]"})
    assert SLURMEnvironment().main_address == "node2"
    set_environ({"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "4711"})
    assert (SLURMEnvironment().main_address, SLURMEnvironment().main_port) == ("10.0.0.7", 4711)


def test_a_run_keeps_its_id_when_the_job_is_queued_again(set_environ: Any) -> None:
    set_environ(STEP)
    first = SLURMEnvironment()
    assert (first.run_id(), first.restart_count(), first.agent_id()) == ("31.0", 0, None)
    set_environ({"SLURM_RESTART_COUNT": "1"})
    assert (SLURMEnvironment().run_id(), SLURMEnvironment().restart_count()) == ("31.0", 1)
    set_environ({"SLURM_ARRAY_JOB_ID": "30", "SLURM_ARRAY_TASK_ID": "7"})
    assert SLURMEnvironment().run_id() == "30_7.0"


def test_slurm_asks_for_a_save_by_a_signal_that_can_be_chosen() -> None:
    assert SLURMEnvironment().preemption_signals == (signal.SIGUSR1,)
    chosen = SLURMEnvironment(requeue_signal=signal.SIGUSR2)
    assert chosen.preemption_signals == (signal.SIGUSR2,)
    assert SLURMEnvironment(auto_requeue=False).preemption_signals == ()


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    """A program `scontrol` that writes its arguments to the file that is returned."""

    def make(exit_code: int) -> Path:
        arguments = tmp_path / "arguments"
        program = tmp_path / "scontrol"
        program.write_text(
            f'#!/bin/sh\nprintf "%s|" "$@" > {arguments}\necho "$SHOWN"\nexit {exit_code}\n'
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        return arguments

    return make


@pytest.mark.parametrize("exit_code", [0, 1])
def test_a_job_is_queued_again_by_scontrol(
    exit_code: int, scontrol: Callable[[int], Path], set_environ: Any
) -> None:
    arguments = scontrol(exit_code)
    set_environ(STEP)
    assert SLURMEnvironment().requeue() is (exit_code == 0)
    assert arguments.read_text() == "requeue|31|"
    set_environ({"SLURM_ARRAY_JOB_ID": "30", "SLURM_ARRAY_TASK_ID": "7"})
    SLURMEnvironment().requeue()
    assert arguments.read_text() == "requeue|30_7|"


@pytest.mark.parametrize(
    ("shown", "requeues"), [("PreemptTime=None", False), ("PreemptTime=2026-11-21T10:36:13", True)]
)
def test_sigterm_requeues_a_preempted_slurm_job_only(
    shown: str, requeues: bool, scontrol: Callable[[int], Path], set_environ: Any
) -> None:
    arguments = scontrol(0)
    set_environ({**STEP, "SHOWN": f"JobState=RUNNING PreemptEligibleTime=2026-11-21 {shown}"})
    assert SLURMEnvironment().requeues_upon(signal.SIGTERM) is requeues
    assert arguments.read_text() == "show|job|31|"
    assert SLURMEnvironment(auto_requeue=False).requeues_upon(signal.SIGTERM) is False
    assert SLURMEnvironment().requeues_upon(signal.SIGUSR1) is True
    assert PlainEnvironment().requeues_upon(signal.SIGTERM) is False


def test_a_job_that_cannot_be_queued_again_says_why(
    set_environ: Any, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert SLURMEnvironment().requeue() is False  # there is no job
    set_environ({**STEP, "PATH": str(tmp_path)})
    assert SLURMEnvironment().requeue() is False
    assert "stratagem: scontrol requeue 31: [Errno 2]" in capfd.readouterr().err


# -- how ranks find rank 0

# Seconds for what takes half a second on an idle machine.
AT_ONCE = 4.0
ONE_NODE = {**STEP, "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_STEP_NODELIST": "a"}
NAME = f".stratagem-{sha256(b'slurm  31.0 0').hexdigest()[:32]}.port"


class _Rank(SLURMEnvironment):
    """One rank among several in this process, whose variables are those of one."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def global_rank(self) -> int:
        return self.rank


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This user's home, which contains the only folder for rank 0's port."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(rendezvous, "STARTED_IN", None)
    return tmp_path


@pytest.fixture
def file(home: Path, set_environ: Any) -> Path:
    """The file of a step on one node."""
    set_environ(ONE_NODE)
    return home / ".cache/stratagem" / NAME


@pytest.fixture
def rank_0() -> Iterator[_Rank]:
    environment = _Rank(0)
    yield environment
    environment.teardown()


def leave(file: Path, port: int) -> None:
    """Leave the file of a run that was killed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch(0o600)
    file.write_text(f"{port} {'0' * 32}")


def in_threads(count: int) -> tuple[list[threading.Thread], list[int]]:
    """Start ranks that wait for rank 0; return them, and the ports that they find."""
    ports: list[int] = []
    threads = [
        threading.Thread(target=lambda rank=rank: ports.append(_Rank(rank).main_port), daemon=True)
        for rank in range(1, count + 1)
    ]
    for thread in threads:
        thread.start()
    return threads, ports


def found_by_a_rank() -> int:
    began = time.monotonic()
    port = _Rank(1).main_port
    assert time.monotonic() - began < AT_ONCE
    return port


def assert_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_RANK_0_TIMEOUT", 1.0)
    with pytest.raises(ConfigurationError, match="rank 0 did not write its port"):
        _ = _Rank(1).main_port


def test_ranks_of_one_node_find_rank_0_by_a_file_that_is_gone_at_the_end(
    file: Path, home: Path, rank_0: _Rank
) -> None:
    leave(file, 4711)
    threads, ports = in_threads(2)  # two ranks look for rank 0 before it is there
    port, began = rank_0.main_port, time.monotonic()
    for thread in threads:
        thread.join(10)
    assert time.monotonic() - began < AT_ONCE
    assert ports == [port, port]
    # A rank may ask as often as it likes.
    assert [found_by_a_rank() for _ in range(2)] == [port] * 2
    assert file.stat().st_mode & 0o777 == 0o600
    rank_0.teardown()
    assert [path for path in home.rglob("*") if path.is_file()] == []


def test_foreign_process_on_the_port_of_a_killed_run_is_ignored(
    file: Path, rank_0: _Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as squatter:
        leave(file, squatter.getsockname()[1])
        with monkeypatch.context() as patch:
            assert_not_found(patch)
        assert rank_0.main_port != squatter.getsockname()[1]
        assert found_by_a_rank() == rank_0.main_port
        squatter.setblocking(False)
        with pytest.raises(BlockingIOError):  # nobody has connected to it
            squatter.accept()


def test_rank_0_listens_before_it_writes_its_port(file: Path, rank_0: _Rank) -> None:
    """Rank 0 listens on it before it writes it."""
    threads, ports = in_threads(1)
    port = rank_0.main_port
    threads[0].join(10)
    with pytest.raises(OSError, match="in use"), socket.create_server(("127.0.0.1", ports[0])):
        pass
    assert ports == [port]


@pytest.mark.parametrize("strangers", [5, 300])
def test_connections_that_are_slow_on_purpose_hold_up_no_rank(
    strangers: int, file: Path, rank_0: _Rank
) -> None:
    port = rank_0.main_port
    with contextlib.ExitStack() as held:
        for _ in range(strangers):
            slow = socket.create_connection(("127.0.0.1", port), timeout=5)
            held.enter_context(slow)
            slow.sendall(b"s")
        assert found_by_a_rank() == port


def test_rank_0_opens_no_socket_but_the_one_that_the_store_takes(file: Path, rank_0: _Rank) -> None:
    """No stranger can ask for the port, or keep rank 0 from answering a rank."""

    def sockets() -> set[str]:
        links = []
        for link in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # the one of this listing
                links.append(str(link.readlink()))
        return {link for link in links if link.startswith("socket:")}

    before = sockets()
    assert rank_0.main_port == found_by_a_rank()
    listen_fd = rank_0.take_listener()
    assert listen_fd is not None
    assert sockets() - before == {str(Path(f"/proc/self/fd/{listen_fd}").readlink())}
    os.close(listen_fd)


def test_after_its_teardown_rank_0_is_not_found(
    file: Path, rank_0: _Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_STEP_ID", "1")
    other = _Rank(0)
    assert other.main_port == found_by_a_rank()
    other.teardown()
    with monkeypatch.context() as patch:
        assert_not_found(patch)
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert rank_0.main_port == found_by_a_rank()


def test_the_file_is_rewritten_ever_less_often(
    file: Path, rank_0: _Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After ten seconds a late rank waits half a second; after an hour, a minute at most."""
    waits: list[float] = []
    clock = [0.0]

    class Closed(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            clock[0] += timeout or 0.0
            return clock[0] > 24 * 3600

    announcement = rendezvous._Announcement([file], 4711, None, only_first=True)
    announcement.close()
    monkeypatch.setattr(announcement, "_closed", Closed())
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    announcement._rewrite()
    assert waits[0] == 0.2
    assert max(waits) == 60
    assert len(waits) < 2000
    file.unlink()


def test_ranks_of_several_nodes_find_the_file_in_the_folder_where_the_job_was_started(
    home: Path, monkeypatch: pytest.MonkeyPatch, set_environ: Any, rank_0: _Rank
) -> None:
    set_environ({**STEP, "MASTER_ADDR": "127.0.0.1"})
    (home / "job").mkdir()
    monkeypatch.setattr(rendezvous, "STARTED_IN", str(home / "job"))
    port = rank_0.main_port
    assert len(list(home.rglob(NAME))) == 2
    monkeypatch.setenv("HOME", str(home / "of another node"))
    assert found_by_a_rank() == port
    with monkeypatch.context() as patch:
        patch.setenv("SLURM_STEP_ID", "1")
        assert_not_found(patch)
    rank_0.teardown()
    assert list(home.rglob("*.port")) == []


def made_readable(file: Path) -> None:
    file.chmod(0o640)


def made_anothers(file: Path) -> None:
    if os.geteuid() == 0:
        os.chown(file, 65534, -1)
    else:
        file.unlink()


def made_a_link(file: Path) -> None:
    file.rename(file.with_name("kept"))
    file.symlink_to(file.with_name("kept"))


def linked(file: Path) -> None:
    os.link(file, file.with_name("kept"))


def made_a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize("spoil", [made_readable, made_anothers, made_a_link, linked, made_a_pipe])
def test_a_file_that_others_may_read_or_have_made_is_not_believed(
    spoil: Callable[[Path], None], file: Path
) -> None:
    leave(file, 4711)
    assert rendezvous._read(file) is not None
    spoil(file)
    assert rendezvous._read(file) is None


def test_files_of_runs_that_were_killed_go_after_a_day(file: Path, rank_0: _Rank) -> None:
    yesterday, today = file.with_name(".stratagem-1.port"), file.with_name(".stratagem-2.port")
    for path in (yesterday, today):
        leave(path, 4711)
    os.utime(yesterday, (time.time() - 25 * 3600,) * 2)
    assert rank_0.main_port
    assert not yesterday.exists()
    assert today.exists()


def test_rank_0_names_the_folders_without_write_access(
    file: Path, home: Path, rank_0: _Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(home / "missing/tmp"))
    home.joinpath(".cache").touch()
    home.joinpath("missing").touch()
    with pytest.raises(ConfigurationError) as caught:
        _ = rank_0.main_port
    text = str(caught.value)
    assert f"({home}/.cache/stratagem: Not a directory; {home}/missing/tmp: " in text
    assert "set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there" in text

    rank_0.teardown()
    descriptor = os.open
    home.joinpath(".cache").unlink()
    monkeypatch.setattr(os, "open", lambda path, flags, mode=0: descriptor(path, flags, 0o644))
    with pytest.raises(ConfigurationError, match="does not protect a file from other users"):
        _ = rank_0.main_port
    assert list(home.rglob("*.port")) == []


def test_rendezvous_timeout_names_the_shared_folder(
    home: Path, set_environ: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_RANK_0_TIMEOUT", 0.3)
    set_environ({**STEP, "MASTER_ADDR": "127.0.0.1"})
    with pytest.raises(ConfigurationError) as caught:
        _ = SLURMEnvironment().main_port
    text = str(caught.value)
    assert (
        f"rank 0 did not write its port into a file in {home}/.cache/stratagem within 0 s" in text
    )
    assert "if the nodes share no such folder, set MASTER_ADDR to the host of rank 0" in text
    assert "and MASTER_PORT to a free port there, on every rank" in text


def test_the_announced_port_is_handed_to_the_store_as_a_socket(set_environ: Any) -> None:
    alone = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    set_environ({**STEP, **alone})
    environment = SLURMEnvironment()
    port = environment.main_port
    listen_fd = environment.take_listener()
    assert listen_fd is not None
    with socket.socket(fileno=listen_fd) as listener:
        assert listener.getsockname()[1] == port == environment.main_port
    assert environment.take_listener() is None


# -- MPI, LSF, Kubeflow


def test_mpirun_on_one_node_needs_no_mpi4py(
    set_environ: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    set_environ({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    assert MPIEnvironment().main_address == "127.0.0.1"


def test_mpirun_on_several_nodes_without_mpi4py_names_the_package(
    set_environ: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    set_environ(MPIRUN)
    with pytest.raises(ConfigurationError) as caught:
        _ = MPIEnvironment().main_address
    assert "mpirun has started 4 processes on several nodes" in str(caught.value)
    assert "pip install mpi4py), or set MASTER_ADDR to the host of rank 0" in str(caught.value)
    set_environ({"MASTER_ADDR": "first"})
    assert MPIEnvironment().main_address == "first"


def test_jsrun_has_rank_0_on_the_first_host_after_the_batch_host(
    set_environ: Any, tmp_path: Path
) -> None:
    set_environ(JSRUN)
    assert LSFEnvironment().main_address == "a1"
    hosts = tmp_path / "hosts"
    hosts.write_text("batch5\nb3\nb3\nb4\nb4\n")
    set_environ({"LSB_DJOB_RANKFILE": str(hosts)})
    assert LSFEnvironment().main_address == "b3"
    set_environ({"MASTER_ADDR": "c1"})
    assert LSFEnvironment().main_address == "c1"


def test_lsf_job_without_hosts_names_master_addr(set_environ: Any) -> None:
    set_environ({**JSRUN, "LSB_HOSTS": ""})
    with pytest.raises(ConfigurationError, match="set MASTER_ADDR to the host of rank 0"):
        _ = LSFEnvironment().main_address


def test_a_pod_has_the_address_that_the_operator_sets(set_environ: Any) -> None:
    set_environ(POD)
    environment = KubeflowEnvironment()
    assert (environment.main_address, environment.main_port) == ("job-master-0", 23456)


# -- torchrun


def test_torchrun_tells_restarts_and_its_agent(set_environ: Any) -> None:
    assert (PlainEnvironment().run_id(), PlainEnvironment().agent_id()) == (None, None)
    set_environ({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "2"})
    environment = TorchElasticEnvironment()
    assert (environment.run_id(), environment.restart_count()) == ("none", 2)
    agents = set()
    for attempt in ("attempt_0/0", "attempt_1/3"):
        folder = "/tmp/torchelastic_9tm/none_w1"
        set_environ({"TORCHELASTIC_ERROR_FILE": f"{folder}/{attempt}/error.json"})
        agents.add(environment.agent_id())
    assert agents == {f"{socket.gethostname()}:/tmp/torchelastic_9tm/none_w1"}


@pytest.mark.parametrize(
    ("rank", "restarts", "shares", "warned"),
    [("0", "3", "True", 1), ("1", "3", "True", 0), ("0", "0", "True", 0), ("0", "3", "False", 0)],
)
def test_restarts_that_are_not_reliable_are_warned_of_once(
    rank: str, restarts: str, shares: str, warned: int, set_environ: Any
) -> None:
    set_environ({**TORCHRUN, "RANK": rank, "TORCHELASTIC_MAX_RESTARTS": restarts})
    set_environ({"TORCHELASTIC_USE_AGENT_STORE": shares})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        TorchElasticEnvironment()
    assert len(caught) == warned
    for warning in caught:
        assert "Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun" in str(warning.message)
        assert "`stratagem run --max-restarts`" in str(warning.message)


# -- the network


def test_loopback_is_never_chosen_for_several_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_ELSEWHERE", ("127.0.0.1",))
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert network.choose_gloo_interface("localhost") is None
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_calls_of_two_threads_to_a_store_are_answered_one_after_the_other() -> None:
    slow = torch.distributed.HashStore()  # type: ignore[attr-defined]
    store = BoundedStore(slow, seconds=10)
    other = threading.Thread(target=store.get, args=("later",))
    other.start()
    while not store._waiting.locked():
        time.sleep(0.001)
    threading.Timer(0.2, slow.set, ("later", "1")).start()
    assert not store.check(["missing"])
    other.join()
    store.close()


def test_a_store_that_cannot_be_reached_does_not_hold_a_rank_that_wants_to_fail() -> None:
    silent = torch.distributed.HashStore()  # type: ignore[attr-defined]
    silent.set_timeout(timedelta(seconds=0.5))
    store = BoundedStore(silent, seconds=0.1)
    store.set("here", "1")
    assert store.check(["here"])
    with pytest.raises(RuntimeError, match="has not answered within"):
        store.get("missing")
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="has not answered an earlier call yet"):
        store.get("here")
    assert time.monotonic() - began < 0.1
    store.close()
    for thread in threading.enumerate():
        if thread.name == "stratagem-store":
            thread.join(10)
