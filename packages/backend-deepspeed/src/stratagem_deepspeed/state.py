"""State of an engine by parameter names: what each rank holds of it, for checkpoints of any kind.

An engine keeps float32 weights and optimizer state in flat tensors, of which each rank has a piece.
DeepSpeed's own checkpoints store those pieces as they lie, so that they load under the same stage
and number of ranks only. Here each parameter's range within a piece is found and written as a chunk
of the named tensor; the canonical state of every other strategy has the same names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stratagem.checkpoint import LazyTensor, Shards, read_whole
from stratagem.errors import CheckpointMismatchError, ConfigurationError
from stratagem.state import check_weights, load_named_state, matching_groups, named_state
from stratagem.strategies import Strategy
from stratagem_deepspeed.config import stage_of
from stratagem_deepspeed.engine import EngineModule


class Chunk(Protocol):
    """A parameter's share on this rank: a range of its elements in row-major order."""

    shape: tuple[int, ...]
    """Of the whole parameter."""
    start: int
    """Where the range begins."""
    numel: int
    """How long it is; 0: this rank has none of it."""

    def read(self, key: str | None = None) -> Tensor:
        """Return the range of the weights, or of the optimizer's state `key`: shape (numel,)."""

    def write(self, values: Tensor, key: str | None = None) -> None:
        """Set it."""


