"""Device errors: what a device that is full or dead means.

Computed once an error has ended a step, a set-up or an evaluation, so that a good one pays nothing.
The error stays the object that was raised, so that whoever catches it goes on catching it; its
message says more.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from torch import nn
from torch.optim import Optimizer

from stratagem.errors import with_explanation
from stratagem.interfaces.prepared_model import PreparedModel
from stratagem.interfaces.strategy import Strategy
from stratagem.launch.rank import this_rank
from stratagem.launch.stack import line_in_traceback

_BESIDES = (
    "Besides: precision='bf16-mixed' halves most activations, and strategies with "
    "activation_checkpointing= compute them again in place of keeping them"
)


def raise_explained(error: RuntimeError, strategy: Strategy, prepared: PreparedModel) -> NoReturn:
    """Raise an error of one part of a step: the better one that the strategy knows, or itself.

    Under Lite, whose user may catch it. Raises:
        StratagemError: the strategy knows what was wrong.
        RuntimeError: the error, in which a device's own errors are explained.
    """
    explained = strategy.explain(prepared, error)
    if explained is not None:
        raise explained from error
    explain_device_error(error, strategy, prepared.original, prepared.optimizers)
    raise error


def explain_device_error(
    error: BaseException,
    strategy: Strategy,
    module: nn.Module | None,
    optimizers: Sequence[Optimizer] = (),
) -> None:
    """Add an explanation to an error of the device; leave other errors unchanged.

    Args:
        error: the error of a step, a setup or an evaluation.
        strategy: the strategy of the run.
        module: the model, or None before it exists.
        optimizers: the optimizers of the model.
    """
    if getattr(error, "_stratagem_explained", False) or not hasattr(strategy, "device"):
        return
    accelerator, ranks = strategy.accelerator, strategy.ranks
    who = f"rank {ranks.global_rank} of {ranks.world_size} ({strategy.device})"
    where = f"{who}, at {line_in_traceback(error)}"
    text = None
    if accelerator.is_out_of_memory(error):
        memory = accelerator.device_memory(strategy.device)
        text = f"{where}, is out of memory"
        if memory is not None and module is not None:
            text += _report(error, strategy, memory, module, optimizers)
            text = "\n".join(filter(None, (text, _BESIDES, accelerator.memory_advice)))
        text = with_explanation(text, "out-of-memory")
    elif (advice := accelerator.explain_lost_device(error)) is not None:
        this_rank.device_is_lost = True
        text = f"{where}: {advice}"
        # Now, since a library of the device may end the process before the error is shown.
        print(f"stratagem: {text}", file=sys.stderr, flush=True)
    if text is not None:
        error.args = (f"{error}\n\n{text}",)
        error._stratagem_explained = True  # type: ignore[attr-defined]


def _report(error: BaseException, *args: Any) -> str:
    """Return who holds the device's memory, and what would fit; "" without stratagem-extras."""
    try:
        from stratagem.accelerators import memory_report
    except ImportError:
        return ""
    return str(memory_report(error, *args))
