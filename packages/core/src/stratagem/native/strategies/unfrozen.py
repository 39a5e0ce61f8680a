"""Gradients of parameters that were frozen when a model was wrapped in DDP, and are not any more.

DDP reduces the gradients of what requires them when it is made. A parameter that is unfrozen later,
as in fine-tuning, would get each rank's own gradient, and the ranks would part without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def reduce_unfrozen(model: DistributedDataParallel, is_within_forward: Callable[[], bool]) -> None:
    """Let DDP reduce the gradients of parameters that are unfrozen later, too.

    Called once DDP is made. A model without frozen parameters pays nothing for it.

    Args:
        model: DDP, of a model whose ranks unfreeze alike.
        is_within_forward: whether user code calls `backward` within DDP's forward now.
    """
    frozen = [p for p in model.parameters() if not p.requires_grad and _may_require_grad(p)]
    if frozen:
        gradients = _UnfrozenGradients(frozen, is_within_forward)
        model.register_forward_pre_hook(gradients.expect)
        finalize(model, gradients.remove)


class _UnfrozenGradients:
    """Averages over the ranks, at the end of a backward, what DDP knows nothing of.

    What is unfrozen takes part in one collective more for each backward that reduces, over all of
    it together. As with DDP, only a backward that follows DDP's forward reduces.
    """

    def __init__(
        self, frozen: Sequence[nn.Parameter], is_within_forward: Callable[[], bool]
    ) -> None:
        self._is_within_forward = is_within_forward
        self._is_expected = False
        self._found: dict[int, nn.Parameter] = {}
        """Those of the present backward, by their place in the model, which all ranks agree on."""
        self._hooks = [self._watch(index, parameter) for index, parameter in enumerate(frozen)]

    def expect(self, model: Any, args: Any) -> None:
        """Look, before DDP's forward, whether the backward after it reduces gradients."""
        self._is_expected = torch.is_grad_enabled() and model.require_backward_grad_sync

    def _watch(self, index: int, parameter: nn.Parameter) -> Any:
        def note(unfrozen: nn.Parameter) -> None:
            if self._is_expected or self._is_within_forward():
                if not self._found:
                    # By then DDP's own collectives are under way, on every rank alike.
                    torch.autograd.Variable._execution_engine.queue_callback(self._average)
                self._found[index] = unfrozen

        # torch takes a hook for what requires a gradient, and keeps it for what does not.
        parameter.requires_grad_(True)
        try:
            return parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
        finally:
            parameter.requires_grad_(False)

    def _average(self) -> None:
        found, self._found, self._is_expected = self._found, {}, False
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


def _may_require_grad(parameter: nn.Parameter) -> bool:
    return parameter.is_floating_point() or parameter.is_complex()
