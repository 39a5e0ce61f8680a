"""ParallelStrategy: several processes, one device each, that talk over a process group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from stratagem.discovery import START_METHODS
from stratagem.errors import ConfigurationError
from stratagem.launch import threads_per_rank
from stratagem.state import named_state, per_parameter_state
from stratagem.strategies import Axis, Components, DataSplit, PreparedModel, Ranks, Strategy
from stratagem_torch.distributed.process_group import ProcessGroupRanks, join_process_group
from stratagem_torch.distributed.state_by_owner import (
    has_owners,
    optimizer_state_by_owner,
    owned_model_state,
    owned_optimizer_state,
    state_by_owner,
)

_LONGEST_TIMEOUT = 10 * 365 * 86400.0


class ParallelStrategy(Strategy):
    """Trains in several processes with one device each.

    The class provides the process group, ranks and collectives. A subclass defines how a model is
    prepared.

    It extends the call sequence of `Strategy`: `bind` reads `communication_backend`; `make_ranks`
    calls `rank_axes(world_size)`, or `data_split_of(rank, world_size)` for each rank, in every
    process; `setup_environment` ends in `init_process_group()`, on every rank.

    Args:
        process_group_backend: "gloo", "nccl", ..., or a backend for each kind of device as in
            "cpu:gloo,cuda:nccl"; None takes the default of the accelerator.
        timeout: the time (seconds, or a timedelta) after which a collective that a rank does not
            join ends in an error.
        start_method: "popen", "spawn" or "fork"; an alias of `launcher`, which calls the first
            method "script".
        sync_batchnorm: compute batch norm statistics over all ranks; the same as
            `Trainer(sync_batchnorm=True)`, and the option to use under Lite.
        join_uneven_inputs: under the Trainer, a rank without further batches repeats its last batch
            with weight 0 until all ranks have finished. Hooks are called as for any batch, and
            values logged for the epoch exclude it. With False, ranks with different numbers of
            batches raise an error: before training where lengths are known, otherwise by an
            exchange of one number before each step. Lite has a method of this name.
        **components: see `Strategy`.

    Raises:
        ConfigurationError: an argument has an invalid value; when the strategy is bound, this build
            of torch lacks the backend.

    Example:
        >>> from stratagem.strategies import DDPStrategy, ParallelStrategy
        >>> issubclass(DDPStrategy, ParallelStrategy)
        True
        >>> DDPStrategy(process_group_backend="gloo", timeout=30).timeout
        30.0
    """

    def __init__(
        self,
        *,
        process_group_backend: str | None = None,
        timeout: float | timedelta = 600.0,
        start_method: str | None = None,
        sync_batchnorm: bool = False,
        join_uneven_inputs: bool = False,
        **components: Any,
    ) -> None:
        if start_method is not None:
            components["launcher"] = _launcher(start_method, components.get("launcher"))
        super().__init__(**components)
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if not isinstance(seconds, (int, float)) or not 0 < seconds <= _LONGEST_TIMEOUT:
            raise ConfigurationError(
                f"timeout={timeout!r}: expected seconds or a timedelta, more than 0 and at most "
                f"{_LONGEST_TIMEOUT:.0f} s"
            )
        self.process_group_backend = process_group_backend
        self.timeout = float(seconds)
        self._sync_batchnorm = sync_batchnorm
        self.join_uneven_inputs = join_uneven_inputs

    def bind(self, components: Components) -> None:
        """Take the components of the plan; see `Strategy.bind`.

        Raises:
            ConfigurationError: the process group's backend is not in this build of torch, or cannot
                move the accelerator's tensors; or the class's capabilities say one_process.
        """
        super().bind(components)
        if self.capabilities.one_process and components.device_count > 1:
            raise ConfigurationError(
                f"{type(self).__name__}.capabilities has one_process=True, so that one process was "
                f"to drive {components.device_count} devices, but a ParallelStrategy has a process "
                "for each: set one_process=False"
            )
        self._check_backend()

    @property
    def communication_backend(self) -> str:
        """The process group's backend: `process_group_backend`, or by default the accelerator's."""
        return self.process_group_backend or self.accelerator.process_group_backend

    def _check_backend(self) -> None:
        asked, backend = self.process_group_backend, self.communication_backend
        # Not in `__init__`: an accelerator's module may register a backend of its own.
        if asked is not None and not (isinstance(asked, str) and _is_there(asked)):
            raise ConfigurationError(
                f"process_group_backend={asked!r} is not in this build of torch; expected one of "
                f"{', '.join(filter(_is_there, dist.Backend.backend_list))}"
            )
        takes = dist.Backend.backend_capability.get(backend)
        kind = self.accelerator.device(self.components.devices[0]).type
        if takes is not None and kind not in takes:
            raise ConfigurationError(
                f"process_group_backend={backend!r} communicates tensors on "
                f"{' or '.join(takes)}, and the accelerator {self.accelerator.name!r} has them on "
                f"{kind}: leave it out to take {self.accelerator.process_group_backend!r}"
            )

    @property
    def sync_batchnorm(self) -> bool:
        """Whether this was asked for here, or by the Trainer; see `Strategy.sync_batchnorm`."""
        return self._sync_batchnorm or super().sync_batchnorm

    def make_ranks(self) -> Ranks:
        """Return the ranks by the cluster environment; see `Strategy.make_ranks`."""
        world_size = self.components.device_count
        axes = self.rank_axes(world_size)
        splits = None
        if not axes or type(self).data_split_of is not ParallelStrategy.data_split_of:
            splits = [self.data_split_of(rank, world_size) for rank in range(world_size)]
        return ProcessGroupRanks(self.cluster_environment, world_size, splits, axes)

    def rank_axes(self, world_size: int) -> Sequence[Axis]:
        """Return the axes of the mesh in which the ranks are arranged; by default (), no mesh.

        The axes say which ranks read, compute and hold the same: see `Axis`. Messages name a rank's
        place along them, such as "rank 3 (data 1, tensor 1)".
        """
        return ()

    def data_split_of(self, rank: int, world_size: int) -> DataSplit:
        """Return the part of the data that a rank reads, (index, count).

        By default one of its own for each rank. A strategy whose ranks work on the same batches in
        groups gives those of a group the same part, or returns axes from `rank_axes` instead. With
        axes, this method is called only if a class overrides it.
        """
        return rank, world_size

    def setup_environment(self) -> None:
        """Read the ranks, set up the device, then join the other ranks."""
        # Every rank of a node shares its cores: with all of them each, two ranks on two cores ran
        # 20 times slower.
        torch.set_num_threads(int(threads_per_rank(len(self.components.devices)).partition(",")[0]))
        super().setup_environment()
        self.init_process_group()

    def init_process_group(self) -> None:
        """Join the process group; once the device is set up, on every rank.

        What an engine's communication needs before that belongs before
        `super().init_process_group()`.
        """
        join_process_group(
            self.communication_backend,
            self.ranks,
            self.cluster_environment,
            timeout=self.timeout,
            several_nodes=self.components.num_nodes > 1,
        )

    def synchronize_batch_norm(self, module: nn.Module) -> None:
        """Let batch norm layers take their statistics over all ranks; see the base class."""
        if self.ranks.world_size > 1:
            from stratagem_torch.distributed.sync_batchnorm import synchronize_batch_norm

            synchronize_batch_norm(module, has_kernels=self.accelerator.sync_batchnorm_kernels)

    # -- state

    def model_state(self, prepared: PreparedModel) -> dict[str, Any]:
        """Return parameters and buffers; with a divided axis, those of all ranks.

        A format with shards receives on each rank the tensors of that rank. For other formats, rank
        0 receives the tensors of the other ranks one by one, and the other ranks return {}.
        """
        return self._by_owner(super().model_state(prepared))

    def load_model_state(
        self, prepared: PreparedModel, state: Mapping[str, Any], *, strict: bool = True
    ) -> None:
        """Load parameters and buffers; with a divided axis, each rank takes its own.

        Missing and unexpected names are then those of all ranks together.
        """
        if has_owners(self.ranks):
            own = prepared.original.state_dict()
            state = owned_model_state(self.ranks, own, state, strict=strict)
            # Compared already; a batch norm would add the count of batches that another rank has.
            strict = False
        super().load_model_state(prepared, state, strict=strict)

    def optimizer_state(self, prepared: PreparedModel, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state; with a divided axis, that of all ranks' parameters."""
        return self._optimizer_by_owner(optimizer, super().optimizer_state(prepared, optimizer))

    def load_optimizer_state(
        self, prepared: PreparedModel, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> None:
        """Load an optimizer's state; with a divided axis, each rank takes that of its own."""
        if has_owners(self.ranks):
            groups = named_state(optimizer, prepared.original)["param_groups"]
            own = {name for group in groups for name in group["params"]}
            state = owned_optimizer_state(self.ranks, own, per_parameter_state(optimizer, state))
        super().load_optimizer_state(prepared, optimizer, state)

    def _by_owner(self, state: dict[str, Any]) -> dict[str, Any]:
        if not has_owners(self.ranks):
            return state
        return state_by_owner(self.ranks, state, in_shards=self.checkpoint_io.supports_shards)

    def _optimizer_by_owner(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        if not has_owners(self.ranks):
            return state
        state = dict(per_parameter_state(optimizer, state))
        in_shards = self.checkpoint_io.supports_shards
        return optimizer_state_by_owner(self.ranks, state, in_shards=in_shards)


def _launcher(start_method: str, launcher: object) -> str:
    """Return the launcher that a start method stands for."""
    if start_method not in START_METHODS:
        raise ConfigurationError(
            f"start_method={start_method!r}: expected one of {', '.join(map(repr, START_METHODS))}"
        )
    meant = START_METHODS[start_method]
    if launcher not in (None, meant):
        raise ConfigurationError(
            f"start_method={start_method!r} stands for launcher={meant!r}, received launcher="
            f"{launcher!r} as well: give one of the two"
        )
    return meant


def _is_there(backend: str) -> bool:
    if ":" in backend:  # one for each kind of device, as in "cpu:gloo,cuda:nccl"
        return all(_is_there(part.partition(":")[2]) for part in backend.split(","))
    if backend in (dist.Backend.UNDEFINED, "fake"):
        return False
    # torch has such a function for each of its own backends, built or not.
    is_built = getattr(dist, f"is_{backend}_available", None)
    return backend in dist.Backend.backend_list if is_built is None else bool(is_built())
