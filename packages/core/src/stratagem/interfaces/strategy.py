"""Strategy: the interface by which both front ends train a model over devices and processes."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from stratagem.compile import check_compilation
from stratagem.discovery.capabilities import Capabilities
from stratagem.discovery.former import check_former_values, with_former_names
from stratagem.discovery.specs import load_target
from stratagem.errors import ConfigurationError
from stratagem.interfaces.accelerator import Accelerator
from stratagem.interfaces.checkpoint_io import CheckpointIO
from stratagem.interfaces.cluster_environment import ClusterEnvironment
from stratagem.interfaces.components import Components
from stratagem.interfaces.contract_checks import (
    check_capabilities,
    check_overrides,
    unexpected_arguments,
)
from stratagem.interfaces.launcher import Launcher
from stratagem.interfaces.precision import Precision
from stratagem.interfaces.prepared_model import (
    Optimizers,
    ParameterReferences,
    PreparedModel,
    make_optimizers,
    user_module,
)
from stratagem.interfaces.ranks import Ranks
from stratagem.interfaces.stepping import Stepping
from stratagem.interfaces.user_names import UserNames
from stratagem.plan.memory import StepMemory
from stratagem.state.state_dict import load_named_state, load_weights, named_state

_CHECKPOINTING, _WHAT = "stratagem.strategies", "activation checkpointing"


@with_former_names
class Strategy(Stepping, UserNames, ABC):
    """Trains a model over devices and processes.

    Call sequence, each on every rank and in this order:
        1. `__init__`, by the user or from a spec, stores options only; the machine is not known
           yet. A subclass passes the other arguments on: `super().__init__(**components)`.
           Launchers such as "spawn" pickle the strategy after `bind`, so create objects that cannot
           be pickled in `setup_environment` or later.
        2. `bind(components)`, before each launch, also in the launching process. It rejects
           unsupported requests, by `check_activation_checkpointing(choice)` among others, and calls
           `make_ranks()`. A fit calls `check_model(model)` before the launch.
        3. `setup_environment()`, on every rank after the launch. It reads the ranks again, and sets
           up the device and communication. From here on collectives (`ranks.all_reduce`, ...) work.
        4. `setup(trainer)`, at the start of each run of a Trainer.
        5. `model_context()` around the code that builds a model.
        6. `set_batch_size` before a fit. Then, for each model, `synchronize_batch_norm(module)` if
           `sync_batchnorm` is set, `checkpoint_activations(module, choice)` if the step options
           have a choice, and `prepare(module, optimizers)`. `prepare` converts and moves
           the module, calls `wrap(module)`, then makes the optimizers (if `makes_optimizers`,
           without being passed any). `setup_optimizer` prepares an optimizer that a user's loop
           makes later. `PreparedModel.compile` follows, if `compile=...` requests it. A module may
           be prepared again (validate and then fit, a second Trainer), after `release` of its
           previous `PreparedModel`. `input_converter()` is called before each loop, and converts
           its batches.
        7. Under the Trainer, `train_step(prepared, step, micro_batches)` for each optimizer step.
           It consists of `accumulate_all` (with `no_sync`, `accumulate`, `backward`) and
           `finish_step` (with `clip_gradients`, `optimizer_step`). `clip_gradients` calls
           `clip_grad_norm` or `clip_grad_value`. A loop under Lite calls
           `no_sync`, `backward`, `clip_gradients` and `optimizer_step` directly. An engine that
           does some of these itself overrides them; an engine that runs the whole step overrides
           `train_step`. Manual optimization runs in `backward_in_forward(prepared)`. If a step
           fails, `explain(prepared, error)` is called on the failing rank. `adopt_peer_state` is
           called before the first step.
        8. Each evaluation runs in the context `evaluation(prepared)`. If some ranks have fewer
           batches and `follows_evaluation` is True, the others' last steps are followed: the first
           rank with a batch runs its step in `lead_evaluation_step`, and each rank without a batch
           calls `follow_evaluation_step`. After the last step of a fit: `end_training(prepared)`.
        9. A save calls `model_state`, `optimizer_state` for each optimizer, then `state`. A load
           calls `load_model_state`, `load_optimizer_state`, then `load_state`, whatever the order
           in a user's dict. Every rank calls them, since they may communicate.
       10. `release(prepared)`, before the module is prepared again and when another run starts;
           `teardown()`, once, when its front end is gone or the process ends.
       11. `candidates`, of the class, and `estimate_memory`, after `bind` alone, by
           `stratagem plan`.
       12. Users call `barrier`, `broadcast`, `all_gather`, `all_reduce`, `reduce` and
           `reduce_boolean_decision` on every rank, after the launch. Core never calls them, and a
           subclass may use their names for something else.

    A strategy works with nn.Module, Optimizer and tensors, and never with Trainer or Module.
    `prepare` and `wrap` receive a `StepModule`, whose `forward(method_name, *args)` calls the
    user's method, so that a wrapper's hooks run for every method. `user_module(module)` returns the
    user's module.

    Args:
        accelerator, checkpoint_io, cluster_environment: objects or discovered names. With None, the
            plan chooses.
        precision_plugin: a Precision or its name. With None, the plan chooses.
        launcher: a launcher or its name. With None, the first launcher in the capabilities is used.

    Attributes:
        capabilities: the capabilities of the class, the same object as in its spec.
        accelerator, precision, checkpoint_io, cluster_environment: the plan's components, after
            `bind`; `precision_plugin` is the same object as `precision`.
        components: all components, with device indices and the options of the Trainer's steps;
            after `bind`.
        ranks: the processes that train together; after `bind`. They communicate after
            `setup_environment`.
        device: this rank's `torch.device`; after `setup_environment`.
        requested: the components that were passed to `__init__`, by name.
        global_rank, local_rank, node_rank, world_size, is_global_zero: the place of this process,
            for users. A subclass may use these names and the next three for something else.
        root_device, model, optimizers: the device, the model and the optimizers of the Trainer's
            run, for users.

    Raises:
        ConfigurationError: no class of the strategy takes an argument.

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
    """Whether a rank without batches follows the steps of the other ranks under the Trainer."""

    accelerator: Accelerator
    precision: Precision
    precision_plugin: Precision
    checkpoint_io: CheckpointIO
    cluster_environment: ClusterEnvironment
    components: Components
    ranks: Ranks
    device: torch.device
    requested: Mapping[str, Any] = MappingProxyType({})
    _set_up: Any = None  # a set-up without its teardown; see runtime/set_up.py

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

    def __del__(self) -> None:
        """Hand a strategy that was set up to its teardown, which comes later."""
        if self._set_up is not None:
            self._set_up.left = self

    def bind(self, components: Components) -> None:
        """Set the plan's components; called once before each launch.

        Raises:
            ConfigurationError: a method of the strategy or of a component has the wrong signature;
                the class contradicts its capabilities; or its `__init__` does not call
                `Strategy.__init__`.
        """
        if "requested" not in vars(self):
            raise ConfigurationError(
                f"{type(self).__name__}.__init__ does not call super().__init__(**components): "
                "call it first"
            )
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
        if components.step is not None and components.step.activation_checkpointing is not None:
            self.check_activation_checkpointing(components.step.activation_checkpointing)
        self.precision.bind(components.accelerator)
        self.checkpoint_io.bind(components.accelerator)
        self.ranks = self.make_ranks()
        check_overrides(type(self.ranks), Ranks)
        check_former_values(self.ranks)

    @property
    def sync_batchnorm(self) -> bool:
        """Whether batch norm layers compute their statistics over all ranks.

        If so, front ends call `synchronize_batch_norm` before `prepare`.
        """
        step = self.components.step
        return step is not None and step.sync_batchnorm

    # -- environment

    def make_ranks(self) -> Ranks:
        """Return the processes that train together; by default only this process.

        `bind` calls this method, and `setup_environment` calls it again, since the launch may have
        changed this process's rank.
        """
        return Ranks()

    def setup_environment(self) -> None:
        """Set up the device and, in subclasses, communication."""
        self.ranks = self.make_ranks()
        devices = self.components.devices
        self.device = self.accelerator.device(devices[self.ranks.local_rank])
        self.ranks.device = self.device
        self.accelerator.setup()
        self.accelerator.setup_device(self.device)

    # -- announcements of a front end

    def set_batch_size(self, batch_size: int | None) -> None:
        """Set this rank's batch size; the Trainer reads it from the loader before `prepare`.

        Args:
            batch_size: the number of samples in a batch; None if unknown.
        """

    @property
    def makes_optimizers(self) -> bool:
        """Whether `prepare` without optimizers makes the optimizer of the engine's config."""
        return False

    def setup(self, trainer: Any) -> None:
        """Run additional setup at the start of each Trainer run, before the model is prepared."""

    def teardown(self) -> None:
        """Release communication and device; the strategy can be bound again.

        Called once for each strategy that was set up. If its Trainer or Lite is gone, it is called
        before another front end is set up, otherwise at the end of the process. Release what
        `setup_environment` acquired, such as process groups. Fits of one process share the default
        process group, which is not the strategy's to destroy. This method must not communicate:
        ranks may call it at different times.
        """
        self.checkpoint_io.teardown()
        self.cluster_environment.teardown()
        self.accelerator.teardown()

    # -- model and optimizers

    def model_context(self) -> AbstractContextManager[Any]:
        """Return a context in which a model's constructor creates parameters in their final form.

        Sharding strategies create parameters on the meta device, or shard each new layer.
        """
        return nullcontext()

    def check_model(self, model: nn.Module) -> None:
        """Refuse a model that the strategy cannot train; by default, refuse nothing.

        `Trainer.fit` calls it before processes start. A model with `configure_model` may lack
        layers at this time.

        Args:
            model: the user's module.

        Raises:
            ConfigurationError: the strategy cannot train the model.
        """

    def synchronize_batch_norm(self, module: nn.Module) -> None:
        """Make a model's batch norm layers compute their statistics over all ranks, in place.

        Parameters, buffers and their names do not change. With one rank, this does nothing.

        Raises:
            ConfigurationError: this strategy has several ranks, but no synchronized batch norm.
        """
        if self.ranks.world_size > 1:
            raise ConfigurationError(
                f"sync_batchnorm=True: {type(self).__name__} has no way to take batch statistics "
                "over all ranks; leave it out, or use strategy='ddp'"
            )

    def check_activation_checkpointing(self, choice: Any) -> None:
        """Check the `activation_checkpointing` of the step options; called by `bind`.

        Raises:
            ConfigurationError: the strategy cannot compute activations again, or the choice has no
                accepted form.
        """
        load_target(f"{_CHECKPOINTING}:check_activation_checkpointing", what=_WHAT)(choice)

    def checkpoint_activations(self, module: nn.Module, choice: Any) -> None:
        """Make modules of a model compute their activations again in backward, in place.

        Front ends call it before `prepare`, if the step options have such a choice.

        Args:
            module: a `StepModule` around the user's module.
            choice: the `activation_checkpointing` of the step options.
        """
        apply = load_target(f"{_CHECKPOINTING}:apply_activation_checkpointing", what=_WHAT)
        apply(user_module(module), choice)

    def prepare(
        self, module: nn.Module, optimizers: Optimizers = (), *, move_to_device: bool = True
    ) -> PreparedModel:
        """Return the model converted, moved and wrapped for this strategy, with its optimizers.

        Args:
            module: a `StepModule` around the user's module, on any device.
            optimizers: a function that makes the optimizers, called after wrapping and sharding.
                If `capabilities.accepts_existing_optimizers`, also existing optimizers.
            move_to_device: whether to move the parameters to this rank's device.
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
        """Return the optimizer to step, for an optimizer made after its model was prepared.

        Only hand-written loops make an optimizer this late.
        """
        return optimizer

    def wrap(self, module: nn.Module) -> nn.Module:
        """Return the module that training calls, such as a wrapper; by default `module` itself.

        `prepare` calls this method before it makes the optimizers.

        Args:
            module: a `StepModule`. Replace layers in place, in `user_module(module)`.
        """
        return module

    def input_converter(self) -> Callable[[Any], Any] | None:
        """Return a function that moves and converts a batch, if batches need either."""
        convert = self.precision.input_converter()
        if self.accelerator.is_host:
            return convert
        move = self.accelerator.batch_mover(self.device)
        return move if convert is None else lambda batch: convert(move(batch))

    # -- the life of a prepared model

    def evaluation(self, prepared: PreparedModel) -> AbstractContextManager[Any]:
        """Return a context for evaluating the model; all ranks enter it before the first batch.

        On entry, the context synchronizes state that may differ between ranks (buffers, a separate
        replica on each rank). On exit, it restores the state for training.
        """
        return nullcontext()

    @property
    def follows_evaluation(self) -> bool:
        """Whether a rank without a batch can follow the evaluation steps of other ranks.

        By default `capabilities.follows_evaluation`. Override this property if it depends on the
        strategy's options. If both this and `capabilities.allows_uneven_eval` are False, ranks
        repeat samples, so that all of them run the same number of batches.
        """
        return self.capabilities.follows_evaluation

    def lead_evaluation_step(
        self, prepared: PreparedModel, announce: Callable[[int], None]
    ) -> AbstractContextManager[Any]:
        """Return a context for an evaluation step that ranks without a batch follow.

        Only the first rank that has a batch enters it, around the step and the hooks of its batch,
        which may call the model several times. Other ranks with a batch run their step as usual.

        Args:
            prepared: the model.
            announce: call it with a number before each collective operation of a forward, such as
                `2 * index` to gather the parameters of a module, and `2 * index + 1` to free them.
                The number is not negative.
        """
        return nullcontext()

    def follow_evaluation_step(self, prepared: PreparedModel, announced: Iterator[int]) -> None:
        """Take part in the collective operations of a step; called on a rank without a batch.

        Called once for each step that other ranks run without this rank, without gradients and
        within `evaluation(prepared)`. It runs no code of the user.

        Args:
            prepared: the model.
            announced: yields the numbers that `lead_evaluation_step` announces on the first rank
                that has a batch, without delay, and ends with that step. Perform the operation of
                each number before the next one.
        """
        for _ in announced:
            pass

    def adopt_peer_state(
        self, prepared: PreparedModel, checkpoint: Callable[[], dict[str, Any]]
    ) -> dict[str, Any] | None:
        """Return a checkpoint of a peer run that already trains, if this run is to load it.

        Return None to keep this run's own state.

        For replicas that are separate runs, which may join and leave. The Trainer calls this method
        on every rank before the first step of a fit, after it has loaded the user's checkpoint. It
        loads the returned checkpoint like a file.

        Args:
            prepared: the model.
            checkpoint: returns this run's checkpoint, for a replica that joins. Call it on every
                rank, here or at the beginning of a later `train_step`. Its tensors alias the live
                tensors.
        """
        return None

    def end_training(self, prepared: PreparedModel) -> None:
        """Called by the Trainer on every rank after the last step of a fit that ends normally.

        This runs before the callbacks' `on_train_end`, so that they save the changed model.
        """

    def release(self, prepared: PreparedModel) -> None:
        """Free the resources of a prepared model (an engine, buffers).

        Called before a strategy prepares the same module again, before the same Trainer runs with
        another module, and when another Trainer begins a run. `prepared` is not trained any more,
        but may still be evaluated or saved.

        This method must not communicate, since not every rank may call it: a model that a rank has
        already garbage-collected is not released on that rank.
        """

    @classmethod
    def candidates(cls, devices: int, num_nodes: int) -> Sequence[Mapping[str, Any]]:
        """Return the configurations that are worth comparing on a cluster, the simplest first.

        `stratagem plan` plans each of them. The default is one configuration, without arguments. A
        strategy with sizes returns a few that fit the cluster; a model may not allow all of them.
        This method runs before a process group exists.

        Args:
            devices: the number of devices on each node.
            num_nodes: the number of nodes.

        Returns:
            Arguments of `__init__`, as data that can be pickled.

        Example:
            >>> from stratagem.strategies import DDPStrategy
            >>> list(DDPStrategy.candidates(8, 1))
            [{}]
        """
        return ({},)

    def estimate_memory(
        self, phases: Mapping[str, StepMemory], shards: Collection[str]
    ) -> dict[str, StepMemory]:
        """Return the memory of a rank in each phase of a step.

        A plan calls this after `bind`, if it cannot simulate the step without memory.

        Args:
            phases: the memory of a process that trains the model alone, by the phase of the step:
                "forward", "backward", "step".
            shards: the kinds of state that ranks divide, as in the spec.
        """
        ranks = self.components.device_count
        trained = max(memory.gradients for memory in phases.values())
        # Reduced and gathered; sharded parameters are gathered once more for backward.
        sent = trained * (3 if "parameters" in shards else 2) if ranks > 1 else 0
        return {
            phase: replace(memory.divided(ranks, shards), sent=sent)
            for phase, memory in phases.items()
        }

    # -- state

    def model_state(self, prepared: PreparedModel) -> dict[str, Any]:
        """Return parameters and buffers by their canonical names.

        The tensors alias the live ones: write or copy them before the next step. A strategy with
        sharded state returns `Shards` on every rank if `checkpoint_io.supports_shards`, and
        otherwise whole tensors on rank 0.
        """
        return prepared.original.state_dict()

    def load_model_state(
        self, prepared: PreparedModel, state: Mapping[str, Any], *, strict: bool = True
    ) -> None:
        """Load a state that `model_state` returned, under this strategy or another one.

        Args:
            prepared: the model.
            state: unsharded tensors by name, or the `LazyTensor`s of `open_checkpoint`.
            strict: raise an error for missing and unexpected names.

        Raises:
            CheckpointMismatchError: names or shapes differ. The error lists them.
        """
        load_weights(prepared.original, state, strict=strict)

    def optimizer_state(self, prepared: PreparedModel, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state, keyed by parameter names instead of indices."""
        return named_state(optimizer, prepared.original)

    def load_optimizer_state(
        self, prepared: PreparedModel, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> None:
        """Load a state that `optimizer_state` returned.

        Raises:
            CheckpointMismatchError: the state belongs to other parameters. The error lists them.
        """
        load_named_state(optimizer, prepared.original, state)

    def state(self, prepared: PreparedModel, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        """Return this strategy's own state for a checkpoint; by default {}.

        It holds state other than the weights and the optimizers' state: weights as of the last
        average, a count of rounds. Use weights-only-safe data and tensors. Values must be the same
        on every rank, since only rank 0's are saved. Put values that differ between ranks into
        `Shards`, if `checkpoint_io.supports_shards`. Strategies of another class ignore this state.

        Args:
            prepared: the model.
            optimizers: the optimizers that are saved with the model.
        """
        return {}

    def load_state(
        self, prepared: PreparedModel, optimizers: Sequence[Optimizer], state: Mapping[str, Any]
    ) -> None:
        """Load a state that `state` returned, after the rest of the checkpoint was loaded.

        Not called if the checkpoint has no state of this class.
        """