class _Fragment:
    """A chunk at stages 1 and 2, in the rank's piece of its parameter group."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.shape = tuple(parameter.shape)
        self._mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
        address = None if self._mapping is None else self._mapping.lp_fragment_address
        self.start = 0 if address is None else address.start
        self.numel = 0 if address is None else address.numel

    def read(self, key: str | None = None) -> Tensor:
        if not self.numel:
            return torch.empty(0)
        fragment: Tensor = self._mapping.get_hp_fragment(key)
        return fragment.detach()

    def write(self, values: Tensor, key: str | None = None) -> None:
        if self.numel:
            self.read(key).copy_(values)


class _Slice:
    """A chunk at stage 3, where each parameter is cut into a slice per rank.

    Args:
        parameter: a sharded parameter.
        is_trained: whether an engine keeps its float32 weights and optimizer state.
    """

    def __init__(self, parameter: Any, *, is_trained: bool) -> None:
        self._parameter = parameter
        self._is_trained = is_trained
        self.shape = tuple(parameter.ds_shape)
        # The last slices are padded.
        self._padded: int = parameter.ds_tensor.ds_numel
        rank = dist.get_rank(parameter.ds_process_group)
        self.start = min(rank * self._padded, parameter.ds_numel)
        self.numel = min(self._padded, parameter.ds_numel - self.start)

    def read(self, key: str | None = None) -> Tensor:
        if self._is_trained:
            own: Tensor = self._parameter._z3_optimizer.get_local_fp32_param(self._parameter, key)
        else:
            own = self._parameter.ds_tensor.data
        return own.detach()[: self.numel]

    def write(self, values: Tensor, key: str | None = None) -> None:
        if not self._is_trained:
            self.read().copy_(values)
            return
        padded = torch.zeros(self._padded, dtype=values.dtype, device=values.device)
        padded[: self.numel] = values
        self._parameter._z3_optimizer.set_local_hp_param(padded, self._parameter, key)


class EngineState:
    """Reads and writes the state of one model, and of its engine if it has one.

    Args:
        called: the model and its engine.
        strategy: the strategy; its ranks share the model.
    """

    def __init__(self, called: EngineModule, strategy: Strategy) -> None:
        self._called = called
        self._strategy = strategy
        self._model = called.module
        self._engine: Any = called.__dict__["engine"]
        self._zero: Any = None if self._engine is None else self._engine.optimizer
        self._is_stage_3 = self._engine is not None and stage_of(called.config) == 3
        # True: each rank returns its shards. False: rank 0 returns unsharded tensors.
        self._takes_shards = strategy.checkpoint_io.supports_shards

    # -- weights

    def weights(self) -> dict[str, Any]:
        """Return parameters, in the optimizer's precision, and buffers; on rank 0 or in shards."""
        saved: dict[int, Any] = {}  # a tied parameter has several names
        entries = self._entries()
        for value in entries.values():
            if id(value) not in saved:
                saved[id(value)] = self._to_save(value)
        return {name: saved[id(value)] for name, value in entries.items()}

    def load_weights(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Load weights, each rank its own chunks.

        Raises:
            CheckpointMismatchError: names or shapes differ; lists them.
        """
        entries = self._entries()
        chunks = {name: self._chunk(value) for name, value in entries.items()}
        shapes = {
            name: chunk.shape if chunk is not None else tuple(value.shape)
            for (name, value), chunk in zip(entries.items(), chunks.values(), strict=True)
            if isinstance(value, Tensor)
        }
        check_weights(entries, shapes, state, strict=strict)
        self._release_gathered()
        others = {}
        for name, chunk in chunks.items():
            if name in state and chunk is not None:
                chunk.write(_range_of(state[name], chunk))
            elif name in state:
                others[name] = read_whole(state[name])
        self._publish()
        with torch.no_grad():
            for name, value in others.items():
                if isinstance(entries[name], Tensor):
                    entries[name].copy_(value)
        extra = {n: v for n, v in others.items() if not isinstance(v, Tensor)}
        if extra:
            self._model.load_state_dict(extra, strict=False)

    def _entries(self) -> dict[str, Any]:
        return self._model.state_dict(keep_vars=True)

    def _chunk(self, value: Any) -> Chunk | None:
        """Return a parameter's share on this rank; None: all of it is on every rank."""
        if not isinstance(value, nn.Parameter):
            return None
        if hasattr(value, "ds_id"):
            trained = self._is_stage_3 and hasattr(self._zero, "grad_position")
            return _Slice(value, is_trained=trained and value.requires_grad)
        if self._engine is not None and hasattr(value, "_hp_mapping"):
            return _Fragment(value)
        return None

    def _to_save(self, value: Any, key: str | None = None) -> Any:
        chunk = self._chunk(value)
        if chunk is None:
            return value.detach() if isinstance(value, Tensor) else value
        return self._saved(chunk, key)

    def _saved(self, chunk: Chunk, key: str | None = None) -> Any:
        own = chunk.read(key)
        if self._takes_shards:
            # A rank without a chunk does not know the dtype; the others tell it.
            return Shards.of_flat(chunk.shape, own, start=chunk.start)
        return self._gathered(chunk, own)

    def _gathered(self, chunk: Chunk, own: Tensor) -> Tensor:
        """Return the whole tensor on rank 0, on the CPU; on the others an empty one."""
        numel = torch.Size(chunk.shape).numel()
        device = self._engine.device if self._engine is not None else own.device
        whole = torch.zeros(numel, dtype=torch.float32, device=device)
        whole[chunk.start : chunk.start + chunk.numel] = own.to(device)
        dist.reduce(whole, 0)
        if dist.get_rank() > 0:
            return torch.empty(0)
        return whole.view(chunk.shape).to("cpu", dtype=own.dtype)

    def _release_gathered(self) -> None:
        """Let no rank use weights that it has gathered before: they are going to change."""
        if self._is_stage_3:
            getattr(self._zero, "parameter_offload", self._zero).partition_all_parameters()

    def _publish(self) -> None:
        """Bring the optimizer's weights to those that forward uses."""
        if self._is_stage_3 and hasattr(self._zero, "grad_position"):
            for group in range(len(self._zero.fp32_partitioned_groups_flat)):
                self._zero._reassign_or_swap_out_partitioned_parameters(group)
        elif hasattr(self._zero, "update_lp_params"):
            self._zero.update_lp_params()

    # -- the optimizer

    def optimizer(self) -> dict[str, Any]:
        """Return the optimizer's state by parameter names; see `Strategy.optimizer_state`.

        Raises:
            ConfigurationError: the engine was freed, or the optimizer has state of no parameter.
        """
        if self._engine is None:
            raise ConfigurationError(
                "the engine's optimizer state is gone: another Trainer has begun a run in this "
                "process since, which freed it. Save before that"
            )
        inner = self._inner()
        if not self._flats():  # stage 0
            return named_state(inner, self._model)
        if others := [str(key) for key in inner.state if not isinstance(key, Tensor)]:
            raise ConfigurationError(
                f"the optimizer {type(inner).__name__} has the state {', '.join(others)}, which "
                "belongs to no parameter, so that a checkpoint of an engine cannot hold it: use "
                "strategy='ddp', keep it in param_groups, or save the weights alone"
            )
        self._link()
        shared, keys = self._kinds_of_all(inner)
        param_groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": names}
            for group, names in zip(inner.param_groups, self._called.groups, strict=True)
        ]
        state: dict[str, Any] = {}
        for name, chunk, group in self._trained():
            if group in shared:
                # Of the numbers a copy each: torch's optimizers count in them, in place.
                state[name] = {key: self._saved(chunk, key) for key in keys} | {
                    key: value.clone() for key, value in shared[group].items()
                }
        if not self._takes_shards and dist.get_rank() > 0:
            state = {}
        return {"state": state, "param_groups": param_groups, "engine": self._engines_own()}

    def load_optimizer(self, saved: Mapping[str, Any]) -> None:
        """Load optimizer state, each rank its own chunks.

        Raises:
            CheckpointMismatchError: it belongs to other parameters, or another optimizer.
        """
        inner = self._inner()
        if not self._flats():
            load_named_state(inner, self._model, read_whole(saved))
            return
        for group, found in zip(
            inner.param_groups,
            matching_groups(self._called.groups, saved["param_groups"]),
            strict=True,
        ):
            group.update({key: value for key, value in found.items() if key != "params"})
        entries = saved["state"]
        trained = list(self._trained())
        shared: dict[int, dict[str, float]] = {}
        keys: list[str] = []
        for group in range(len(self._called.groups)):
            there = [entries[name] for name, _, of in trained if of == group and name in entries]
            if there:
                shared[group], keys = _kinds(there)
        if shared:
            self._begin(shared, keys)
            for name, chunk, _ in trained:
                for key in keys:
                    value = entries.get(name, {}).get(key)
                    if value is not None:
                        chunk.write(_range_of(value, chunk), key)
        self._load_engines_own(saved.get("engine", {}))

    def _kinds_of_all(self, inner: Any) -> tuple[dict[int, dict[str, Tensor]], list[str]]:
        """Return what `_kinds_of` does where some ranks have no chunk of a group, on every rank."""
        shared: dict[int, dict[str, Tensor]] = {}
        keys: list[str] = []
        for of_rank, names in self._strategy.ranks.gather_objects(_kinds_of(inner, self._flats())):
            shared = {**of_rank, **shared}
            keys = keys or names
        return shared, keys

    def _inner(self) -> Any:
        """Return the optimizer that the engine steps."""
        return getattr(self._zero, "optimizer", self._zero)

    def _trained(self) -> Iterator[tuple[str, Chunk, int]]:
        """Yield names, chunks and groups of the optimizer's parameters."""
        parameters = dict(self._model.named_parameters())
        for group, names in enumerate(self._called.groups):
            for name in names:
                parameter = parameters[name]
                chunk = self._chunk(parameter) if parameter.requires_grad else None
                if chunk is not None:
                    yield name, chunk, group

    def _flats(self) -> list[tuple[int, Tensor]]:
        """Return the flat tensors that the optimizer steps on this rank, each with its group."""
        if hasattr(self._zero, "fp32_partitioned_groups_flat"):  # stage 3, which divides groups
            flats = self._zero.fp32_partitioned_groups_flat
            return [(self._zero.sub_group_to_group_id[i], flat) for i, flat in enumerate(flats)]
        for name in (
            "single_partition_of_fp32_groups",  # stages 1 and 2
            "fp32_groups_flat_partition",  # stage 1 with gradients added up in float32
        ):
            if hasattr(self._zero, name):
                return list(enumerate(getattr(self._zero, name)))
        return []

    def _link(self) -> None:
        """Let parameters find their optimizer state.

        The engine does so when its first group has been stepped, and never finds that of the other
        groups (DeepSpeed 0.19).
        """
        if hasattr(self._zero, "_hp_optimizer_states_linked"):
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()

    def _begin(self, shared: Mapping[int, Mapping[str, float]], keys: Iterable[str]) -> None:
        """Make the optimizer's state, which there is none of before the first step."""
        inner = self._inner()
        own = type(inner).__module__.startswith("deepspeed.")
        for group, flat in self._flats():
            if group not in shared:
                continue
            state = inner.state[flat]
            for key in keys:
                state.setdefault(key, torch.zeros_like(flat.data))
            for key, number in shared[group].items():
                # DeepSpeed's optimizers count in integers, torch's in tensors.
                state[key] = int(number) if own and key == "step" else torch.tensor(number)
        for number_of_group, options in enumerate(inner.param_groups):
            step = shared.get(number_of_group, {}).get("step")
            if "step" in options and step is not None:
                options["step"] = int(step)
        self._link()

    # -- further state of the engine

    def _engines_own(self) -> dict[str, Any]:
        """Return the loss scale and the scheduler of the config, as weights-only-safe data."""
        found: dict[str, Any] = {}
        scaler = getattr(self._zero, "loss_scaler", None)
        if getattr(scaler, "dynamic", False):
            found["loss_scaler"] = {
                key: value for key, value in vars(scaler).items() if type(value) in (int, float)
            }
        if self._engine.lr_scheduler is not None:
            found["lr_scheduler"] = self._engine.lr_scheduler.state_dict()
        return found

    def _load_engines_own(self, saved: Mapping[str, Any]) -> None:
        scaler = getattr(self._zero, "loss_scaler", None)
        if "loss_scaler" in saved and getattr(scaler, "dynamic", False):
            vars(scaler).update(saved["loss_scaler"])
        if "lr_scheduler" in saved and self._engine.lr_scheduler is not None:
            self._engine.lr_scheduler.load_state_dict(saved["lr_scheduler"])


