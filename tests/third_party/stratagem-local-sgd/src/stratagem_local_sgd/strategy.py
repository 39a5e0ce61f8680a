"""LocalSGDStrategy: ranks step on their own and average their parameters every few steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.strategies import ParallelStrategy, PreparedModel
from stratagem_local_sgd.plugin import LOCAL_SGD


class LocalSGDStrategy(ParallelStrategy):
    """Trains a replica on every rank without communication, but for an average now and then.

    Ranks hold the same parameters from the start; after every `every`-th step of an optimizer its
    parameters are averaged over ranks. They are also averaged before state is saved, in place:
    training goes on from what was saved. An evaluation uses the average, and training then goes on
    with the parameters that each rank had.

    With `every=1` and SGD, momentum included, this is DDP up to rounding: the average of the steps
    is the step of the average.

    Args:
        every: optimizer steps between two averages.
        **components: see `ParallelStrategy`.

    Raises:
        ValueError: `every` is not a whole number of at least 1.
    """

    capabilities = LOCAL_SGD

    def __init__(self, *, every: int = 4, **components: Any) -> None:
        super().__init__(**components)
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every={every!r}: expected a whole number of steps, at least 1")
        self.every = every

    def setup_environment(self) -> None:
        """Join the other ranks, and count the steps of each optimizer from here."""
        super().setup_environment()
        # Lite may set up several optimizers. A launcher pickles the strategy before this call.
        self._steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

    def wrap(self, module: nn.Module) -> nn.Module:
        """Give every rank the parameters of rank 0."""
        module.load_state_dict(self.ranks.broadcast(module.state_dict()))
        return module

    def optimizer_step(
        self,
        prepared: PreparedModel,
        optimizer: Optimizer,
        closure: Callable[[], Any] | None = None,
    ) -> Any:
        """Step on this rank; after every `every`-th step, average the parameters."""
        result = super().optimizer_step(prepared, optimizer, closure)
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if self._steps[optimizer] % self.every == 0:
            self._average(p for group in optimizer.param_groups for p in group["params"])
        return result

    @contextmanager
    def evaluation(self, prepared: PreparedModel) -> Iterator[None]:
        """Let every rank evaluate the average of the models, and give back its own after that."""
        tensors = _tensors_of(prepared.original)
        own = [tensor.detach().clone() for tensor in tensors]
        self._average(tensors)
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in zip(tensors, own, strict=True):
                    tensor.copy_(value)

    def model_state(self, prepared: PreparedModel) -> dict[str, Any]:
        """Average the model and return its state, the same on every rank."""
        self._average(_tensors_of(prepared.original))
        return super().model_state(prepared)

    def optimizer_state(self, prepared: PreparedModel, optimizer: Optimizer) -> dict[str, Any]:
        """Average the optimizer's state (momentum and the like) and return it."""
        for state in optimizer.state.values():
            self._average(value for value in state.values() if isinstance(value, Tensor))
        # A run that is resumed from here counts from 0 as well.
        self._steps[optimizer] = 0
        return super().optimizer_state(prepared, optimizer)

    @torch.no_grad()
    def _average(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its mean over ranks; one without a mean, by rank 0's."""
        for tensor in tensors:
            mean = tensor.is_floating_point() or tensor.is_complex()
            tensor.copy_(self.ranks.all_reduce(tensor) if mean else self.ranks.broadcast(tensor))


def _tensors_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
