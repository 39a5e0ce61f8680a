"""SLURMEnvironment: processes started by srun, in a job that may be queued again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping

from stratagem.errors import ConfigurationError
from stratagem.system import PREEMPTION
from stratagem_torch.environments.rendezvous import AnnouncedPortEnvironment

_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def incompatible_because(environ: Mapping[str, str]) -> str:
    """Return why a process in a step is no rank: it runs in the shell of `srun --pty`.

    The variables of such a shell cannot be told from those of a rank. Steps that are started from
    it inherit SLURM_PTY_PORT, but not its terminal.
    """
    if "SLURM_PTY_PORT" not in environ:
        return ""
    if environ.get("SLURM_NTASKS") == "1" or sys.stdin is None or sys.stdin.isatty():
        return (
            "SLURM_PTY_PORT is set: this is an interactive shell of `srun --pty`, not a rank; to "
            "start ranks from it, use `srun --overlap`"
        )
    return ""


def local_world_size(environ: Mapping[str, str]) -> int:
    """Return the number of tasks of this step on each node.

    SLURM_NTASKS_PER_NODE is not used: it describes the job, not the step.

    Raises:
        ConfigurationError: the nodes have different numbers of tasks, or the text does not have the
            form of SLURM.

    Example:
        >>> local_world_size({"SLURM_STEP_TASKS_PER_NODE": "2(x3)"})
        2
    """
    text = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_NTASKS", ""))
    counts = set()
    for part in text.split(","):
        matched = _TASKS.fullmatch(part.strip())
        if matched is None:
            raise ConfigurationError(
                "the cluster environment 'SLURM' expects numbers of tasks such as '2(x3)', "
                f"received SLURM_STEP_TASKS_PER_NODE={text!r}"
            )
        counts.add(int(matched[1]))
    if len(counts) > 1:
        raise ConfigurationError(
            f"SLURM_STEP_TASKS_PER_NODE={text}: expected as many tasks on every node: give srun "
            "--ntasks-per-node in place of --ntasks"
        )
    return counts.pop()


def first_host(hosts: str) -> str:
    """Return the first host of a list in SLURM's form.

    Raises:
        ConfigurationError: the list does not have that form.

    Example:
        >>> first_host("rack[07-09,12]-node[3,5],login1")
        'rack07-node3'
    """
    first = re.match(r"((?:[^,\s\[\]]|\[\w[^\]]*\])+)(?:[,\s]|$)", hosts.strip())
    if first is None:
        raise ConfigurationError(
            f"expected a list of hosts such as 'node[1-2]' in SLURM_STEP_NODELIST, received "
            f"{hosts!r}"
        )
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[1])


class SLURMEnvironment(AnnouncedPortEnvironment):
    """Ranks from the variables that srun sets for each task of a step.

    Start one task for each device: `srun --ntasks-per-node=4 python train.py`. Several steps may
    run in one allocation at the same time: each step finds its own rank 0 and chooses its own port.
    MASTER_ADDR and MASTER_PORT take precedence.

    With `#SBATCH --requeue --signal=USR1@90` a job gets SIGUSR1 90 s before its time limit. The run
    is then saved and requeued, and resumes at the same step when the job restarts. Preemption by
    another job has the same effect, within the GraceTime of the partition.

    Args:
        auto_requeue: save and requeue the job upon the signal.
        requeue_signal: the signal that announces the end of the job.

    Raises:
        ConfigurationError: a variable does not have the form that SLURM defines.

    Example:
        >>> import signal
        >>> from stratagem.environments import SLURMEnvironment
        >>> SLURMEnvironment(requeue_signal=signal.SIGUSR2).preemption_signals[0].name
        'SIGUSR2'
    """

    def __init__(
        self, *, auto_requeue: bool = True, requeue_signal: signal.Signals = PREEMPTION
    ) -> None:
        super().__init__()
        self.auto_requeue = auto_requeue
        self.requeue_signal = signal.Signals(requeue_signal)

    @property
    def creates_processes_externally(self) -> bool:
        """Whether srun has started this process as a rank."""
        return "SLURM_STEP_ID" in os.environ and not incompatible_because(os.environ)

    @property
    def main_address(self) -> str:
        """The first node of this step, where its task 0 runs; without a step, of the job."""
        given, of_job = os.environ.get("MASTER_ADDR"), os.environ.get("SLURM_NODELIST", "")
        return given or first_host(os.environ.get("SLURM_STEP_NODELIST", of_job))

    def _token(self) -> str:
        cluster = os.environ.get("SLURM_CLUSTER_NAME", "")
        step = f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
        return f"slurm {cluster} {step} {self.restart_count()}"

    def world_size(self) -> int:
        return self._number("SLURM_NTASKS")

    def local_world_size(self) -> int:
        return local_world_size(os.environ)

    def global_rank(self) -> int:
        return self._number("SLURM_PROCID")

    def local_rank(self) -> int:
        return self._number("SLURM_LOCALID")

    def node_rank(self) -> int:
        return self._number("SLURM_NODEID")

    def run_id(self) -> str | None:
        """Return the job, or the task of a job array, and the step."""
        job = self._job()
        return None if job is None else f"{job}.{os.environ.get('SLURM_STEP_ID', 'batch')}"

    def restart_count(self) -> int:
        """Return how many times the job was queued again."""
        return self._number("SLURM_RESTART_COUNT", 0)

    @property
    def preemption_signals(self) -> tuple[signal.Signals, ...]:
        return (self.requeue_signal,) if self.auto_requeue else ()

    def requeues_upon(self, number: signal.Signals) -> bool:
        """Whether a signal that ends the run means that the job is to be queued again.

        SIGTERM may be `scancel`, or a job of a higher priority: SLURM then requeues only a job that
        is still there when its grace time is over, and this one is not.
        """
        if number == signal.SIGTERM and self.auto_requeue:
            shown = self._scontrol("show", "job")
            return shown is not None and re.search(r"\bPreemptTime=\d", shown) is not None
        return super().requeues_upon(number)

    def requeue(self) -> bool:
        """Run `scontrol requeue`, which ends this job's tasks soon after; return whether it will.

        What it says goes to standard error.
        """
        return self._scontrol("requeue") is not None

    def _scontrol(self, *command: str) -> str | None:
        """Return what `scontrol` prints of this job, or None: it failed, and has said why."""
        job = self._job()
        if job is None:
            return None
        try:
            done = subprocess.run(
                ["scontrol", *command, job],  # noqa: S607 - wherever the site put it
                check=False,
                timeout=60,
                stdout=subprocess.PIPE,
                text=True,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            what = " ".join(command)
            print(f"stratagem: scontrol {what} {job}: {error}", file=sys.stderr, flush=True)
            return None
        return done.stdout if done.returncode == 0 else None

    @staticmethod
    def _job() -> str | None:
        if "SLURM_ARRAY_JOB_ID" in os.environ and "SLURM_ARRAY_TASK_ID" in os.environ:
            return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
        return os.environ.get("SLURM_JOB_ID")
