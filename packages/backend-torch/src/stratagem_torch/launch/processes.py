"""ProcessesLauncher: runs a function in new processes, by spawn or fork."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch

from stratagem import system
from stratagem.accelerators import Accelerator
from stratagem.errors import ConfigurationError
from stratagem.launch import (
    STORE_VARIABLE,
    Launcher,
    RunPlan,
    die_with_parent,
    forget_parent,
    pack_result,
    rank_environment,
    record_failure,
    run_as_rank,
    this_rank,
    unpack_result,
)
from stratagem_torch.launch import network, supervisor
from stratagem_torch.launch.packed import Call, become_rank, pack, run_call, run_packed
from stratagem_torch.launch.supervisor import Failure, Output, RankProcesses

Result = TypeVar("Result")

_NO_GUARD = 78
"""Exit code of a spawned rank whose script launches when it is imported (EX_CONFIG)."""
_NAME = "stratagem-rank"
_END_GRACE = 20.0
"""Seconds that ranks have to end by themselves after Ctrl-C or a signal."""


class ProcessesLauncher(Launcher):
    """Runs the function in new processes, one per rank; this process waits and is not a rank.

    The launcher returns the result of rank 0 if it consists of weights-only-safe data. Other
    objects do not come back: ranks change copies of them.

    Args:
        start_method: "spawn" starts new interpreters and pickles the function and its arguments for
            them. "fork" copies this process, also in a notebook, but only while this process uses
            no devices that a copy cannot use (see `Accelerator.fork_problem`).
    """

    def __init__(self, start_method: str) -> None:
        self.start_method = start_method

    def launch(
        self, plan: RunPlan, function: Callable[..., Result], *args: Any, **kwargs: Any
    ) -> Result:
        """Run the function on every rank of this node; return the result of its rank 0.

        Raises:
            ConfigurationError: an object, named in the message, cannot be pickled, or this process
                can no longer be forked.
            RankFailedError: a rank failed.
            SystemExit: a signal has ended the ranks, with 128 and its number.
        """
        if this_rank.is_launched:
            # This process is a rank already: of a launch that this call is a part of.
            return run_as_rank(function, *args, **kwargs)
        process = multiprocessing.current_process()
        if process.name.startswith(_NAME) and getattr(process, "_inheriting", False):
            # This rank imports the script, which launches again. The parent raises the error.
            os._exit(_NO_GUARD)
        with tempfile.TemporaryDirectory(prefix="stratagem-launch-") as folder:
            start: supervisor.StartRank
            if self.start_method == "spawn":
                start = _Spawn(Path(folder), pack(plan, function, args, kwargs, imports_main=True))
            else:
                _check_fork(plan)
                start = _Fork(Path(folder), Call.of(plan, function, args, kwargs))
            return self._run(plan, start, Path(folder))  # type: ignore[no-any-return]

    def _run(self, plan: RunPlan, start: supervisor.StartRank, folder: Path) -> Any:
        environments = _environments(plan)
        if plan.num_nodes == 1:
            store, port = network.make_store_file(folder), str(network.free_port())
            for environment in environments.values():
                environment["MASTER_PORT"] = port
                if store is not None:
                    environment[STORE_VARIABLE] = store
        failures: list[Failure] = []
        ranks = RankProcesses(
            start,
            environments,
            on_failure=failures.append,
            own_sessions=True,
            output=Output.of(os.environ),
        )
        with ranks, _forwarding_signals(ranks) as received:
            try:
                while not ranks.wait(0.2) and not received:
                    pass
            except KeyboardInterrupt:
                # In a notebook it reaches this process alone.
                ranks.forward_signal(signal.SIGINT)
                ranks.wait(_END_GRACE)
                raise
            if received:
                ranks.wait(_END_GRACE)
                ranks.end()
                raise SystemExit(128 + received[0])
        if ranks.failure is not None:
            if self.start_method == "spawn" and ranks.failure.exit_code == _NO_GUARD:
                raise ConfigurationError(
                    f"strategy={plan.strategy.name!r} starts new interpreters, each of which "
                    "imports the script, and the script trains when it is imported: put the code "
                    "that trains under `if __name__ == '__main__':`, or pass strategy='ddp', "
                    "which needs no such line"
                )
            number = ranks.failure.exit_code - 128
            if number in (*system.ENDING, *system.USER) and not ranks.failure.report:
                # A signal to one rank has ended all of them, in order.
                raise SystemExit(ranks.failure.exit_code)
            raise ranks.failure.error(plan.world_size)
        results = folder / "result"
        if not results.exists():
            return None  # rank 0 left early, in order, by sys.exit()
        return unpack_result(results.read_bytes())


class _Process:
    """A process of multiprocessing, with the methods of `subprocess.Popen`."""

    def __init__(self, process: Any) -> None:
        process.start()
        self.process = process
        self.pid: int = process.pid

    def poll(self) -> int | None:
        exit_code: int | None = self.process.exitcode
        return exit_code

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.process.name), timeout or 0.0)
        exit_code: int = self.process.exitcode
        return exit_code


class _Fork:
    """Starts a rank as a copy of this process."""

    def __init__(self, folder: Path, call: Call) -> None:
        self._folder, self._call = folder, call
        self._threads_are_gone = _has_compute_threads()
        if self._threads_are_gone:
            warnings.warn(
                "this process has computed with several threads, which a fork does not copy: each "
                "rank computes with one thread. Fork before computing, or use strategy='ddp' in a "
                "script, for more",
                stacklevel=2,
            )

    def __call__(
        self, number: int, environment: Mapping[str, str], output: Path | None
    ) -> supervisor.RankProcess:
        arguments = (dict(environment), output, self._folder, self._call, self._threads_are_gone)
        context: Any = multiprocessing.get_context("fork")
        return _Process(
            context.Process(target=_forked_rank, args=arguments, name=f"{_NAME}{number}")
        )


class _Spawn:
    """Starts a rank as a new interpreter, which reads the call from a file of this user alone.

    Pickled once, by pickle itself: multiprocessing's own would share the tensors' memory, so that
    the ranks would overwrite one another's parameters.
    """

    def __init__(self, folder: Path, data: bytes) -> None:
        self._folder = folder
        (folder / "call").write_bytes(data)

    def __call__(
        self, number: int, environment: Mapping[str, str], output: Path | None
    ) -> supervisor.RankProcess:
        arguments = (dict(environment), output, self._folder)
        return _Process(
            multiprocessing.get_context("spawn").Process(
                target=_spawned_rank, args=arguments, name=f"{_NAME}{number}"
            )
        )


def _spawned_rank(environment: dict[str, str], output: Path | None, folder: Path) -> None:
    _become_child(environment, output)
    _report(folder, partial(run_packed, (folder / "call").read_bytes(), environment))


def _forked_rank(
    environment: dict[str, str],
    output: Path | None,
    folder: Path,
    call: Call,
    threads_are_gone: bool,
) -> None:
    forget_parent()
    _become_child(environment, output)
    become_rank(environment)
    if threads_are_gone:
        # The parent's pool of threads was not copied, and whoever waits for it waits forever.
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    _report(folder, partial(run_call, call))


def _become_child(environment: Mapping[str, str], output: Path | None) -> None:
    """Lead a session, end with the parent, and write where it says."""
    system.lead_session()
    os.environ.update(environment)
    die_with_parent()
    if output is not None:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(line_buffering=True)
    for number in system.ENDING[:-1]:
        signal.signal(number, signal.SIG_DFL)


def _report(folder: Path, run: Callable[[], Any]) -> None:
    """Run, leave the result of local rank 0 for the parent, or the error, and exit."""
    try:
        result = run()
        if os.environ["LOCAL_RANK"] == "0":
            (folder / "result").write_bytes(pack_result(result))
    except KeyboardInterrupt:
        sys.exit(130)
    except SystemExit:
        raise
    except BaseException as error:
        # The parent prints the recorded error.
        record_failure(error)
        sys.exit(1)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _environments(plan: RunPlan) -> dict[int, dict[str, str]]:
    environ = plan.request.environ
    node_rank = int(environ.get("NODE_RANK", "0"))
    count = plan.processes_per_node
    several = plan.num_nodes > 1
    return {
        node_rank * count + local_rank: rank_environment(
            local_rank=local_rank,
            local_world_size=count,
            node_rank=node_rank,
            num_nodes=plan.num_nodes,
            main_address=environ["MASTER_ADDR"] if several else network.LOOPBACK,
            main_port=int(environ["MASTER_PORT"]) if several else 0,
        )
        for local_rank in range(count)
    }


@contextmanager
def _forwarding_signals(ranks: RankProcesses) -> Iterator[list[int]]:
    """Forward signals to the ranks: those that end this process, and SIGUSR1 and SIGUSR2."""
    received: list[int] = []
    ending = system.ENDING[:-1]

    def forward(number: int, frame: FrameType | None) -> None:
        ranks.forward_signal(signal.Signals(number))
        if number in ending:
            received.append(number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in (*ending, *system.USER):
            if signal.getsignal(number) == signal.SIG_DFL:
                before[number] = signal.signal(number, forward)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _check_fork(plan: RunPlan) -> None:
    if not hasattr(os, "fork"):
        raise ConfigurationError(
            f"strategy={plan.strategy.name!r} is started by the launcher 'fork', which copies this "
            "process, and this system cannot do so: use strategy='ddp' in a script, 'ddp_spawn', "
            "or in a notebook devices=1"
        )
    accelerator: Accelerator = plan.accelerator.build()
    problem = accelerator.fork_problem()
    if problem is not None:
        raise ConfigurationError(
            f"the launcher 'fork' copies this process, which {problem}; restart the notebook's "
            "kernel, or use strategy='ddp' in a script"
        )


def _has_compute_threads() -> bool:
    """Whether this process has threads that compute for torch, which a fork does not copy."""
    if torch.get_num_threads() == 1:
        return False
    try:
        native = len(list(Path("/proc/self/task").iterdir()))
    except OSError:
        return True
    return native > threading.active_count()
