"""A method of a model as a program takes it: tensors in, tensors out, all else compiled in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stratagem.data import map_tensors
from stratagem.errors import UserCodeError


class _Mark:
    """Stands for a tensor in a structure that is kept."""


_TENSOR = _Mark()
_NO_TENSOR = torch.empty(0)


def structure_of(data: Any) -> Any:
    """Return nested data with marks instead of tensors; structures can be compared."""
    return map_tensors(lambda _: _TENSOR, data)


def tensors_of(data: Any) -> list[Tensor]:
    """Return the tensors in nested data, in order."""
    found: list[Tensor] = []
    map_tensors(found.append, data)
    return found


def rebuilt(data: Any, tensors: Iterator[Tensor]) -> Any:
    """Return nested data with other tensors in their places."""
    return map_tensors(lambda _: next(tensors), data)


class CompiledIn:
    """Stands for the number of a batch: a program is compiled once, and cannot know it."""

    def __repr__(self) -> str:
        return "a number that a compiled program does not know"


def _refuse_use(*_: Any) -> Any:
    raise UserCodeError(
        "batch_idx and dataloader_idx are not known in a step on IPUs: it is compiled once, for "
        "all batches. Use them in hooks such as on_train_batch_start"
    )


for _name in (
    *("__bool__", "__index__", "__int__", "__float__", "__eq__", "__ne__", "__lt__", "__le__"),
    *("__gt__", "__ge__", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__"),
    *("__mod__", "__floordiv__", "__truediv__", "__hash__", "__format__"),
):
    setattr(CompiledIn, _name, _refuse_use)

COMPILED_IN = CompiledIn()


class Program(nn.Module):
    """The program for poptorch: calls a model's method, and returns the tensors of its result.

    Args:
        module: calls methods by name.
        method: the name of the method.
        mark_loss: marks the loss for poptorch, in a program that trains; None: no loss.
    """

    def __init__(
        self, module: nn.Module, method: str, mark_loss: Callable[[Tensor], Tensor] | None
    ) -> None:
        super().__init__()
        self.module = module
        self._method = method
        self._mark_loss = mark_loss
        self._arguments: Any = None
        self._shapes: list[Any] = []
        self._result: Any = None
        self._scalars: list[bool] = []

    def take(self, arguments: Any, parts: int) -> list[Tensor]:
        """Return the tensors of a call's arguments, in the order of the compiled program.

        Args:
            arguments: the arguments of the method; the first call decides their form.
            parts: the number of parts of a batch.

        Raises:
            UserCodeError: the batch cannot be divided, or differs from the first call.
        """
        tensors = tensors_of(arguments)
        shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        if self._arguments is None:
            for tensor in tensors:
                if not tensor.dim() or tensor.shape[0] % parts:
                    raise UserCodeError(
                        f"{self._method} on IPUs divides each tensor of a batch into {parts} parts "
                        "(replicas x accumulation x iterations), received one of shape "
                        f"{tuple(tensor.shape)}: choose a batch size that they divide"
                    )
            # Without the batch itself, which nothing keeps.
            self._arguments = map_tensors(lambda _: _NO_TENSOR, arguments)
            self._shapes = shapes
        elif shapes != self._shapes or structure_of(arguments) != structure_of(self._arguments):
            raise UserCodeError(
                f"{self._method} on IPUs is compiled for tensors of "
                f"{', '.join(str(shape) for shape, _ in self._shapes)}, received "
                f"{', '.join(str(shape) for shape, _ in shapes)}, or another structure around "
                "them: give every batch the same shape, for example with "
                "DataLoader(drop_last=True)"
            )
        return tensors

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors of the method's result; runs while poptorch compiles."""
        with _without_log(getattr(self.module, "module", self.module)):
            result = self.module(self._method, *rebuilt(self._arguments, iter(tensors)))
        if self._mark_loss is not None:
            result = self._with_marked_loss(result, self._mark_loss)
        found = tensors_of(result)
        if not found:
            raise UserCodeError(
                f"{self._method} returned {result!r}; a step on IPUs hands out what it returns and "
                "nothing else: return a tensor"
            )
        self._scalars = [tensor.dim() == 0 for tensor in found]
        self._result = map_tensors(lambda _: _NO_TENSOR, result)
        return tuple(found)

    def _with_marked_loss(self, result: Any, mark: Callable[[Tensor], Tensor]) -> Any:
        loss = result.get("loss") if isinstance(result, dict) else result
        if not isinstance(loss, Tensor):
            raise UserCodeError(
                f"{self._method} returned {result!r}; a step on IPUs is compiled once, so that it "
                "cannot skip a batch: return the loss, or a dict with the key 'loss'"
            )
        marked = mark(loss)
        return {**result, "loss": marked} if isinstance(result, dict) else marked

    def result(self, outputs: Any) -> Any:
        """Return the method's result, given the result of a call of the program.

        Tensors of a batch are put together again; a scalar is the mean over the parts.
        """
        listed = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        whole = [
            output.mean() if is_scalar else output
            for output, is_scalar in zip(listed, self._scalars, strict=True)
        ]
        return rebuilt(self._result, iter(whole))


@contextmanager
def _without_log(module: nn.Module) -> Iterator[None]:
    """Refuse `log` of a user's module: what it is given is no number while a step is compiled."""
    if not hasattr(module, "log"):
        yield
        return

    def refuse(name: str, *_: Any, **__: Any) -> None:
        raise UserCodeError(
            f"self.log({name!r}, ...) in a step on IPUs would see no value: the step is compiled "
            "once, and runs on the device. Return the value, and log it in on_train_batch_end or "
            "on_validation_batch_end"
        )

    module.__dict__["log"] = refuse
    try:
        yield
    finally:
        del module.__dict__["log"]