def _range_of(value: Tensor | LazyTensor, chunk: Chunk) -> Tensor:
    """Return this rank's range of a whole tensor, or of one that lies in a checkpoint."""
    if isinstance(value, LazyTensor):
        own = torch.empty(chunk.numel, dtype=value.dtype)
        value.read_into(Shards.of_flat(value.shape, own, start=chunk.start))
        return own
    return value.detach().reshape(-1)[chunk.start : chunk.start + chunk.numel]


def _kinds_of(
    inner: Any, flats: list[tuple[int, Tensor]]
) -> tuple[dict[int, dict[str, Tensor]], list[str]]:
    """Return the numbers that each group has for all elements, and names of what each one has."""
    shared: dict[int, dict[str, Tensor]] = {}
    keys: list[str] = []
    for group, flat in flats:
        state = inner.state.get(flat)
        if not state or group in shared:
            continue
        keys = [
            key
            for key, value in state.items()
            if isinstance(value, Tensor) and value.ndim and value.numel() == flat.numel()
        ]
        shared[group] = {key: _number(value) for key, value in state.items() if key not in keys}
        if "step" in inner.param_groups[group]:  # DeepSpeed's FusedAdam counts there
            shared[group].setdefault("step", _number(inner.param_groups[group]["step"]))
    return shared, keys


def _number(value: Any) -> Tensor:
    """Return a number as torch's optimizers keep it."""
    return torch.tensor(float(value))


def _kinds(entries: list[Mapping[str, Any]]) -> tuple[dict[str, float], list[str]]:
    """Return the numbers that a group's parameters share, and names of what each element has."""
    first = entries[0]
    keys = [key for key, value in first.items() if getattr(value, "shape", ()) != ()]
    shared: dict[str, float] = {}
    for key in first:
        if key not in keys:
            numbers = {float(read_whole(entry[key])) for entry in entries if key in entry}
            if len(numbers) > 1:
                raise CheckpointMismatchError(
                    f"the checkpoint's optimizer has {key!r} between {min(numbers)} and "
                    f"{max(numbers)} for the parameters of a group; a DeepSpeed engine has one for "
                    "all of them: resume under the strategy that saved it, or load the weights only"
                )
            shared[key] = numbers.pop()
    return shared, keys
