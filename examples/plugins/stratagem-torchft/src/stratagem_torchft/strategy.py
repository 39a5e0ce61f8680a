"""TorchFTStrategy: data parallel over replicas that may die and rejoin."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its stubs
from torch.optim import Optimizer
from torchft import Manager, ProcessGroupGloo, ProcessGroupNCCL

from stratagem.errors import CommunicationError, ConfigurationError
from stratagem.strategies import PreparedModel, Ranks, TrainStep
from stratagem_torch.parallel import ParallelStrategy
from stratagem_torchft.plugin import TORCHFT
from stratagem_torchft.transport import StoreTransport


class TorchFTStrategy(ParallelStrategy):
    """Averages gradients over the ranks of a run, and over further runs: its replicas.

    Each replica is a run of its own, of one or several ranks, on machines of its own. They meet at
    a lighthouse (`torchft_lighthouse --min_replicas 1`), before each step. One that dies is left
    out of the steps that follow: the others repeat the exchange of the step in which it died, with
    the gradients that they have. One that joins goes on from a checkpoint of the others, of that
    moment: weights, optimizer, `global_step`, the place in the epoch.

    Args:
        replica, replicas: which one this is, and how many there are at most; None: the variables
            REPLICA_GROUP_ID and NUM_REPLICA_GROUPS, else 0 of 1. They divide the data.
        min_replicas: how many a step needs at least.
        lighthouse: its address, "http://host:29510"; None: the variable TORCHFT_LIGHTHOUSE.
        hostname: of this machine, as other replicas reach it; None: loopback.
        replica_timeout: seconds that replicas wait for one another; also the longest that loading
            the state of another one may take.
        **components: see `ParallelStrategy`.

    Raises:
        ConfigurationError: there is no lighthouse, or numbers do not fit together.
    """

    capabilities = TORCHFT

    def __init__(
        self,
        *,
        replica: int | None = None,
        replicas: int | None = None,
        min_replicas: int = 1,
        lighthouse: str | None = None,
        hostname: str | None = None,
        replica_timeout: float = 60.0,
        **components: Any,
    ) -> None:
        super().__init__(**components)
        self.replica = _number("replica", replica, "REPLICA_GROUP_ID", 0)
        self.replicas = _number("replicas", replicas, "NUM_REPLICA_GROUPS", 1)
        if not 0 <= self.replica < self.replicas or not 1 <= min_replicas <= self.replicas:
            raise ConfigurationError(
                f"replica={self.replica}, replicas={self.replicas}, min_replicas={min_replicas}: "
                "expected 0 <= replica < replicas and 1 <= min_replicas <= replicas"
            )
        self.min_replicas = min_replicas
        self.lighthouse = lighthouse
        self.hostname = hostname or "127.0.0.1"
        self.replica_timeout = timedelta(seconds=replica_timeout)
        self._manager: Manager | None = None
        self._group: ProcessGroupGloo | ProcessGroupNCCL | None = None
        self._store: TCPStore | None = None
        self._checkpoint: Callable[[], dict[str, Any]] | None = None
        """Returns this replica's checkpoint; of torchft, only the manager's threads stay."""
        self._received: dict[str, Any] | None = None
        """The checkpoint of another replica, until it is loaded."""
        self._counted = {"step": 0, "batches_committed": 0}
        """torchft's counts, of a checkpoint that was loaded before there is a manager."""
        self._at = 0
        """torchft's count of steps when the present step began."""
        self._has_quorum = False
        self._was_stepped = False
        """The others have taken the present step, and this replica has their weights already."""

    def make_ranks(self) -> Ranks:
        """Return the ranks, whose training data is that of one of the replicas."""
        ranks = super().make_ranks()
        ranks.run_split = (self.replica, self.replicas)
        return ranks

    def wrap(self, module: nn.Module) -> nn.Module:
        """Give every rank of this replica the parameters of its rank 0."""
        module.load_state_dict(self.ranks.broadcast(module.state_dict()))
        return module

    @contextmanager
    def evaluation(self, prepared: PreparedModel) -> Iterator[None]:
        """Give every rank the buffers of rank 0, which are the ones that are saved."""
        for buffer in prepared.original.buffers():
            buffer.copy_(self.ranks.broadcast(buffer))
        yield

    # -- replicas

    def adopt_peer_state(
        self, prepared: PreparedModel, checkpoint: Callable[[], dict[str, Any]]
    ) -> dict[str, Any] | None:
        """Meet the other replicas; return the checkpoint of one that is ahead."""
        self._checkpoint = checkpoint
        self._manager = self._make_manager()
        self._manager.load_state_dict(self._counted)
        self._meet()
        joined, self._received = self._received, None
        return joined

    def _make_manager(self) -> Manager:
        """Return torchft's manager of this rank, and let rank 0 hold the replica's store."""
        lighthouse = self.lighthouse or os.environ.get("TORCHFT_LIGHTHOUSE")
        if not lighthouse:
            raise ConfigurationError(
                "torchft needs a lighthouse, at which replicas meet: start one with "
                "`torchft_lighthouse --min_replicas 1`, and pass lighthouse='http://host:29510' or "
                "set TORCHFT_LIGHTHOUSE"
            )
        port = 0
        if self.ranks.is_global_zero:
            listener = socket.create_server((self.hostname, 0))
            port, file = listener.getsockname()[1], listener.detach()
            self._store = TCPStore(
                self.hostname, port, is_master=True, wait_for_workers=False, master_listen_fd=file
            )
        port = self.ranks.broadcast(port)
        if self._store is None:
            self._store = TCPStore(self.hostname, port, wait_for_workers=False)
        on_cuda = self.communication_backend == "nccl"
        group = (ProcessGroupNCCL if on_cuda else ProcessGroupGloo)(timeout=self.replica_timeout)
        self._group = group
        return Manager(
            pg=group,
            load_state_dict=self._take,
            state_dict=self._give,
            min_replica_size=self.min_replicas,
            # Replicas meet, and heal, before the forward: after it, gradients are of old weights.
            use_async_quorum=False,
            timeout=self.replica_timeout,
            quorum_timeout=self.replica_timeout,
            connect_timeout=self.replica_timeout,
            rank=self.ranks.global_rank,
            world_size=self.ranks.world_size,
            store_addr=self.hostname,
            store_port=port,
            lighthouse_addr=lighthouse,
            replica_id=f"replica{self.replica}",
            hostname=self.hostname,
            checkpoint_transport=StoreTransport(
                self._store, f"{self.hostname}:{port}", self.ranks.global_rank
            ),
        )

    def _give(self) -> dict[str, Any]:
        assert self._checkpoint is not None
        return self._checkpoint()

    def _take(self, state: dict[str, Any]) -> None:
        self._received = state

    def _meet(self) -> None:
        """Wait for the replicas that take part in the next step; one that is behind heals."""
        assert self._manager is not None
        self._manager.start_quorum()
        self._has_quorum = True

    # -- a step

    def train_step(
        self, prepared: PreparedModel, step: TrainStep, micro_batches: Collection[Any]
    ) -> None:
        """Run a step in which all replicas take part that are there."""
        assert self._manager is not None
        self._at = self._manager.current_step()
        if not self._has_quorum:
            self._meet()
        try:
            super().train_step(prepared, step, micro_batches)
        except BaseException:
            # Others would wait for this replica as long as its process lives, which may be a
            # notebook's.
            assert self._group is not None
            self._group.abort()
            self._leave()
            raise
        self._has_quorum = self._was_stepped = False

    def accumulate_all(
        self, prepared: PreparedModel, step: TrainStep, micro_batches: Collection[Any]
    ) -> bool:
        """Run forward and backward here, then average gradients, until replicas agree on them."""
        super().accumulate_all(prepared, step, micro_batches)
        gradients = _Gradients(prepared.original)
        for tensor in gradients.tensors:
            tensor.copy_(self.ranks.all_reduce(tensor))
        manager = self._manager
        assert manager is not None
        while True:
            averaged = [tensor.clone() for tensor in gradients.tensors]
            # Each is waited for by itself: a failure is kept by the manager, and the rest left out.
            for tensor in averaged:
                manager.allreduce(tensor).wait()
            if self._received is None and manager.should_commit():
                return gradients.put_back(averaged)
            # A replica has died: meet those that are left, and exchange the same gradients again.
            self._meet()
            if self._received is not None:
                self._heal(prepared, manager.current_step() - self._at)
                return True

    def _heal(self, prepared: PreparedModel, behind: int) -> None:
        """Take over the step that the others have taken, this replica's gradients among theirs."""
        assert self._received is not None
        if behind != 1:
            raise CommunicationError(
                f"replica {self.replica} has missed {behind} steps of the others while it ran: "
                "start it again, and it goes on from their state"
            )
        checkpoint, self._received = self._received, None
        self.load_model_state(prepared, checkpoint["state_dict"])
        for optimizer, state in zip(
            prepared.optimizers, checkpoint["optimizer_states"], strict=True
        ):
            self.load_optimizer_state(prepared, optimizer, state)
        self._was_stepped = True

    def optimizer_step(
        self,
        prepared: PreparedModel,
        optimizer: Optimizer,
        closure: Callable[[], Any] | None = None,
    ) -> Any:
        """Step, unless the weights are those after the step already."""
        if self._was_stepped:
            return None
        return super().optimizer_step(prepared, optimizer, closure)

    # -- state and end

    def state(self, prepared: PreparedModel, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """Return torchft's counts, by which replicas tell who is behind."""
        return dict(self._counted if self._manager is None else self._manager.state_dict())

    def load_state(
        self, prepared: PreparedModel, optimizers: Sequence[Optimizer], state: Mapping[str, Any]
    ) -> None:
        """Count on from a checkpoint."""
        self._counted = dict(state)
        if self._manager is not None:
            self._manager.load_state_dict(self._counted)

    def end_training(self, prepared: PreparedModel) -> None:
        """Leave the other replicas."""
        self._leave()

    def release(self, prepared: PreparedModel) -> None:
        """Leave the other replicas, also after a failure between two steps."""
        self._leave()

    def teardown(self) -> None:
        """Leave the other replicas."""
        self._leave()
        super().teardown()

    def _leave(self) -> None:
        if self._manager is not None:
            self._counted = self._manager.state_dict()
            self._manager.shutdown()
        self._manager = self._group = self._store = self._checkpoint = None
        self._has_quorum = False


class _Gradients:
    """The gradients of a model on this rank, as one tensor for each dtype.

    With a one behind them for each parameter that has one: what no rank of any replica has used is
    to have none afterwards either.
    """

    def __init__(self, module: nn.Module) -> None:
        self._of_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in module.parameters():
            if parameter.requires_grad:
                # A complex one is exchanged as pairs of real numbers.
                dtype = _as_real(parameter).dtype
                self._of_dtype.setdefault(dtype, []).append(parameter)
        self.tensors = [self._flat(parameters) for parameters in self._of_dtype.values()]

    @staticmethod
    def _flat(parameters: list[nn.Parameter]) -> Tensor:
        parts = [_as_real(torch.zeros_like(p) if p.grad is None else p.grad) for p in parameters]
        used = parts[0].new_tensor([p.grad is not None for p in parameters])
        return torch.cat([*(part.flatten() for part in parts), used])

    def put_back(self, averaged: list[Tensor]) -> bool:
        """Give the averages to the parameters; return whether there are any."""
        found = False
        for parameters, flat in zip(self._of_dtype.values(), averaged, strict=True):
            values, used = flat[: -len(parameters)], flat[-len(parameters) :].tolist()
            parts = torch.split(values, [_as_real(p).numel() for p in parameters])
            for parameter, part, count in zip(parameters, parts, used, strict=True):
                if count:
                    grad = torch.zeros_like(parameter)
                    _as_real(grad).copy_(part.view_as(_as_real(grad)))
                    parameter.grad = grad
                    found = True
        return found


def _as_real(tensor: Tensor) -> Tensor:
    """Return a view of a complex tensor of shape (..., 2); another one is returned unchanged."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _number(name: str, given: int | None, variable: str, default: int) -> int:
    if given is not None:
        return given
    text = os.environ.get(variable, str(default))
    if not text.isdigit():
        raise ConfigurationError(f"{variable}={text!r}: expected a number, or pass {name}=")
    return int(text)
