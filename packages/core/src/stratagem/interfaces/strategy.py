"""Strategy: how a model is trained over devices and processes. Both front ends use this one."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from stratagem.compile import check_compilation
from stratagem.discovery.capabilities import Capabilities
from stratagem.errors import ConfigurationError
from stratagem.interfaces.accelerator import Accelerator
from stratagem.interfaces.checkpoint_io import CheckpointIO
from stratagem.interfaces.cluster_environment import ClusterEnvironment
from stratagem.interfaces.components import Components
from stratagem.interfaces.contract_checks import (
    check_capabilities,
    check_overrides,
    unexpected_arguments,
    why_not_initialized,
)
from stratagem.interfaces.launcher import Launcher
from stratagem.interfaces.precision import Precision
from stratagem.interfaces.prepared_model import (
    Optimizers,
    ParameterReferences,
    PreparedModel,
    make_optimizers,
)
from stratagem.interfaces.ranks import Ranks
from stratagem.interfaces.stepping import Stepping
from stratagem.plan.memory import StepMemory
from stratagem.state.state_dict import load_named_state, load_weights, named_state


class Strategy(Stepping, ABC):
    """How a model is trained over devices and processes.

    Call sequence, each on every rank and in this order:
        1. `__init__`, by the user or from a spec: options only; nothing is known of the machine.
           A subclass passes on what it does not take itself: `super().__init__(**components)`.
           Launchers such as "spawn" pickle the strategy after `bind`; what cannot be pickled
           belongs into `setup_environment` or later.
        2. `bind(components)`, before each launch, also in the process that launches: refuses what
           cannot be done, and calls `make_ranks()`.
        3. `setup_environment()`, on every rank once it runs: reads the ranks again, sets up the
           device and communication. Collectives (`ranks.all_reduce`, ...) work from here on.
        4. `setup(trainer)`, at the start of each run of a Trainer.
        5. `model_context()` around the code that builds a model.
        6. `set_batch_size` before a fit; then for each model `synchronize_batch_norm(module)`,
           where `sync_batchnorm` is set, and `prepare(module, optimizers)`: converts and moves it,
           calls `wrap(module)`, then makes the optimizers (without any, where `makes_optimizers`);
           `setup_optimizer` for one that a loop of the user's makes later. `PreparedModel.compile`
           follows, where `compile=...` asks for it. A module may be prepared again (validate and
           then fit, a second Trainer): `release` of what was prepared of it comes first.
           `input_converter()` before each loop, whose batches it converts.
        7. Under the Trainer, each optimizer step: `train_step(prepared, step, micro_batches)`, made
           of `accumulate_all` (with `no_sync`, `accumulate`, `backward`) and `finish_step` (with
           `clip_gradients`, `optimizer_step`). In a loop under Lite, `no_sync`, `backward`,
           `clip_gradients` and `optimizer_step` by themselves. An engine that does some of these
           itself overrides them; one that runs the whole step overrides `train_step`. Manual
           optimization runs in `backward_in_forward(prepared)`. Where a step has failed,
           `explain(prepared, error)`, on the rank that it failed on. `adopt_peer_state` comes
           before the first of them.
        8. Each evaluation: in the context `evaluation(prepared)`. After the last step of a fit:
           `end_training(prepared)`.
        9. A save calls `model_state`, `optimizer_state` for each optimizer, then `state`; a load
           `load_model_state`, `load_optimizer_state`, then `load_state`, whatever the order in a
           user's dict. On every rank, since they may communicate.
       10. `release(prepared)`: before the module is prepared again, and when another run takes
           over; `teardown()` at the end of the process.
       11. `estimate_memory` by `stratagem plan`, after `bind` alone.

    It knows nn.Module, Optimizer and tensors, and never Trainer or Module. `prepare` and `wrap` are
    handed a `StepModule`, whose `forward(method_name, *args)` calls the user's method, so that
    hooks of a wrapper fire whatever the method. `user_module(module)` returns the user's own.

    Args:
        accelerator, checkpoint_io, cluster_environment: objects or discovered names; None leaves
            the choice to the plan.
        precision_plugin: a Precision or the name of one; None leaves the choice to the plan.
        launcher: a launcher or its name; None takes the first in its capabilities.

    Attributes:
        capabilities: of the class; the object that its spec has too.
        accelerator, precision, checkpoint_io, cluster_environment: those of the plan, after `bind`;
            `precision_plugin` is the same object as `precision`.
        components: all of them, with device indices and how the Trainer takes its steps; after
            `bind`.
        ranks: the processes that train together; after `bind`, for communication after
            `setup_environment`.
        device: this rank's `torch.device`; after `setup_environment`.
        requested: the components that were asked for in `__init__`, by name.

    Raises:
        ConfigurationError: an argument that no class of the strategy takes.

    Example:
        >>> from stratagem import Trainer
        >>> from stratagem.strategies import SingleDeviceStrategy
        >>> class Counting(SingleDeviceStrategy):
        ...     steps = 0
        ...     def optimizer_step(self, prepared, optimizer, closure=None):
        ...         self.steps += 1
        ...         return super().optimizer_step(prepared, optimizer, closure)
        >>> Trainer(accelerator="cpu", strategy=Counting(), logger=False).plan.strategy.name
        'Counting'
    """

    capabilities: ClassVar[Capabilities]

    join_uneven_inputs: bool = False
    """Whether the Trainer lets a rank without batches keep step with those that have some."""

    accelerator: Accelerator
    precision: Precision
    precision_plugin: Precision
    checkpoint_io: CheckpointIO
    cluster_environment: ClusterEnvironment
    components: Components
    ranks: Ranks
    device: torch.device
    requested: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self,
        *,
        accelerator: Accelerator | str | None = None,
        precision_plugin: Precision | str | None = None,
        checkpoint_io: CheckpointIO | str | None = None,
        cluster_environment: ClusterEnvironment | str | None = None,
        launcher: Launcher | str | None = None,
        **unexpected: Any,
    ) -> None:
        requested = {
            "accelerator": accelerator,
            "precision": precision_plugin,
            "checkpoint_io": checkpoint_io,
            "cluster_environment": cluster_environment,
            "launcher": launcher,
        }
        if unexpected:
            raise unexpected_arguments(type(self), unexpected)
        self.requested = {k: v for k, v in requested.items() if v is not None}

    def bind(self, components: Components) -> None:
        """Take the components of the plan; once before each launch.

        Raises:
            ConfigurationError: a method of it, or of a component, does not take what it is called
                with; the class contradicts its capabilities; or its `__init__` does not pass
                `**components` on to this class's.
        """
        if why := why_not_initialized(self, Strategy):
            raise ConfigurationError(why)
        check_overrides(type(self), Strategy)
        check_capabilities(type(self), Strategy, self.capabilities)
        check_overrides(type(components.accelerator), Accelerator)
        check_overrides(type(components.precision), Precision)
        check_overrides(type(components.checkpoint_io), CheckpointIO)
        check_overrides(type(components.cluster_environment), ClusterEnvironment)
        self.components = components
        self.accelerator = components.accelerator
        self.precision = self.precision_plugin = components.precision
        self.checkpoint_io = components.checkpoint_io
        self.cluster_environment = components.cluster_environment
        if components.step is not None and components.step.compilation is not None:
            check_compilation(components.step.compilation, on_host=self.accelerator.is_host)
        self.precision.bind(components.accelerator)
        self.checkpoint_io.bind(components.accelerator)
        self.ranks = self.make_ranks()
        check_overrides(type(self.ranks), Ranks)

    @property
    def sync_batchnorm(self) -> bool:
        """Whether batch norm layers are to take their statistics over all ranks.

        Front ends then call `synchronize_batch_norm` before `prepare`.
        """
        step = self.components.step
        return step is not None and step.sync_batchnorm

    # -- environment

    def make_ranks(self) -> Ranks:
        """Return the processes that train together; by default this one alone.

        Called by `bind`, and again by `setup_environment`, since a launcher may have made this
        process another rank.
        """
        return Ranks()

    def setup_environment(self) -> None:
        """Set up the device (and, in subclasses, communication)."""
        self.ranks = self.make_ranks()
        devices = self.components.devices
        self.device = self.accelerator.device(devices[self.ranks.local_rank])
        self.ranks.device = self.device
        self.accelerator.setup()
        self.accelerator.setup_device(self.device)

    # -- what a front end is going to do

    def set_batch_size(self, batch_size: int | None) -> None:
        """Learn this rank's batch size, from the Trainer's loader, before `prepare`.

        Args:
            batch_size: samples in a batch; None: the loader does not say.
        """

    @property
    def makes_optimizers(self) -> bool:
        """Whether `prepare` makes the optimizer by the engine's config where it is given none."""
        return False

    def setup(self, trainer: Any) -> None:
        """Do more before a Trainer prepares a model, at the start of each of its runs."""

    def teardown(self) -> None:
        """Release communication and device; the strategy can be bound again."""
        self.checkpoint_io.teardown()
        self.cluster_environment.teardown()
        self.accelerator.teardown()

    # -- model and optimizers

    def model_context(self) -> AbstractContextManager[Any]:
        """Return a context in which a model's constructor makes parameters as they will be kept.

        Sharding strategies build on the meta device or shard each layer as it is made.
        """
        return nullcontext()

    def synchronize_batch_norm(self, module: nn.Module) -> None:
        """Let a model's batch norm layers take their statistics over all ranks, in place.

        Parameters, buffers and their names stay. With one rank there is nothing to do.

        Raises:
            ConfigurationError: this strategy has several ranks, and no way to do it.
        """
        if self.ranks.world_size > 1:
            raise ConfigurationError(
                f"sync_batchnorm=True: {type(self).__name__} has no way to take batch statistics "
                "over all ranks; leave it out, or use strategy='ddp'"
            )

    def prepare(
        self, module: nn.Module, optimizers: Optimizers = (), *, move_to_device: bool = True
    ) -> PreparedModel:
        """Return the model as this strategy runs it: converted, moved, wrapped.

        Args:
            module: a `StepModule` around the user's module, on any device.
            optimizers: a function that makes them, called after wrapping and sharding; or existing
                ones, where `capabilities.accepts_existing_optimizers`.
            move_to_device: move the parameters to this rank's device.
        """
        references = ParameterReferences(module, () if callable(optimizers) else optimizers)
        module = self.precision.convert_module(module)
        if move_to_device:
            module = module.to(self.device)
        references.restore(module)
        wrapped: Any = self.wrap(module)
        if not isinstance(wrapped, nn.Module):
            raise ConfigurationError(
                f"{type(self).__name__}.wrap(module) returned {wrapped!r}; expected an nn.Module, "
                "what training calls: return the module itself where there is nothing to wrap"
            )
        return PreparedModel(wrapped, module, make_optimizers(optimizers), evaluation_module=module)

    def setup_optimizer(self, prepared: PreparedModel, optimizer: Optimizer) -> Optimizer:
        """Return an optimizer of a prepared model that was made afterwards, as it will be stepped.

        Only a hand-written loop has one.
        """
        return optimizer

    def wrap(self, module: nn.Module) -> nn.Module:
        """Return what training calls; before the optimizers are made. By default the module.

        Args:
            module: a `StepModule`; layers are replaced in place, in `user_module(module)`.
        """
        return module

    def input_converter(self) -> Callable[[Any], Any] | None:
        """Return what moves a batch to the device and converts it, or None: nothing to do."""
        convert = self.precision.input_converter()
        if self.accelerator.is_host:
            return convert
        move = self.accelerator.batch_mover(self.device)
        return move if convert is None else lambda batch: convert(move(batch))

    # -- the life of a prepared model

    def evaluation(self, prepared: PreparedModel) -> AbstractContextManager[Any]:
        """Return a context for evaluating the model, entered by all ranks before the first batch.

        Entering it makes alike what ranks hold, where that may differ (buffers, a replica of each
        rank's own); leaving it puts back what training goes on from.
        """
        return nullcontext()

    def adopt_peer_state(
        self, prepared: PreparedModel, checkpoint: Callable[[], dict[str, Any]]
    ) -> dict[str, Any] | None:
        """Return a checkpoint of a run that trains already, to go on from; None: from here.

        For replicas that are runs of their own, which come and go. Called by the Trainer on every
        rank before the first step of a fit, after a checkpoint that the user has named was loaded;
        what this returns is loaded as a file would be.

        Args:
            prepared: the model.
            checkpoint: returns this run as a file would hold it, for a replica that joins; called
                on every rank alike, here or at the beginning of a later `train_step`. Tensors
                alias the live ones.
        """
        return None

    def end_training(self, prepared: PreparedModel) -> None:
        """Called by the Trainer on every rank after the last step of a fit that ends in order.

        Before the callbacks' `on_train_end`: what it changes is what they save.
        """

    def release(self, prepared: PreparedModel) -> None:
        """Free what this holds for a model (an engine, buffers), which may be prepared again.

        Called before the same module is prepared again, by this strategy or another one, before a
        run of the same Trainer with another module, and when another Trainer begins a run.
        `prepared` is not trained any more, but may still be evaluated or saved.

        It must not communicate. What a rank has collected as garbage is not released there, so
        that other ranks may be the only ones to call this.
        """

    def estimate_memory(
        self, phases: Mapping[str, StepMemory], shards: Collection[str]
    ) -> dict[str, StepMemory]:
        """Return what a rank holds in each phase of a step.

        Called by a plan if the step cannot be simulated without memory, once the strategy is bound.

        Args:
            phases: what a process holds that trains the model alone, by the phase of the step:
                "forward", "backward", "step".
            shards: what the spec says that ranks divide.
        """
        ranks = self.components.device_count
        trained = max(memory.gradients for memory in phases.values())
        # Reduced and gathered; gathered once more for backward, where parameters are divided.
        sent = trained * (3 if "parameters" in shards else 2) if ranks > 1 else 0
        return {
            phase: replace(memory.divided(ranks, shards), sent=sent)
            for phase, memory in phases.items()
        }

    # -- state

    def model_state(self, prepared: PreparedModel) -> dict[str, Any]:
        """Return parameters and buffers by their canonical names.

        They alias the live ones: write or copy them before the next step. A strategy with sharded
        state returns `Shards` on every rank where `checkpoint_io.supports_shards`, and otherwise
        whole tensors on rank 0.
        """
        return prepared.original.state_dict()

    def load_model_state(
        self, prepared: PreparedModel, state: Mapping[str, Any], *, strict: bool = True
    ) -> None:
        """Load what `model_state` returned, under this strategy or another one.

        Args:
            prepared: the model.
            state: whole tensors by name; or what `load_checkpoint` of this strategy put there.
            strict: refuse missing and unexpected names.

        Raises:
            CheckpointMismatchError: names or shapes differ; lists them.
        """
        load_weights(prepared.original, state, strict=strict)

    def optimizer_state(self, prepared: PreparedModel, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state with parameter names in the place of indices."""
        return named_state(optimizer, prepared.original)

    def load_optimizer_state(
        self, prepared: PreparedModel, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> None:
        """Load what `optimizer_state` returned.

        Raises:
            CheckpointMismatchError: it belongs to other parameters; lists them.
        """
        load_named_state(optimizer, prepared.original, state)

    def state(self, prepared: PreparedModel, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """Return this strategy's own state for a checkpoint; {} where it has none.

        For what is neither a weight nor an optimizer's: weights as of the last average, a count of
        rounds. Weights-only-safe data and tensors, the same on every rank, since rank 0's is saved;
        what differs by rank goes into `Shards`, where `checkpoint_io.supports_shards`. Loading
        under a strategy of another class leaves it out.

        Args:
            prepared: the model.
            optimizers: those that are saved with it.
        """
        return {}

    def load_state(
        self, prepared: PreparedModel, optimizers: Sequence[Optimizer], state: Mapping[str, Any]
    ) -> None:
        """Load what `state` returned, after everything else was loaded.

        Not called for a checkpoint that has none of this class.
        """
