"""Two hosts on one machine, and real SLURM over them; run by `nox -s cluster`.

The hosts are network namespaces on a bridge, each with its own host name and /etc/hosts. What a
test starts on them is ended with them. This needs root.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

TRAIN = Path(__file__).with_name("train.py")
NETWORK = "10.78.0"
BRIDGE = "sgbridge"
CONTROLLER = f"{NETWORK}.254"

# The paths of a test are shared by both hosts, as those of a cluster's file system are.
SLURM_CONF = """
ClusterName=stratagem
SlurmctldHost={host}({controller})
SlurmctldPort=16827
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
# A requeued job waits for its credential to expire, by default two minutes.
AuthInfo=cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
ReturnToService=2
JobRequeue=1
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,sched_min_interval=10000
KillWait=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=node1 NodeAddr={network}.1 Port=17010 CPUs=8 State=UNKNOWN
NodeName=node2 NodeAddr={network}.2 Port=17010 CPUs=8 State=UNKNOWN
PartitionName=main Nodes=node[1-2] Default=YES MaxTime=INFINITE State=UP PriorityTier=10 {grace}
PartitionName=high Nodes=node[1-2] MaxTime=INFINITE State=UP PriorityTier=100 PreemptMode=OFF
"""


def run(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert not check or done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def clean_environment() -> dict[str, str]:
    """This process's variables without those of a rank, with one thread a process."""
    ours = ("STRATAGEM_", "TORCHELASTIC_", "SLURM_", "OMPI_", "MASTER_", "GLOO_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    return {**environment, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class Started:
    """A program that runs, in a session of its own, and what it prints."""

    def __init__(self, command: Sequence[str], output: Path, env: Mapping[str, str] | None) -> None:
        self.output = output
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                env={**clean_environment(), **(env or {})},
                cwd=output.parent,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait(self, timeout: float = 180, *, expect: int | None = 0) -> str:
        """Wait for its end, and return what it has printed."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end in {timeout} s; it printed\n{self.text()}") from None
        assert expect is None or code == expect, f"exit code {code}; it printed\n{self.text()}"
        return self.text()

    def wait_for(self, text: str, timeout: float = 120) -> None:
        """Wait until it has printed a text."""
        wait_until(lambda: text in self.text(), timeout, lambda: f"no {text!r} in\n{self.text()}")

    def children(self) -> list[int]:
        """Return the process ids of what it has started, and of what those have, in that order."""
        found = [self.process.pid]
        for process in found:
            for file in Path(f"/proc/{process}/task").glob("*/children"):
                found += map(int, file.read_text().split())
        return found[1:]

    def kill(self) -> None:
        """Kill it and what it has started; torchrun's ranks are in sessions of their own."""
        for process in [self.process.pid, *self.children()]:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has ended
        self.process.wait(30)


def wait_until(
    condition: Callable[[], bool], timeout: float, problem: Callable[[], str] = str
) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout} s in vain: {problem()}"
        time.sleep(0.2)


