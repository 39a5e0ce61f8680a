"""The programs of a model on IPUs, and which of them the device has at present."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from stratagem.errors import UserCodeError
from stratagem.strategies import StepModule
from stratagem_hpu_ipu.ipu_program import COMPILED_IN, Program


@dataclass(eq=False)
class Executor:
    """A program and its poptorch executor.

    Attributes:
        program: the program to compile.
        poptorch: a `PoplarExecutor`.
        trains: whether it changes the weights.
        parts: the number of parts of a batch.
    """

    program: Program
    poptorch: Any
    trains: bool
    parts: int


class Device:
    """The IPUs of one strategy, which hold one program at a time."""

    def __init__(self) -> None:
        self.held: Executor | None = None

    def attach(self, executor: Executor) -> None:
        """Let the device hold a program; the one before gives its weights back.

        The first call of a program compiles it and attaches it by itself.
        """
        if self.held is executor:
            return
        self.detach()
        if executor.poptorch.isCompiled():
            executor.poptorch.attachToDevice()  # which copies the host's weights
        self.held = executor

    def detach(self) -> None:
        """Free the device; the weights that were trained there return to the host."""
        held, self.held = self.held, None
        # A program that could not be compiled holds nothing.
        if held is not None and held.poptorch.isCompiled():
            if held.trains:
                held.poptorch.copyWeightsToHost()
            held.poptorch.detachFromDevice()

    def copy_weights_to_host(self) -> None:
        """Give the host the weights as of the last step; the device goes on with them."""
        held = self.held
        if held is not None and held.trains and held.poptorch.isCompiled():
            held.poptorch.copyWeightsToHost()

    def copy_weights_to_device(self) -> None:
        """Give the device the host's weights, which have been changed."""
        if self.held is not None and self.held.poptorch.isCompiled():
            self.held.poptorch.copyWeightsToDevice()


class IPUModule(StepModule):
    """Calls a model's methods as programs; `training_step` trains if the model is trained.

    Args:
        module: calls the user's methods by name.
        optimizer: the optimizer that `training_step` steps; None: no training.
        device: holds one program at a time.
        options: creates poptorch's options for a program; its argument is whether the program
            trains.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | None,
        device: Device,
        options: Callable[[bool], tuple[Any, int]],
    ) -> None:
        super().__init__(module)
        self._optimizer = optimizer
        self._device = device
        self._options = options
        self._executors: dict[tuple[str, bool], Executor] = {}
        self._stepped_with: Any = None
        """The options of the optimizer's groups that the program has."""

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return the method's result, computed by a program."""
        if kwargs:
            raise UserCodeError(
                f"{method} on IPUs takes its arguments by position, received {', '.join(kwargs)} "
                "by name"
            )
        trains = method == "training_step" and self._trains
        arguments = [
            COMPILED_IN if position and type(value) is int else value
            for position, value in enumerate(args)
        ]
        key = method, trains
        if key not in self._executors:
            self._executors[key] = self._wrap(method, trains)
        executor = self._executors[key]
        tensors = executor.program.take(arguments, executor.parts)
        if trains:
            self._take_optimizer_options(executor)
        self._device.attach(executor)
        return executor.program.result(executor.poptorch(*tensors))

    @property
    def _trains(self) -> bool:
        return self._optimizer is not None and torch.is_grad_enabled()

    def _wrap(self, method: str, trains: bool) -> Executor:
        import poptorch

        options, parts = self._options(trains)
        if not trains:
            program = Program(self.module, method, None)
            return Executor(program, poptorch.inferenceModel(program, options), trains, parts)
        program = Program(
            self.module, method, lambda loss: poptorch.identity_loss(loss, reduction="none")
        )
        self._stepped_with = _options_of(self._optimizer)
        made = poptorch.trainingModel(program, options, self._optimizer)
        return Executor(program, made, trains, parts)

    def _take_optimizer_options(self, executor: Executor) -> None:
        """Hand over learning rates and the like that have changed since the last step."""
        now = _options_of(self._optimizer)
        if now != self._stepped_with:
            executor.poptorch.setOptimizer(self._optimizer)
            self._stepped_with = now

    def destroy(self) -> None:
        """Free poptorch's resources; weights return to the host, and a later call recompiles."""
        if self._device.held in self._executors.values():
            self._device.detach()
        for executor in self._executors.values():
            executor.poptorch.destroy()
        self._executors.clear()


def _options_of(optimizer: Optimizer | None) -> list[dict[str, Any]]:
    groups = [] if optimizer is None else optimizer.param_groups
    return [copy.deepcopy({k: v for k, v in group.items() if k != "params"}) for group in groups]
