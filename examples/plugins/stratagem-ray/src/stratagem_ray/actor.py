"""RankActor: the process of one rank, from Ray's side; everything here runs on the cluster."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray

from stratagem.errors import CommunicationError
from stratagem.launch import pack_result
from stratagem_ray import environment
from stratagem_torch.launch import run_packed


@dataclass(frozen=True)
class Place:
    """Where a rank is.

    Attributes:
        node: Ray's id of the node.
        address: of the node, as others reach it.
        pid: of the process, on that node.
        gpus: the ids of the GPUs that Ray has given to it.
        port: where it listens, if it is rank 0; else 0.
    """

    node: str
    address: str
    pid: int
    gpus: tuple[str, ...]
    port: int


@dataclass(frozen=True)
class Outcome:
    """How a rank has ended. Numbers, text and bytes only: nothing of the user's.

    Attributes:
        exit_code: 0: in order.
        report: the traceback of what it raised.
        lost_others: what it raised says that it has lost other ranks.
        result: on rank 0, what the function has returned, packed; None: it has left by sys.exit.
    """

    exit_code: int = 0
    report: str = ""
    lost_others: bool = False
    result: bytes | None = None


class RankActor:
    """A process that becomes a rank. Ray runs its methods in the main thread.

    Call sequence: `place`, then `run`, once each.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __repr__(self) -> str:
        """Return what Ray puts before each line that this rank prints."""
        return f"rank {self._rank}"

    def place(self, *, one_node: bool) -> Place:
        """Return where this is; rank 0 listens from here on.

        Args:
            one_node: all ranks are on this node, so that nobody else has to reach rank 0.
        """
        address = ray.util.get_node_ip_address()
        port = 0
        if self._rank == 0:
            port = environment.listen("127.0.0.1" if one_node else address)
        node = ray.get_runtime_context().get_node_id()
        gpus = tuple(str(gpu) for gpu in ray.get_gpu_ids())
        return Place(node, address, os.getpid(), gpus, port)

    def run(self, call: bytes, variables: Mapping[str, str]) -> Outcome:
        """Run what the launcher has packed; return how that has ended.

        Args:
            call: of `stratagem.launch.pack`.
            variables: of `stratagem.launch.rank_environment`.
        """
        for number in (signal.SIGTERM, signal.SIGHUP):
            # In the place of Ray's: a run that is told to end saves first.
            signal.signal(number, signal.SIG_DFL)
        try:
            result = run_packed(call, variables)
            return Outcome(result=pack_result(result) if self._rank == 0 else b"")
        except SystemExit as leaving:
            code = leaving.code
            if isinstance(code, str):
                return Outcome(1, code)
            return Outcome(code or 0)
        except KeyboardInterrupt:
            return Outcome(128 + signal.SIGINT)
        # The launcher shows it, as text: unpickling the user's exception there could fail.
        except Exception as error:
            lost = isinstance(error, CommunicationError)
            return Outcome(1, "".join(traceback.format_exception(error)), lost)


def send_signal(processes: Sequence[int], number: int) -> None:
    """Send a signal to ranks of this node."""
    for process in processes:
        try:
            os.kill(process, number)
        except ProcessLookupError:
            pass  # it has ended