class Hosts:
    """node1 and node2, with the addresses 10.78.0.1 and .2."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts_file(lambda number: {CONTROLLER: "controller", **self.addresses})
        self.close()
        run("ip", "link", "add", BRIDGE, "type", "bridge")
        run("ip", "addr", "add", f"{CONTROLLER}/24", "dev", BRIDGE)
        run("ip", "link", "set", BRIDGE, "up")
        for number in (1, 2):
            space, outer = f"sgnode{number}", f"sgveth{number}"
            run("ip", "netns", "add", space)
            run(*f"ip link add {outer} type veth peer name eth0 netns {space}".split())
            run("ip", "link", "set", outer, "master", BRIDGE, "up")
            run("ip", "-n", space, "link", "set", "lo", "up")
            run("ip", "-n", space, "addr", "add", f"{NETWORK}.{number}/24", "dev", "eth0")
            run("ip", "-n", space, "link", "set", "eth0", "up")

    addresses: Mapping[str, str] = {f"{NETWORK}.1": "node1", f"{NETWORK}.2": "node2"}

    def hosts_file(self, names: Callable[[int], Mapping[str, str]]) -> None:
        """Write each host's /etc/hosts, for what is started from now on."""
        for number in (1, 2):
            lines = {"127.0.0.1": "localhost", **names(number)}
            text = "".join(f"{address} {name}\n" for address, name in lines.items())
            (self.folder / f"hosts{number}").write_text(text)

    def command(self, number: int, *command: str) -> list[str]:
        """Return a command that runs another one on a host."""
        # Not `ip netns exec`, which hides /sys/fs/cgroup: slurmd then refuses to start.
        prepare = 'mount --bind "$0" /etc/hosts; hostname "$1"; shift; exec "$@"'
        return [
            *("nsenter", f"--net=/run/netns/sgnode{number}", "unshare", "--uts", "--mount"),
            *("bash", "-c", prepare, str(self.folder / f"hosts{number}"), f"node{number}"),
            *command,
        ]

    def add_interface(self, number: int, address: str) -> None:
        """Give a host another interface, which leads nowhere."""
        space = f"sgnode{number}"
        run("ip", "-n", space, *["link", "add", "eth1", "type", "veth", "peer", "name", "eth1peer"])
        run("ip", "-n", space, "addr", "add", address, "dev", "eth1")
        run("ip", "-n", space, "link", "set", "eth1", "up")

    def link(self, number: int, *, up: bool) -> None:
        """Connect a host's cable, or pull it."""
        run("ip", "link", "set", f"sgveth{number}", "up" if up else "down")

    def slow_down(self, rate: str) -> None:
        """Limit what goes to each host."""
        for number in (1, 2):
            limit = f"root tbf rate {rate} burst 32kbit latency 400ms"
            run(*f"tc qdisc add dev sgveth{number} {limit}".split())
            run(*f"ip netns exec sgnode{number} tc qdisc add dev eth0 {limit}".split())

    def close(self) -> None:
        """End what runs on the hosts, and remove them; also those that an earlier run has left."""
        for number in (1, 2):
            space = f"sgnode{number}"
            for process in run("ip", "netns", "pids", space, check=False).split():
                run("kill", "-9", process, check=False)
            run("ip", "netns", "del", space, check=False)
            run("ip", "link", "del", f"sgveth{number}", check=False)
        run("ip", "link", "del", BRIDGE, check=False)


class Slurm:
    """SLURM's daemons: the controller on this machine, a slurmd on each host."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.folder = folder
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        for name in ("state", "spool.node1", "spool.node2"):
            (folder / name).mkdir()
        self._configure(grace="GraceTime=20")
        self._daemons("slurmctld")
        for number in (1, 2):
            self._daemons(*hosts.command(number, "slurmd"))
        wait_until(
            lambda: self.ask("sinfo -h -t idle -o %D -p main").strip() == "2", 60, self._logs
        )

    def _configure(self, *, grace: str) -> None:
        text = SLURM_CONF.format(
            host=socket.gethostname().partition(".")[0],
            controller=CONTROLLER,
            folder=self.folder,
            network=NETWORK,
            grace=grace,
        )
        (self.folder / "slurm.conf").write_text(text)

    def _daemons(self, *command: str) -> None:
        # Their output must not go to a pipe that someone waits for the end of.
        subprocess.run(
            command,
            env={**clean_environment(), **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
            timeout=60,
        )

    def _logs(self) -> str:
        logs = sorted(self.folder.glob("slurm*.log"))
        return "\n".join(f"{log.name}:\n{log.read_text()[-2000:]}" for log in logs)

    def ask(self, command: str) -> str:
        done = subprocess.run(
            command.split(),
            env={**clean_environment(), **self.environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        return done.stdout + done.stderr

    def submit(self, folder: Path, script: str, *options: str) -> Job:
        """Submit a batch script, whose output goes to a file in the folder."""
        path, output = folder / "job.sh", folder / "job.out"
        path.write_text(f"#!/bin/bash\n{script}\n")
        done = subprocess.run(
            ["sbatch", "--parsable", f"--output={output}", "--open-mode=append", *options, path],
            env={**clean_environment(), **self.environment},
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return Job(self, done.stdout.strip(), output)

    def close(self) -> None:
        """End the jobs, then the daemons by the process ids that they have written."""
        self.ask("scancel --full --me")
        wait_until(lambda: not self.ask("squeue -h").strip(), 30)
        for file in [*self.folder.glob("slurmd.*.pid"), self.folder / "slurmctld.pid"]:
            if file.exists():
                os.kill(int(file.read_text()), signal.SIGTERM)


class Job:
    """A job of SLURM."""

    def __init__(self, slurm: Slurm, number: str, output: Path) -> None:
        self.slurm = slurm
        self.number = number
        self.output = output

    def text(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def signal(self, name: str) -> None:
        """Send a signal to the tasks of its steps, as `sbatch --signal` does."""
        self.slurm.ask(f"scancel --signal={name} {self.number}")

    def wait_for(self, text: str, timeout: float = 120) -> None:
        wait_until(lambda: text in self.text(), timeout, lambda: f"no {text!r} in\n{self.text()}")

    def wait(self, timeout: float = 180) -> str:
        """Wait until it is no longer queued; return what it has printed."""
        listed = f"squeue -h -j {self.number} -o %T"
        wait_until(
            lambda: self.slurm.ask(listed).strip() in ("", "COMPLETED", "FAILED", "CANCELLED"),
            timeout,
            lambda: f"{self.slurm.ask(listed)}\n{self.text()}",
        )
        return self.text()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Bring up no cluster for somebody who has just typed `pytest`."""
    if "cluster" not in config.getoption("markexpr"):
        for item in items:
            if item.path.parent == Path(__file__).parent:
                item.add_marker(pytest.mark.skip("run by `nox -s cluster`, or with -m cluster"))


