"""Moments of a step: the memory while each layer runs, so that it can be extrapolated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from stratagem.strategies import StepMemory

_BETWEEN = "|"

M = TypeVar("M", bound=StepMemory)


class Moments:
    """Divides the phases of a step by the layers of lists of equal layers.

    The most that a phase holds may come at another moment with more layers: at the end of backward
    in place of its beginning. At one moment it grows by the same amount with each layer. A moment
    of the first layers is counted from the first, a moment of the last layers from the last. The
    memory of a layer between them lies between the values of its neighbors on both sides.

    Args:
        few: the number of layers of the shorter step, by the name of a list; all moments count in a
            list that both steps have whole.
        whole: the lists that both steps have whole.
        enter: called with the names of a moment as it begins; a layer may have two.
    """

    def __init__(
        self,
        few: Mapping[str, int],
        whole: Mapping[str, bool],
        enter: Callable[[str, tuple[str, ...]], None],
    ) -> None:
        self.few, self.whole, self.enter = few, whole, enter

    def begin(self, model: nn.Module) -> None:
        """Follow the layers of a model."""
        for stack in self.few:
            layers = list(model.get_submodule(stack).children())
            for number, layer in enumerate(layers):
                names = self._names(stack, number, len(layers))
                layer.register_forward_pre_hook(
                    self._before(names, stack, number), with_kwargs=True
                )
                layer.register_forward_hook(self._after(names, stack))

    def _names(self, stack: str, number: int, layers: int) -> tuple[str, ...]:
        if self.whole[stack]:
            return (f"{stack} {number}",)
        edge = self.few[stack] - 1
        names = [f"{stack} {number}"] if number < edge else []
        return (*names, f"{stack} {number - layers}") if layers - number <= edge else (*names,)

    def _before(self, names: tuple[str, ...], stack: str, number: int) -> Any:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.enter("forward", names)
            if number == 0 and (given := _differentiable((args, kwargs))) is not None:
                self._enter_backward(given, (f"{stack} done",))

        return before

    def _after(self, names: tuple[str, ...], stack: str) -> Any:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            self.enter("forward", (f"{stack} done",))
            if (made := _differentiable(output)) is not None:
                self._enter_backward(made, names)

        return after

    def _enter_backward(self, tensor: Tensor, names: tuple[str, ...]) -> None:
        """Begin a moment of backward when the gradient of a tensor is known."""
        hook = partial(self._enter, names)
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]

    def _enter(self, names: tuple[str, ...], gradient: Tensor) -> None:
        self.enter("backward", names)


def _differentiable(values: Any) -> Tensor | None:
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    return next((tensor for tensor in tensors if tensor.requires_grad), None)


def named(phase: str, moment: str) -> str:
    """Return the name of a moment of a phase."""
    return f"{phase}{_BETWEEN}{moment}" if moment else phase


def by_phase(moments: Mapping[str, M]) -> dict[str, M]:
    """Return the moment of each phase that holds most.

    Example:
        >>> held = {"step|layers 0": StepMemory(1, 0, 0, 0, 2), "step": StepMemory(1, 0, 0, 0, 1)}
        >>> by_phase(held)["step"].working
        2
    """
    phases: dict[str, M] = {}
    for name, memory in moments.items():
        phase = name.partition(_BETWEEN)[0]
        phases[phase] = max(phases.get(phase, memory), memory, key=lambda each: each.total)
    return phases


def extrapolated(
    moments: Mapping[str, M], few: Mapping[str, M], more: Mapping[str, M], further: int
) -> dict[str, M]:
    """Return the moments with further layers; each adds the amount of one more layer.

    Args:
        moments: the memory so far, by moment.
        few: the memory of the shorter step.
        more: the memory with one more layer.
        further: the number of layers.
    """
    result = {}
    for name, memory in moments.items():
        if name in few and name in more:
            sizes = {
                part: size + further * (getattr(more[name], part) - getattr(few[name], part))
                for part, size in asdict(memory).items()
            }
            result[name] = type(memory)(**sizes)
    return result
