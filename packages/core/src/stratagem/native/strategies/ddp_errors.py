"""DDP's own errors, said with the names of parameters and with what to pass."""

from __future__ import annotations

import re

from torch.nn.parallel import DistributedDataParallel

from stratagem.errors import UserCodeError

_INDICES = re.compile(r"did not receive grad for rank \d+: ([\d ]+)")
_MARKED_TWICE = re.compile(r"Parameter at index (\d+)")


def explain(error: RuntimeError, ddp: DistributedDataParallel) -> UserCodeError | None:
    """Return a better error for one that DDP's reducer has raised; None if it is another.

    Args:
        error: what was raised in forward or backward.
        ddp: the model that it was raised for.
    """
    text = str(error)
    still_waits = "Expected to have finished reduction in the prior iteration" in text
    if "Your training graph has changed" in text or (still_waits and ddp.static_graph):
        return UserCodeError(
            "DDP was told static_graph=True, but this step used other parameters than the first: "
            f"{_unused(text, ddp)}. Pass find_unused_parameters=True in its place, as in "
            "DDPStrategy(find_unused_parameters=True), or let every step use the same parameters"
        )
    if still_waits:
        return UserCodeError(
            "the loss of the step before did not depend on every parameter, so DDP still waits "
            f"for gradients: {_unused(text, ddp)}. Let the loss use them, freeze them with "
            "requires_grad_(False), or pass find_unused_parameters=True, as in "
            "strategy='ddp_find_unused_parameters_true' (static_graph=True costs less, if all "
            "steps leave out the same ones)"
        )
    if "Expected to mark a variable ready only once" in text:
        found = _MARKED_TWICE.search(text)
        which = f"{_names(ddp)[int(found[1])]} " if found else "a parameter "
        return UserCodeError(
            f"{which}received its gradient twice in one backward: it is used in two checkpointed "
            "segments, or in several forward calls before one backward. Pass "
            "DDPStrategy(static_graph=True), use checkpoint(..., use_reentrant=False), or call "
            "forward once for each backward"
        )
    return None


def _unused(text: str, ddp: DistributedDataParallel) -> str:
    found = _INDICES.search(text)
    if found is None:
        return "which ones, a backward in one process shows (devices=1): their .grad stays None"
    names = _names(ddp)
    indices = [int(index) for index in found[1].split()]
    return "unused: " + ", ".join(names[index] for index in indices if index < len(names))


def _names(ddp: DistributedDataParallel) -> list[str]:
    """Return the names of the parameters by the index that the reducer gives them."""
    ignored = ddp.parameters_to_ignore
    return [
        name
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ignored
    ]