def need(*programs: str, packages: str) -> None:
    """Fail if programs are missing; skip where they could not be installed."""
    missing = ", ".join(name for name in programs if not shutil.which(name))
    if missing:
        give_up = pytest.fail if os.geteuid() == 0 else pytest.skip
        give_up(f"not installed: {missing} (Debian: {packages})")


@pytest.fixture(scope="session")
def mpirun() -> tuple[str, ...]:
    """The beginning of a command line of Open MPI."""
    need("mpirun", packages="openmpi-bin")
    return ("mpirun", "--allow-run-as-root", "--oversubscribe")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Two hosts, new for each test."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    need("ip", "tc", "nsenter", "unshare", packages="iproute2 util-linux")
    made = Hosts(tmp_path)
    yield made
    made.close()


@pytest.fixture
def slurm(hosts: Hosts, tmp_path: Path) -> Iterator[Slurm]:
    """SLURM over the two hosts."""
    need("slurmctld", "slurmd", "sbatch", packages="slurmctld slurmd slurm-client")
    folder = tmp_path / "slurm"
    folder.mkdir()
    made = Slurm(hosts, folder)
    yield made
    made.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """Start a program whose output goes to a file; ended after the test."""
    started: list[Started] = []

    def begin(*command: str, env: Mapping[str, str] | None = None) -> Started:
        program = Started(command, tmp_path / f"output{len(started)}.txt", env)
        started.append(program)
        return program

    yield begin
    for program in started:
        program.kill()


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., list[str]]:
    """Return the command line of train.py with options; its ranks write into tmp_path."""

    def command(name: str = "run", **options: Any) -> list[str]:
        given = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
        return [sys.executable, str(TRAIN), f"--out={tmp_path / name}", *given]

    return command


@pytest.fixture
def results(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Return what each rank of train.py has written, by rank."""

    def read(name: str = "run") -> list[dict[str, Any]]:
        files = sorted((tmp_path / name).glob("rank*.json"))
        return [json.loads(file.read_text()) for file in files]

    return read


@pytest.fixture
def reference(train: Any, results: Any) -> Callable[..., list[float]]:
    """Return the weights that so many ranks on this machine alone end with."""

    def weights(ranks: int, **options: Any) -> list[float]:
        command = train("reference", devices=ranks, **options)
        subprocess.run(command, env=clean_environment(), check=True, timeout=180)
        trained: list[float] = results("reference")[0]["weights"]
        return trained

    return weights
