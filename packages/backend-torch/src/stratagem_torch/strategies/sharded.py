"""ShardedStrategy: what FSDP and the mesh strategy share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from stratagem.checkpoint import LazyTensor
from stratagem.errors import ConfigurationError, StratagemError, UserCodeError
from stratagem.state import (
    check_optimizer_state,
    load_named_state,
    named_state,
    per_parameter_state,
    state_without_wrapper,
)
from stratagem.strategies import (
    Components,
    Optimizers,
    PreparedModel,
    make_optimizers,
    user_module,
)
from stratagem_torch.distributed.activation_checkpointing import (
    ActivationCheckpointing,
    check_given_once,
)
from stratagem_torch.distributed.allocator import return_freed_memory, use_huge_pages
from stratagem_torch.distributed.parallel_strategy import ParallelStrategy
from stratagem_torch.distributed.state_by_owner import is_owner
from stratagem_torch.sharding import clipping
from stratagem_torch.sharding.deferred import DeferredBuild
from stratagem_torch.sharding.following import announcing, follow, forget_evaluations
from stratagem_torch.sharding.layout import (
    Rebinding,
    average_gradients,
    broadcast_from_first,
    check_parameters,
    distribute_like,
    distribute_state,
    find_replicated,
    is_replicated,
    shards_of,
    whole_on_cpu,
)
from stratagem_torch.sharding.parts import find_roots
from stratagem_torch.sharding.shard_model import free_casts, shard_model
from stratagem_torch.sharding.user_access import (
    OwnBackward,
    check_changes,
    explain_shards,
    gather_when_called,
    groups_of,
    keep_for_second_backward,
    read_whole_numbers,
    refuse_other_backward,
)

STATE_DICT_TYPES = ("full", "sharded")

_ROOT = "_stratagem_sharded_root"


@dataclass(eq=False)
class ShardedPrepared(PreparedModel):
    """A sharded model as a strategy runs it.

    Attributes:
        groups: its modules that gather and free parameters together.

    Example:
        >>> from stratagem.strategies import PreparedModel
        >>> from stratagem_torch.sharding import ShardedPrepared
        >>> issubclass(ShardedPrepared, PreparedModel)
        True
    """

    groups: list[FSDPModule] = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.groups = [part for part in self.module.modules() if isinstance(part, FSDPModule)]

    def groups_to_compile(self) -> list[nn.Module]:
        """Return the groups but for the root's: compiled between the hooks that gather and free.

        A graph over several groups would hold all of their parameters at once.
        """
        return [
            p for p in self.module.modules() if isinstance(p, FSDPModule) and p is not self.module
        ]

    def reduce_gradients(self, reduces: bool) -> None:
        """Let backward reduce gradients, or keep them on their rank."""
        for group in self.groups:
            group.set_requires_gradient_sync(reduces, recurse=False)

    def reshard(self) -> None:
        """Free gathered parameters, so that `parameters()` are the sharded ones.

        Some stay gathered after a forward pass that no backward follows. An optimizer step in
        between would change the shards, and the next forward pass would use the stale copy.
        """
        for group in self.groups:
            group.reshard()


class ShardedStrategy(ParallelStrategy):
    """Trains with parameters, gradients and optimizer state spread over ranks.

    A subclass defines how ranks are arranged (`mesh_shape`) and shards a model over them (`shard`).

    Args:
        state_dict_type: "full" gathers a checkpoint on rank 0, which writes one file; "sharded"
            lets every rank write its part into a directory, as `checkpoint_io="directory"` does.
        **components: see `ParallelStrategy`.

    Raises:
        ConfigurationError: `state_dict_type` is something else.

    Example:
        >>> from stratagem.strategies import FSDPStrategy
        >>> from stratagem_torch.sharding import ShardedStrategy
        >>> issubclass(FSDPStrategy, ShardedStrategy)
        True
    """

    device_mesh: DeviceMesh
    """How the ranks are arranged; there once processes are launched."""

    replicas: dist.ProcessGroup | None = None
    """The ranks that have the same parts of the model; None: all ranks."""

    def __init__(self, *, state_dict_type: str = "full", **components: Any) -> None:
        if state_dict_type not in STATE_DICT_TYPES:
            raise ConfigurationError(
                f"state_dict_type={state_dict_type!r}: expected one of "
                f"{', '.join(map(repr, STATE_DICT_TYPES))}"
            )
        if state_dict_type == "sharded" and components.get("checkpoint_io") is None:
            components["checkpoint_io"] = "directory"
        super().__init__(**components)
        self._replicated: list[nn.Parameter] = []
        self._held: set[object] = set()  # roots whose backward passes communicate no gradients
        self._backwards = 0

    @abstractmethod
    def mesh_shape(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Return sizes and names of the mesh's dimensions; their product is the world size."""

    @abstractmethod
    def shard(self, module: nn.Module) -> None:
        """Shard a model in place, with `module` as the root."""

    def bind(self, components: Components) -> None:
        """Take the components of the plan, and check that the ranks can be arranged."""
        super().bind(components)
        self.mesh_shape()
        if components.accelerator.is_host:
            use_huge_pages()

    def setup_environment(self) -> None:
        """Join the process group, then arrange the ranks."""
        super().setup_environment()
        if self.accelerator.is_host:
            return_freed_memory()
        sizes, names = self.mesh_shape()
        self.device_mesh = _device_mesh(self.device.type, sizes, names, dist.group.WORLD)

    # -- model and optimizers

    activation_checkpointing: ActivationCheckpointing = None
    """The modules that compute their activations again, of the argument of this name."""

    def check_activation_checkpointing(self, choice: Any) -> None:
        """Check the choice of the step options; see `Strategy.check_activation_checkpointing`."""
        super().check_activation_checkpointing(choice)
        check_given_once(type(self).__name__, self.activation_checkpointing, choice)

    def checkpoint_activations(self, module: nn.Module, choice: Any) -> None:
        """Do nothing: `shard` checkpoints the groups."""

    @property
    def recomputed(self) -> ActivationCheckpointing:
        """The modules that compute their activations again, of the argument or the step options."""
        step = self.components.step
        return self.activation_checkpointing or (step and step.activation_checkpointing)

    def model_context(self) -> AbstractContextManager[Any]:
        """Return a context in which a model is built in shards.

        Its values are those that it has in one process. What is built can be used once it was
        prepared.
        """
        if self.ranks.world_size == 1:
            return nullcontext()
        return DeferredBuild(self.accelerator, self.device)

    def prepare(
        self, module: nn.Module, optimizers: Optimizers = (), *, move_to_device: bool = True
    ) -> PreparedModel:
        """Return the model, sharded, with optimizers of its shards.

        A model that was sharded before is used unchanged. Parameters and buffers take the values of
        rank 0. The shards are always on the device of this rank.

        Raises:
            ConfigurationError: an optimizer holds parameters that the model does not have, or a
                parameter has a hook.
        """
        root = _root_of(module)
        if root is None:
            given = () if callable(optimizers) else tuple(optimizers)
            module = self.precision.convert_module(module)
            rebinding, attributes = Rebinding(module, given), _attributes_of(module)
            self.shard(module)
            rebinding.apply(module, self.local_names(module))
            for name, parameter in module.named_parameters():
                parameter.__dict__.update(attributes.get(name, {}))
            roots = self.roots(module)
            for part in roots:
                _gather_once(part)
                if isinstance(part, FSDPModule) and part is not module:
                    # Otherwise the first group that is called would be a root.
                    part._get_fsdp_state()._lazy_init()
            for part in {module, *roots}:
                part.register_forward_hook(_reshard_without_grad)
            read_whole_numbers()
            if isinstance(module, FSDPModule):
                gather_when_called(module, user_module(module))
            for child in module.children():
                child.__dict__[_ROOT] = module
        else:
            module = root
            ShardedPrepared(module, module, [], module).reshard()
            _check_still_sharded(module)
        replicated = {id(p): p for p in (*self._replicated, *find_replicated(module))}
        self._replicated = list(replicated.values())
        if self.ranks.world_size > 1:
            refuse_other_backward(module, self._replicated)
        with self.listing_all(module):
            made = make_optimizers(optimizers)
        for optimizer in made:
            for group in optimizer.param_groups:
                given, group["params"] = group["params"], []
                for parameter in given:
                    if self.is_elsewhere(parameter):
                        optimizer.state.pop(parameter, None)
                    else:
                        group["params"].append(parameter)
        check_parameters(module, made)
        return ShardedPrepared(module, module, made, evaluation_module=module)

    def roots(self, module: nn.Module) -> list[nn.Module]:
        """Return the modules to shard as roots; parameters outside of these stay unsharded."""
        return find_roots(module)

    def local_names(self, module: nn.Module) -> Mapping[str, str | None]:
        """Return the parameters of the whole model that have another name on this rank.

        None: the rank does not have it, as a stage of a pipeline lacks those of other stages.
        """
        return {}

    def listing_all(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which the model lists the placeholders of absent parameters, too."""
        return nullcontext()

    def is_elsewhere(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter is a placeholder for one that only other ranks have."""
        return False

    def shard_groups(
        self, module: nn.Module, groups: Collection[nn.Module], shard: Callable[..., object]
    ) -> None:
        """Shard the roots and the groups in them, except modules that user code has sharded.

        Args:
            module: the model.
            groups: modules of the model.
            shard: `fully_shard` with its options except `ignored_params`.
        """
        roots = self.roots(module)
        inside = {part for root in roots for part in root.modules()}
        chosen = {part for part in (*groups, *roots) if not isinstance(part, FSDPModule)} & inside

        def shard_part(part: nn.Module) -> None:
            shard(part, ignored_params=set(find_replicated(part)))

        shard_model(module, chosen, shard_part, self.device, self.replicas)
        if self.precision.forward_context() is not None:
            free_casts(chosen - {module})

    # -- a training step

    def no_sync(self, prepared: PreparedModel) -> AbstractContextManager[Any] | None:
        """Return a context in which gradients stay on their rank, whole, until a later backward."""
        assert isinstance(prepared, ShardedPrepared)
        return self._hold(prepared) if prepared.groups and self.ranks.world_size > 1 else None

    @contextmanager
    def _hold(self, prepared: ShardedPrepared) -> Iterator[None]:
        if prepared.module in self._held:  # an outer context decides
            yield
            return
        self._held.add(prepared.module)
        prepared.reduce_gradients(False)
        try:
            yield
        finally:
            self._held.remove(prepared.module)
            prepared.reduce_gradients(True)

    @contextmanager
    def backward_in_forward(self, prepared: PreparedModel) -> Iterator[None]:
        """Check that the parts of the model, and not the model itself, are sharded as roots."""
        if isinstance(prepared.module, FSDPModule):
            name = type(user_module(prepared.original)).__name__
            raise ConfigurationError(
                f"{name}.automatic_optimization was set to False after the model was sharded for "
                f"automatic optimization: set it in {name}.__init__, and train a new {name}"
            )
        yield

    def backward(self, prepared: PreparedModel, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward; gradients are reduced to shards in it."""
        with self.own_backward(prepared):
            super().backward(prepared, loss, *args, **kwargs)
        if self._replicated and prepared.module not in self._held:
            average_gradients(self._replicated)

    @contextmanager
    def own_backward(self, prepared: PreparedModel) -> Iterator[None]:
        """Surround a backward pass that the strategy runs; others are refused."""
        assert isinstance(prepared, ShardedPrepared)
        self._backwards += 1
        if self._backwards.bit_count() == 1:  # 1, 2, 4, ...: finds a repeated change at once
            check_changes(prepared.groups)
        OwnBackward.runs = True
        try:
            yield
        finally:
            OwnBackward.runs = False

    def clip_grad_value(self, parameters: Sequence[Tensor], clip_value: float) -> None:
        """See Strategy; each rank clips its own elements."""
        clipping.clip_by_value(parameters, clip_value)

    def clip_grad_norm(
        self, parameters: Sequence[Tensor], max_norm: float, **options: Any
    ) -> Tensor:
        """See Strategy; the norm is that over all ranks."""
        return clipping.clip_by_norm(parameters, max_norm, **options)

    def optimizer_step(
        self,
        prepared: PreparedModel,
        optimizer: Optimizer,
        closure: Callable[[], Any] | None = None,
    ) -> Any:
        """Step the shards."""
        assert isinstance(prepared, ShardedPrepared)
        prepared.reshard()
        return super().optimizer_step(prepared, optimizer, closure)

    def explain(self, prepared: PreparedModel, error: RuntimeError) -> StratagemError | None:
        """Return a clearer error where code met shards; see `Strategy.explain`."""
        return explain_shards(error)

    @contextmanager
    def evaluation(self, prepared: PreparedModel) -> Iterator[None]:
        """Give every rank the buffers of the first rank that has them, which are saved."""
        buffers = prepared.original.buffers()
        broadcast_from_first(
            (buffer for buffer in buffers if not isinstance(buffer, DTensor)), self.replicas
        )
        yield

    def lead_evaluation_step(
        self, prepared: PreparedModel, announce: Callable[[int], None]
    ) -> AbstractContextManager[Any]:
        """Return a context that announces each all-gather of parameters."""
        assert isinstance(prepared, ShardedPrepared)
        return announcing(prepared.groups, announce)

    def follow_evaluation_step(self, prepared: PreparedModel, announced: Iterator[int]) -> None:
        """Take part in the all-gathers that another rank announces."""
        assert isinstance(prepared, ShardedPrepared)
        follow(prepared.groups, announced)

    def end_training(self, prepared: PreparedModel) -> None:
        """Check that the parameters which were trained are those of the model."""
        assert isinstance(prepared, ShardedPrepared)
        check_changes(prepared.groups)

    # -- state

    def model_state(self, prepared: PreparedModel) -> dict[str, Any]:
        """Return parameters and buffers: shards on every rank, if the format supports shards.

        For other formats, rank 0 returns whole copies on the CPU, gathered one tensor at a time,
        and other ranks return {}.
        """
        assert isinstance(prepared, ShardedPrepared)
        prepared.reshard()
        check_changes(prepared.groups)
        return self._by_owner(self._to_save(prepared.original.state_dict()))

    def load_model_state(
        self, prepared: PreparedModel, state: Mapping[str, Any], *, strict: bool = True
    ) -> None:
        """Load parameters; each rank takes, or reads, its shards of them."""
        assert isinstance(prepared, ShardedPrepared)
        prepared.reshard()
        own, state = prepared.original.state_dict(), state_without_wrapper(state)
        shards = {
            name: distribute_like(own[name], value) if _fits(own.get(name), value) else value
            for name, value in state.items()
        }
        super().load_model_state(prepared, shards, strict=strict)

    def optimizer_state(self, prepared: PreparedModel, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state by parameter names, with tensors in the form of `model_state`."""
        assert isinstance(prepared, ShardedPrepared)
        prepared.reshard()
        state = per_parameter_state(optimizer, named_state(optimizer, prepared.original))
        saved = {name: self._to_save(entry) for name, entry in state["state"].items()}
        keeps = is_owner(self.ranks) or self.checkpoint_io.supports_shards
        own = {**state, "state": saved if keeps else {}}
        return self._optimizer_by_owner(optimizer, own)

    def load_optimizer_state(
        self, prepared: PreparedModel, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> None:
        """Load a state; each rank takes, or reads, only its shards."""
        assert isinstance(prepared, ShardedPrepared)
        prepared.reshard()
        parameters = dict(prepared.original.named_parameters())
        state = per_parameter_state(optimizer, state)
        check_optimizer_state(optimizer, parameters, state)
        shards = {
            name: distribute_state(entry, parameters[name]) if name in parameters else entry
            for name, entry in state["state"].items()
        }
        load_named_state(optimizer, prepared.original, {**state, "state": shards})

    def _to_save(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return shards; or whole copies on rank 0, which every rank takes part in gathering."""
        if self.checkpoint_io.supports_shards:
            return {name: shards_of(tensor) for name, tensor in tensors.items()}
        gathered = {}
        for name, tensor in tensors.items():
            whole = whole_on_cpu(tensor)
            if is_owner(self.ranks):
                gathered[name] = whole
        return gathered


def _attributes_of(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the attributes that user code has set on parameters, to set them on the shards.

    Raises:
        ConfigurationError: a parameter has a hook, which would not be called.
    """
    found = {}
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ConfigurationError(
                f"the parameter {name!r} has a hook, which would not be called: a shard takes the "
                "parameter's place. Change gradients in on_before_optimizer_step, or use ddp"
            )
        # Not ours, which hold whole values.
        own = {
            key: value
            for key, value in vars(parameter).items()
            if not key.startswith("_stratagem_")
        }
        if own:
            found[name] = own
    return found


def _reshard_without_grad(root: nn.Module, inputs: Any, output: Any) -> None:
    """Free the parameters that a forward pass without gradients has gathered, or gathers ahead.

    No backward pass would free them, and a change of the gathered copies would be lost.
    """
    if not torch.is_grad_enabled():
        for part in root.modules():
            if isinstance(part, FSDPModule):
                for group in groups_of(part):
                    group.wait_for_unshard()
                part.reshard()


@lru_cache
def _device_mesh(
    kind: str, sizes: tuple[int, ...], names: tuple[str, ...], world: dist.ProcessGroup | None
) -> DeviceMesh:
    """Return a mesh over all ranks; one for all strategies of a group, since it makes others."""
    return init_device_mesh(kind, sizes, mesh_dim_names=names)


def _gather_once(root: nn.Module) -> None:
    """Let each group make the tensors that it gathers into, before anything else runs.

    They are made once. Were it under inference mode (validation before training), training could
    not use them.
    """
    parts = [part for part in root.modules() if isinstance(part, FSDPModule)]
    for part in parts:  # the root first, which the others learn of by it
        part.unshard()
        part.reshard()
    forget_evaluations(parts)
    keep_for_second_backward(parts)


def _root_of(module: nn.Module) -> nn.Module | None:
    """Return the root that a model was sharded under, if it was sharded before."""
    if isinstance(module, FSDPModule):
        return module
    for child in module.children():
        root: nn.Module | None = child.__dict__.get(_ROOT)
        if root is not None:
            return root
    return None


def _check_still_sharded(root: nn.Module) -> None:
    """Raise for a model that was partly built again after sharding.

    Raises:
        UserCodeError: names a parameter.
    """
    for name, parameter in root.named_parameters():
        if not is_replicated(parameter) and not isinstance(parameter, DTensor):
            raise UserCodeError(
                f"the model was sharded before, and has a new parameter {name!r} since: expected "
                "the same parameters. configure_model() is called before each run; begin it with "
                "`if self.net is not None: return`, so that it builds the model once"
            )


def _fits(own: Any, value: Any) -> bool:
    kinds = Tensor, LazyTensor
    return isinstance(own, Tensor) and isinstance(value, kinds) and own.shape == value.shape


def check_reshard_after_forward(given: Any) -> bool | int | None:
    """Return the choice for gathered parameters after forward.

    Raises:
        ConfigurationError: the choice does not have an accepted form.
    """
    if not isinstance(given, bool | None) and not (isinstance(given, int) and given >= 2):
        raise ConfigurationError(
            f"reshard_after_forward={given!r}: expected True, False, None, or a number of ranks "
            "from 2 that divides the number of shards"
        )
    return given
