"""DeepSpeedStrategy: ZeRO, by DeepSpeed's engine."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.errors import CommunicationError, ConfigurationError
from stratagem.strategies import (
    Components,
    GradientClip,
    Optimizers,
    PreparedModel,
    StepMemory,
    make_optimizers,
)
from stratagem_deepspeed.config import (
    Facts,
    buffers_on_device,
    engine_config,
    limits_of,
    offload_device,
    offloaded_to_host,
    stage_of,
    swap_buffers,
    why_not_followed,
    without_needless_offload,
)
from stratagem_deepspeed.config_file import read_config
from stratagem_deepspeed.engine import EngineModule, restored_linear
from stratagem_deepspeed.following import Following
from stratagem_deepspeed.library import (
    import_deepspeed,
    installed_version,
    is_simulated,
    quiet_rank,
    release_groups,
    simulated_sharding,
)
from stratagem_deepspeed.optimizers import (
    check_held,
    only_one,
    suited,
    use_torchs_adam,
)
from stratagem_deepspeed.options import Options
from stratagem_deepspeed.plugin import DEEPSPEED
from stratagem_deepspeed.preparation import (
    build_ops,
    can_fuse_adam,
    check_elements,
    check_float16,
    check_parameters,
    checkpointing_options,
    facts_of_steps,
    is_sharded,
    share_start,
)
from stratagem_deepspeed.state import EngineState
from stratagem_torch.parallel import (
    ActivationCheckpointing,
    ParallelStrategy,
    apply_activation_checkpointing,
    check_activation_checkpointing,
    check_given_once,
    return_freed_memory,
    use_huge_pages,
)


class DeepSpeedStrategy(ParallelStrategy):
    """Shards optimizer state, gradients and parameters over ranks by DeepSpeed (ZeRO).

    Runs on CPU over gloo as on GPU over nccl. The engine performs a step: it clips by norm,
    according to `Trainer(gradient_clip_val=...)` or the config, and completes the gradients that
    backward passes have accumulated since the previous step. A loop under Lite is therefore the
    same as for any strategy: it divides the loss, and steps the optimizer at any time.

    `Lite.init_module()` and `Module.configure_model()` build a model of stage 3 in shards
    (`deepspeed.zero.Init`), layer by layer, with rank 0's values.

    An engine keeps float32 weights for the optimizer. "bf16-mixed" and "bf16-true" both select its
    bfloat16 mode: parameters, activations and gradients in bfloat16, optimizer state in float32;
    "16-mixed" and "16-true" its float16 mode, with loss scaling.

    One model takes one optimizer with an elementwise step: DeepSpeed steps flat slices. Ranks train
    on equal numbers of batches. An evaluation reads each sample once. Only stage 3 with parameters
    on NVMe, quantized weights, `zero_hpz_partition_size`, all-reduces for parameters or ZenFlow
    repeats samples if ranks would run different numbers of batches.

    Args:
        stage: 1 shards optimizer state, 2 (the default) gradients too, 3 parameters too; 0 nothing.
        offload_optimizer: keep optimizer state in host memory, and step there; torch's Adam and
            AdamW become DeepSpeedCPUAdam, unless the config has zero_force_ds_cpu_optimizer=false.
        offload_parameters: keep parameters in host memory too; only at stage 3, ignored below.
        offload_optimizer_device, offload_params_device: "cpu" (the default) or "nvme".
        nvme_path: a folder on the NVMe device; default "/local_nvme".
        params_buffer_count, params_buffer_size, max_in_cpu: buffers for parameters on NVMe, their
            elements, and elements of parameters that stay in host memory.
        optimizer_buffer_count: buffers for optimizer state on NVMe.
        pin_memory: keep offloaded tensors in page-locked memory; default False.
        block_size, queue_depth, single_submit, overlap_events, thread_count: options of reads and
            writes on NVMe; see DeepSpeed's `aio`.
        sub_group_size: elements that a step works on at a time; stage 3; default 1e9, and 1e7 on
            the CPU.
        allgather_bucket_size, reduce_bucket_size: elements communicated at a time; default 2e8, and
            1e7 on the CPU.
        allgather_partitions, reduce_scatter, overlap_comm, contiguous_gradients: see DeepSpeed's
            `zero_optimization`; the last two are on by default.
        loss_scale: the loss scale of float16; 0: dynamic.
        initial_scale_power, loss_scale_window, hysteresis, min_loss_scale: options of a dynamic
            loss scale.
        activation_checkpointing: compute activations of modules again in backward: True for the
            layers of ModuleLists and Sequentials, classes, or a function of a module.
        partition_activations, cpu_checkpointing, contiguous_memory_optimization,
            synchronize_checkpoint_boundary: options of `deepspeed.checkpointing.checkpoint`,
            which user code calls.
        config: DeepSpeed's own config, a dict or the path of a JSON file. "auto" values are filled;
            values that contradict an argument raise an error.
        save_full_weights: gather checkpoints on rank 0, which writes one file. By default every
            rank writes its part into a directory; `stratagem checkpoint consolidate` and `convert`
            turn the directory into a single file.
        **components: see `ParallelStrategy`.

    Raises:
        ConfigurationError: DeepSpeed is not installed, the config cannot be read or has an unknown
            key, or options contradict each other.

    Example:
        >>> from stratagem.strategies import DeepSpeedStrategy
        >>> DeepSpeedStrategy(stage=3, config={"zero_optimization": {"stage": "auto"}}).stage
        3
    """

    capabilities = DEEPSPEED

    def __init__(
        self,
        *,
        stage: int | None = None,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        offload_optimizer_device: str | None = None,
        offload_params_device: str | None = None,
        nvme_path: str | os.PathLike[str] | None = None,
        params_buffer_count: int | None = None,
        params_buffer_size: int | None = None,
        max_in_cpu: int | None = None,
        optimizer_buffer_count: int | None = None,
        pin_memory: bool | None = None,
        block_size: int | None = None,
        queue_depth: int | None = None,
        single_submit: bool | None = None,
        overlap_events: bool | None = None,
        thread_count: int | None = None,
        sub_group_size: int | None = None,
        allgather_bucket_size: int | None = None,
        reduce_bucket_size: int | None = None,
        allgather_partitions: bool | None = None,
        reduce_scatter: bool | None = None,
        overlap_comm: bool | None = None,
        contiguous_gradients: bool | None = None,
        loss_scale: float | None = None,
        initial_scale_power: int | None = None,
        loss_scale_window: int | None = None,
        hysteresis: int | None = None,
        min_loss_scale: float | None = None,
        activation_checkpointing: ActivationCheckpointing = None,
        partition_activations: bool | None = None,
        cpu_checkpointing: bool | None = None,
        contiguous_memory_optimization: bool | None = None,
        synchronize_checkpoint_boundary: bool | None = None,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        save_full_weights: bool = False,
        **components: Any,
    ) -> None:
        arguments = dict(locals())  # first statement: locals() has the arguments only
        if save_full_weights and components.get("checkpoint_io") is None:
            components["checkpoint_io"] = "single_file"
        super().__init__(**components)
        installed_version()
        self.activation_checkpointing = check_activation_checkpointing(activation_checkpointing)
        self.user_config = read_config(config)
        self.options = without_needless_offload(Options.among(arguments), self.user_config)
        self.facts = Facts()
        self._config()
        self._engines: list[EngineModule] = []

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return stage_of(self._config())

    def _config(self, **facts: Any) -> dict[str, Any]:
        """Return the engine's config from known facts and from these facts.

        Raises:
            ConfigurationError: a fact contradicts the config.
        """
        return engine_config(self.options, self.user_config, replace(self.facts, **facts))

    @property
    def makes_optimizers(self) -> bool:
        """Whether the config defines the optimizer; see `Strategy.makes_optimizers`."""
        return "optimizer" in self.user_config

    # -- facts of the run

    def bind(self, components: Components) -> None:
        """Take and check the plan's components, and build the ops that are needed."""
        super().bind(components)
        kind = components.accelerator.device(components.devices[0]).type
        self.facts = replace(
            self.facts,
            precision=components.precision.name,
            world_size=components.device_count,
            # A plan simulates the step on the host, with the operations of the engine on other
            # devices.
            device_type=getattr(components.accelerator, "plans_for", kind),
            **facts_of_steps(components.step),
        )
        config = self._config()
        if kind == "cpu":
            use_huge_pages()
        check_float16(config, kind, components.precision.name)
        if not is_simulated():
            build_ops(config, kind)

    def set_batch_size(self, batch_size: int | None) -> None:
        """Take the training loader's batch size; see `Strategy.set_batch_size`."""
        self.facts = replace(self.facts, batch_size=batch_size or 0)

    def estimate_memory(
        self, phases: Mapping[str, StepMemory], shards: Collection[str]
    ) -> dict[str, StepMemory]:
        """Return the same with the engine's copy of the weights and its two buffers, roughly."""
        buffers = 2 * max(memory.gradients for memory in phases.values())
        with_copies = {
            phase: replace(
                memory,
                optimizer=memory.optimizer + memory.parameters,
                working=memory.working + buffers,
            )
            for phase, memory in phases.items()
        }
        return super().estimate_memory(with_copies, shards)

    def split_offload(self, offloaded: Mapping[str, int]) -> tuple[int, int]:
        """Return the bytes that a rank has in the host and on NVMe, for `stratagem plan`.

        Args:
            offloaded: bytes of "parameters", "gradients" and "optimizer" that the spec offloads.
        """
        return swap_buffers(self._config(), offloaded)

    def kept_on_device(self, largest: int) -> int:
        """Return the bytes of an offloaded optimizer that stay on the device, for `stratagem plan`.

        Args:
            largest: elements of the largest parameter.
        """
        return buffers_on_device(self._config(), largest)

    @property
    def parameter_limits(self) -> list[int]:
        """The most parameters that the engine handles at a time, for `stratagem plan`."""
        return limits_of(self._config(), self.components.device_count)

    # -- environment

    _group: ClassVar[Any] = None
    """The process group of this process's first run."""

    def check_activation_checkpointing(self, choice: Any) -> None:
        """Check the choice of the step options; see `Strategy.check_activation_checkpointing`."""
        super().check_activation_checkpointing(choice)
        check_given_once(type(self).__name__, self.activation_checkpointing, choice)

    def checkpoint_activations(self, module: nn.Module, choice: Any) -> None:
        """Do nothing: `prepare` checkpoints the modules of an engine that trains."""

    def setup_environment(self) -> None:
        """Join the process group, then import DeepSpeed.

        Raises:
            CommunicationError: DeepSpeed holds an earlier process group of this process.
        """
        super().setup_environment()
        if self.ranks.world_size > 1 and not is_simulated():
            self._check_group()
        if self.device.type == "cpu":
            return_freed_memory()
        self._deepspeed = import_deepspeed(self.device.type)
        with self._quiet():
            self._deepspeed.init_distributed(dist_backend=self.communication_backend, verbose=False)

    def _check_group(self) -> None:
        group = dist.group.WORLD
        if DeepSpeedStrategy._group not in (None, group):
            raise CommunicationError(
                f"{type(self).__name__}: a rank failed in an earlier run of this process, so the "
                "ranks have joined a new process group, and DeepSpeed keeps the first one: start "
                "each run in processes of its own, or let an error end the script"
            )
        DeepSpeedStrategy._group = group

    def _quiet(self) -> AbstractContextManager[None]:
        # DeepSpeed takes the GPU of this index, which is the local rank only if all are used.
        ranks, index = self.ranks, self.device.index
        local_rank = ranks.local_rank if index is None else index
        return quiet_rank(ranks.global_rank, local_rank, ranks.world_size)

    def teardown(self) -> None:
        """Free the engines, then release all other resources."""
        while self._engines:
            self._engines.pop().release()
        if is_simulated():
            release_groups()
        super().teardown()

    # -- model and optimizers

    def model_context(self) -> AbstractContextManager[Any]:
        """Return a context that shards each layer as soon as the layer is made, at stage 3."""
        if self.stage != 3:
            return contextlib.nullcontext()
        return self._building_sharded()

    @contextlib.contextmanager
    def _building_sharded(self) -> Any:
        config = self._complete_config()
        with self._quiet():
            sharding = self._deepspeed.zero.Init(config_dict_or_path=config)
        with self._quiet(), restored_linear(), sharding:
            yield

    def _complete_config(self) -> dict[str, Any]:
        config = self._config(loop=self.facts.loop or "Lite", batch_size=self.facts.batch_size or 0)
        return offloaded_to_host(config) if is_simulated() else config

    def prepare(
        self, module: nn.Module, optimizers: Optimizers = (), *, move_to_device: bool = True
    ) -> PreparedModel:
        """Return the model with its engine; see `Strategy.prepare`.

        Without an optimizer there is nothing to shard but parameters: an engine is made at stage 3
        alone, for a model that was built in shards.
        """
        called = EngineModule(module)
        trains = callable(optimizers) or bool(optimizers) or self.facts.loop != "Trainer"
        optimizer = only_one(make_optimizers(optimizers))
        if optimizer is not None or (trains and self.makes_optimizers):
            optimizer = self._make_engine(called, optimizer)
        elif is_sharded(module):
            self._make_engine(called, None, trains=False)
        else:
            self._convert(module, move_to_device)
        return EnginePrepared(
            called, module, [] if optimizer is None else [optimizer], evaluation_module=called
        )

    def setup_optimizer(self, prepared: PreparedModel, optimizer: Optimizer) -> Optimizer:
        """Make the engine of a model that was set up without an optimizer."""
        called = prepared.module
        assert isinstance(called, EngineModule)
        only_one([*prepared.optimizers, optimizer])
        called.release()
        made: Optimizer = self._make_engine(called, optimizer)
        return made

    def _convert(self, module: nn.Module, move: bool) -> None:
        """Do to a model that is only evaluated what an engine would have done to it."""
        module = self.precision.convert_module(module)
        if move:
            module.to(self.device)

    def _make_engine(
        self, called: EngineModule, optimizer: Optimizer | None, *, trains: bool = True
    ) -> Any:
        """Make a model's engine; return the optimizer that it steps."""
        config = self._complete_config()
        model = called.module
        if optimizer is not None:
            if "optimizer" in config:
                raise ConfigurationError(
                    f"config: optimizer={config['optimizer']!r}, and the model came with a "
                    f"{type(optimizer).__name__} as well: give one of the two"
                )
            check_held(optimizer, model)
            optimizer = suited(optimizer, config)
        if stage_of(config) == 3:
            check_elements(model)
        if not trains:
            config.pop("optimizer", None)
            config.pop("scheduler", None)
        else:
            check_parameters(model, self.precision)
            if not can_fuse_adam(self.device.type):
                use_torchs_adam(config)
            step = self.components.step
            asked = step and step.activation_checkpointing
            apply_activation_checkpointing(model, self.activation_checkpointing or asked)
        share_start(model, self.precision)
        with self._quiet():
            if "activation_checkpointing" in config:
                self._deepspeed.checkpointing.configure(
                    None, **checkpointing_options(config["activation_checkpointing"])
                )
            called.make(self._deepspeed, optimizer, config, self.ranks)
        if is_simulated():
            offloads = "offload_param" in config.get("zero_optimization", {})
            from_host = offloads and self.facts.device_type != "cpu"
            called.around = functools.partial(simulated_sharding, from_host=from_host)
        if trains and optimizer is None:
            optimizer = called.engine.basic_optimizer
        self._engines = [one for one in self._engines if one.engine is not None] + [called]
        return optimizer

    def release(self, prepared: PreparedModel) -> None:
        """Free the model's engine: optimizer state and buffers.

        They are not garbage while anything refers to a module that they have trained.
        """
        called = prepared.module
        assert isinstance(called, EngineModule)
        if called.engine is not None:
            called.release()
            self._engines = [one for one in self._engines if one is not called]
            gc.collect()

    # -- a training step

    def backward(self, prepared: PreparedModel, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the engine's backward, which scales the loss and reduces gradients.

        Raises:
            ConfigurationError: the model has no optimizer, or arguments that the engine lacks.
        """
        called = prepared.module
        assert isinstance(called, EngineModule)
        if args or kwargs.keys() - {"retain_graph"}:
            raise ConfigurationError(
                "backward() of a DeepSpeed engine takes the loss and retain_graph, received "
                f"{[*args, *kwargs]!r} as well: leave them out"
            )
        if called.engine is None:
            raise ConfigurationError(
                "the model has no DeepSpeed engine: it was set up without an optimizer, or another "
                "Trainer has freed it. Call setup(model, optimizer), or fit again"
            )
        called.backward(loss, **kwargs)

    def clip_gradients(
        self, prepared: PreparedModel, optimizer: Optimizer, clip: GradientClip
    ) -> Tensor | None:
        """Do nothing: the engine clips in its step, by the norm that it was made with."""
        return None

    def optimizer_step(
        self,
        prepared: PreparedModel,
        optimizer: Optimizer,
        closure: Callable[[], Any] | None = None,
    ) -> Any:
        """Let the engine clip, step and clear the gradients."""
        if closure is not None:
            raise ConfigurationError(
                "a DeepSpeed engine steps once for each backward, so its optimizer takes no "
                "closure: call lite.backward(loss), then optimizer.step()"
            )
        called = prepared.module
        assert isinstance(called, EngineModule)
        # The engine skips a step if gradients overflowed.
        self.precision.step_was_skipped = not called.step()

    # -- state

    def model_state(self, prepared: PreparedModel) -> dict[str, Any]:
        """Return parameters, in the optimizer's precision, and buffers; see `Strategy`."""
        return self._state(prepared).weights()

    def load_model_state(
        self, prepared: PreparedModel, state: Mapping[str, Any], *, strict: bool = True
    ) -> None:
        """Load weights of any strategy; each rank takes, or reads, its part."""
        self._state(prepared).load_weights(state, strict=strict)

    def optimizer_state(self, prepared: PreparedModel, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state by parameter names; see `Strategy`."""
        return self._state(prepared).optimizer()

    def load_optimizer_state(
        self, prepared: PreparedModel, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> None:
        """Load optimizer state of any strategy; each rank reads its part.

        Raises:
            ConfigurationError: the engine's state is on NVMe, where DeepSpeed has no state to
                overwrite before its first step.
        """
        if offload_device(self._config(), "offload_optimizer") == "nvme":
            raise ConfigurationError(
                "offload_optimizer_device='nvme': optimizer state cannot be loaded there; received "
                "a checkpoint with one: resume under strategy='deepspeed_stage_3_offload', which "
                "keeps it in host memory, or load the weights only"
            )
        self._state(prepared).load_optimizer(state)

    def _state(self, prepared: PreparedModel) -> EngineState:
        assert isinstance(prepared.module, EngineModule)
        return EngineState(prepared.module, self)

    @contextlib.contextmanager
    def evaluation(self, prepared: PreparedModel) -> Iterator[None]:
        """Give every rank the buffers of rank 0, which are the ones that are saved."""
        for buffer in prepared.original.buffers():
            dist.broadcast(buffer, 0)
        yield

    @property
    def follows_evaluation(self) -> bool:
        """Whether a rank without a batch can follow other ranks; see `why_not_followed`."""
        return why_not_followed(self._config()) is None

    def lead_evaluation_step(
        self, prepared: PreparedModel, announce: Callable[[int], None]
    ) -> AbstractContextManager[Any]:
        """Return a context that announces the events of forward passes, at stage 3."""
        following = self._following(prepared)
        return contextlib.nullcontext() if following is None else following.announcing(announce)

    def follow_evaluation_step(self, prepared: PreparedModel, announced: Iterator[int]) -> None:
        """Repeat the announced events of forward passes in this rank's engine."""
        following = self._following(prepared)
        if following is None:
            super().follow_evaluation_step(prepared, announced)
        else:
            # Parameters that are gathered in inference mode, and some stay so, cannot train.
            with torch.inference_mode(False):
                following.follow(announced)

    def _following(self, prepared: PreparedModel) -> Following | None:
        called = prepared.module
        assert isinstance(called, EngineModule)
        is_divided = called.engine is not None and stage_of(called.config) == 3
        return Following(called.engine.optimizer) if is_divided else None


@dataclass(eq=False)
class EnginePrepared(PreparedModel):
    """A model and its engine, which clears the gradients in its step."""

    def gradient_clearer(self, optimizer: Optimizer) -> Callable[[], None]:
        """Return a check that the engine's step has cleared its own gradients.

        Raises:
            ConfigurationError: raised by the returned function, between backward and step.
        """
        called = self.module
        assert isinstance(called, EngineModule)
        return called.check_stepped
