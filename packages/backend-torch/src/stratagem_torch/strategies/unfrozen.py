"""Gradients of parameters that were frozen when a model was wrapped in DDP, and are not any more.

DDP reduces the gradients of what requires them when it is made. A parameter that is unfrozen later,
as in fine-tuning, would get each rank's own gradient, and the ranks would part without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class UnfrozenGradients:
    """Averages over ranks, at the end of a backward, the gradients that DDP does not reduce.

    All unfrozen parameters take part in one further collective for each backward that reduces.

    Args:
        frozen: the parameters that are frozen when DDP is made. Ranks unfreeze the same ones.

    Attributes:
        is_expected: whether the next backward reduces gradients.
        before: called before the first gradient of a backward is kept; it may set `is_expected`.
    """

    def __init__(self, frozen: Sequence[nn.Parameter]) -> None:
        self.is_expected = False
        self.before: Callable[[Any], None] | None = None
        self._found: dict[int, nn.Parameter] = {}
        """Those of the present backward, by their place in the model, which all ranks agree on."""
        self._hooks = [self._watch(index, parameter) for index, parameter in enumerate(frozen)]

    @classmethod
    def of(cls, model: DistributedDataParallel) -> UnfrozenGradients | None:
        """Return the gradients of a model with frozen parameters; None for another model."""
        frozen = [p for p in model.parameters() if not p.requires_grad and _may_require_grad(p)]
        if not frozen:
            return None
        gradients = cls(frozen)
        finalize(model, gradients.remove)
        return gradients

    def _watch(self, index: int, parameter: nn.Parameter) -> Any:
        def note(unfrozen: nn.Parameter) -> None:
            if self.before is not None:
                self.before(None)
            if self.is_expected:
                if not self._found:
                    # By then DDP's own collectives are under way, on every rank alike.
                    torch.autograd.Variable._execution_engine.queue_callback(self._average)
                self._found[index] = unfrozen

        # torch registers hooks on parameters with a gradient only, and keeps them afterwards.
        with requiring_gradients([parameter]):
            return parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]

    def _average(self) -> None:
        found, self._found, self.is_expected = self._found, {}, False
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for index in sorted(found):
            gradient = found[index].grad
            if gradient is not None:
                by_dtype.setdefault(gradient.dtype, []).append(gradient)
        for gradients in by_dtype.values():
            whole = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(whole)
            whole /= dist.get_world_size()
            parts = torch.split(whole, [gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

    def remove(self) -> None:
        """Watch no more."""
        for hook in self._hooks:
            hook.remove()


@contextmanager
def requiring_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Return a context in which frozen parameters require gradients."""
    frozen = [p for p in parameters if not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _may_require_grad(parameter: nn.Parameter) -> bool:
    return parameter.is_floating_point() or parameter.is_complex()
