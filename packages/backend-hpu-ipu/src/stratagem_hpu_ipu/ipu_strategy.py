"""IPUStrategy: hands the whole step to poptorch."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from stratagem.errors import ConfigurationError, UserCodeError
from stratagem.state import load_named_state
from stratagem.strategies import (
    Components,
    Optimizers,
    PreparedModel,
    Strategy,
    TrainStep,
    make_optimizers,
)
from stratagem_hpu_ipu.ipu_executors import Device, IPUModule
from stratagem_hpu_ipu.ipu_plugin import IPU
from stratagem_hpu_ipu.ipu_probe import is_emulated
from stratagem_hpu_ipu.ipu_program import rebuilt, structure_of, tensors_of

_OPTIMIZERS = (SGD, Adam, AdamW, RMSprop)


class IPUStrategy(Strategy):
    """Trains on IPUs: forward, backward, accumulation and optimizer step are one compiled program.

    The strategy is contract-tested against a stub of poptorch, never run on hardware. One process
    drives all IPUs. A loader's batch is divided over the replicas, and further by
    `gradient_accumulation`; the batches of `Trainer(accumulate_grad_batches=...)` go into one call
    of the program. Every batch must therefore have the same shape, and every step the same number
    of batches.

    The Python code of a step runs once, during compilation: `self.log` and `batch_idx` raise an
    error in it, and only the hooks around batches and after the step are called. SGD, Adam, AdamW
    and RMSprop of torch are supported. Their momenta stay in the program: checkpoints do not
    contain them.

    Args:
        replication_factor: the number of copies of the model, each of which computes a part of a
            batch; None: one copy per device. A model over several IPUs needs fewer copies.
        gradient_accumulation: the number of parts of a batch that a step computes one after the
            other.
        device_iterations: the same for an evaluation. A training step is one iteration, since the
            Trainer counts it as one.
        configure_options: called with each `poptorch.Options` before a model uses it, to set
            options without an argument here; it must not set others.
        **components: see `Strategy`.

    Raises:
        ConfigurationError: an argument is invalid; when the strategy is bound, an argument does not
            fit the devices, or the accumulation changes between epochs.

    Example:
        >>> from stratagem.strategies import IPUStrategy
        >>> IPUStrategy(device_iterations=4).capabilities.manual_backward
        False
    """

    capabilities = IPU

    def check_activation_checkpointing(self, choice: Any) -> None:
        """Refuse it: poptorch compiles the step.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            f"activation_checkpointing={choice!r}: poptorch compiles a step as one program, in "
            "which no module runs again: leave it out, or call poptorch.recomputationCheckpoint in "
            "the model"
        )

    def __init__(
        self,
        *,
        replication_factor: int | None = None,
        gradient_accumulation: int = 1,
        device_iterations: int = 1,
        configure_options: Callable[[Any], None] | None = None,
        **components: Any,
    ) -> None:
        super().__init__(**components)
        given = {
            "replication_factor": 1 if replication_factor is None else replication_factor,
            "gradient_accumulation": gradient_accumulation,
            "device_iterations": device_iterations,
        }
        for name, value in given.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(f"{name}={value!r}: expected a whole number from 1 on")
        self.replication_factor = replication_factor
        self.gradient_accumulation = gradient_accumulation
        self.device_iterations = device_iterations
        self.configure_options = configure_options
        self._micro_batches = 1
        self._ipu = Device()
        self._modules: list[IPUModule] = []
        self._has_warned = False

    def bind(self, components: Components) -> None:
        """Take the components of the plan; see `Strategy.bind`."""
        super().bind(components)
        count = components.device_count
        if components.devices != tuple(range(count)):
            raise ConfigurationError(
                f"devices={list(components.devices)} chooses IPUs by index, and poptorch takes any "
                f"that are free: pass devices={count}"
            )
        if self.replication_factor is not None and count % self.replication_factor:
            raise ConfigurationError(
                f"replication_factor={self.replication_factor} and devices={count}: expected "
                "a number of devices that the replicas share evenly"
            )
        by_epoch = {0: 1} if components.step is None else components.step.accumulation
        if len(set(by_epoch.values())) > 1:
            raise ConfigurationError(
                f"accumulate_grad_batches={dict(by_epoch)!r} changes between epochs, and a step on "
                "IPUs is compiled for one number: pass a number"
            )
        (self._micro_batches,) = set(by_epoch.values())

    def setup_environment(self) -> None:
        """Import poptorch, and see whether it finds as many IPUs.

        Raises:
            ConfigurationError: it cannot be imported, or finds too few.
        """
        super().setup_environment()
        # The boundary at which whatever a broken SDK raises becomes an error that names it.
        try:
            import poptorch
        except Exception as error:
            raise ConfigurationError(
                "accelerator='ipu' needs poptorch, which cannot be imported "
                f"({type(error).__name__}: {error}): install the one of this Poplar SDK, with the "
                "build of torch that it needs, and source the SDK's enable.sh"
            ) from error
        count = self.components.device_count
        if not is_emulated(os.environ) and not poptorch.ipuHardwareIsAvailable(num_ipus=count):
            raise ConfigurationError(
                f"devices={count}: poptorch finds no {count} IPU(s) that are free together: pass "
                "fewer devices, or wait for other programs to end"
            )

    def teardown(self) -> None:
        """Free the IPUs."""
        while self._modules:
            self._modules.pop().destroy()
        super().teardown()

    # -- model and optimizer

    def prepare(
        self, module: nn.Module, optimizers: Optimizers = (), *, move_to_device: bool = True
    ) -> PreparedModel:
        """Return the model as programs, which their first calls compile."""
        made = make_optimizers(optimizers)
        _check_optimizers(made)
        module = self.precision.convert_module(module)
        called = IPUModule(module, made[0] if made else None, self._ipu, self._options)
        self._modules.append(called)
        return PreparedModel(called, module, made, evaluation_module=called)

    def _options(self, trains: bool) -> tuple[Any, int]:
        """Return poptorch's options of a program, and how many parts it divides a batch into.

        They are made anew for each: a model that has taken them freezes them.
        """
        import poptorch

        options = poptorch.Options()
        replicas = self.replication_factor or self.components.device_count
        accumulation = self._micro_batches * self.gradient_accumulation if trains else 1
        iterations = 1 if trains else self.device_iterations
        options.deviceIterations(iterations)
        options.replicationFactor(replicas)
        options.randomSeed(torch.initial_seed() % 2**32)
        options.outputMode(poptorch.OutputMode.All)
        if trains:
            options.Training.gradientAccumulation(accumulation)
        if self.configure_options is not None:
            self.configure_options(options)
        return options, replicas * accumulation * iterations

    def release(self, prepared: PreparedModel) -> None:
        """Free the programs of a model; its weights are the host's."""
        called = prepared.module
        if called in self._modules:
            assert isinstance(called, IPUModule)
            self._modules.remove(called)
            called.destroy()

    # -- a step

    def train_step(
        self, prepared: PreparedModel, step: TrainStep, micro_batches: Collection[Any]
    ) -> None:
        """Run one optimizer step: one call of the program, with all micro-batches at once."""
        batches = []
        for micro_batch in micro_batches:
            batches.append(step.begin(micro_batch))
            step.end(micro_batch)
        if len(batches) != self._micro_batches:
            raise UserCodeError(
                f"the epoch's last step has {len(batches)} of accumulate_grad_batches="
                f"{self._micro_batches} batches, and a step on IPUs is compiled for all of them: "
                "let the number of batches be a multiple of it, for example with "
                "limit_train_batches"
            )
        step.loss(_joined(batches), converted=True)
        optimizer: Any = prepared.optimizers[0]
        optimizer._opt_called = True  # it has stepped; schedulers of torch's would warn
        step.after_optimizer_step(optimizer)

    @contextmanager
    def evaluation(self, prepared: PreparedModel) -> Iterator[None]:
        """Free the device for an evaluation's programs, and after them for training's."""
        self._ipu.detach()
        yield
        self._ipu.detach()

    def end_training(self, prepared: PreparedModel) -> None:
        """Give the host the weights, and free the device."""
        self._ipu.detach()

    # -- state

    def model_state(self, prepared: PreparedModel) -> dict[str, Any]:
        """Return the weights as of the last step, by their canonical names."""
        self._ipu.copy_weights_to_host()
        state = super().model_state(prepared)
        # poptorch makes parameters instances of a class of its own.
        return {
            name: value.as_subclass(Tensor) if isinstance(value, Tensor) else value
            for name, value in state.items()
        }

    def load_model_state(
        self, prepared: PreparedModel, state: Mapping[str, Any], *, strict: bool = True
    ) -> None:
        """Load weights of any strategy; see `Strategy.load_model_state`."""
        super().load_model_state(prepared, state, strict=strict)
        self._ipu.copy_weights_to_device()

    def optimizer_state(self, prepared: PreparedModel, optimizer: Optimizer) -> dict[str, Any]:
        """Return the options of the optimizer's groups; its momenta stay in the program."""
        if _has_momenta(optimizer):
            self._warn_of_momenta("this checkpoint does not hold them, and what resumes from it")
        return super().optimizer_state(prepared, optimizer)

    def load_optimizer_state(
        self, prepared: PreparedModel, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> None:
        """Load the options of the optimizer's groups, of any strategy."""
        if state["state"]:
            self._warn_of_momenta("those of the checkpoint are left out, and training")
        load_named_state(optimizer, prepared.original, {**state, "state": {}})

    def _warn_of_momenta(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "the optimizer's momenta lie in the program on the IPUs, from which poptorch hands "
                f"out none of torch's optimizers: {what} begins with fresh ones",
                stacklevel=2,
            )


def _check_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Check that poptorch can put the optimizer into a program.

    Raises:
        ConfigurationError: several optimizers are passed, or an unsupported optimizer.
    """
    if len(optimizers) > 1:
        raise ConfigurationError(
            f"a step on IPUs has one optimizer, received {len(optimizers)}: put the parameters "
            "into groups of one optimizer"
        )
    for optimizer in optimizers:
        if type(optimizer) not in _OPTIMIZERS:
            names = ", ".join(kind.__name__ for kind in _OPTIMIZERS)
            raise ConfigurationError(
                f"a step on IPUs is compiled with its optimizer, received "
                f"{type(optimizer).__name__}: expected torch's own {names}"
            )


def _has_momenta(optimizer: Optimizer) -> bool:
    return type(optimizer) is not SGD or any(g["momentum"] for g in optimizer.param_groups)


def _joined(batches: Sequence[Any]) -> Any:
    """Return batches as one, joined along the first dimension.

    Raises:
        UserCodeError: they differ in more than the values of their tensors.
    """
    first, *others = batches
    if not others:
        return first
    if any(structure_of(other) != structure_of(first) for other in others):
        raise UserCodeError(
            "batches of one step on IPUs are joined, received some that differ in their structure, "
            "or in what is no tensor: give them the same, or do not accumulate gradients"
        )
    columns = zip(*map(tensors_of, batches), strict=True)
    return rebuilt(first, iter([torch.cat(column) for column in columns]))
