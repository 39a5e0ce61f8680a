"""Activation checkpointing: computing activations again in backward in place of keeping them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from stratagem.errors import ConfigurationError

ActivationCheckpointing = (
    bool | type[nn.Module] | Collection[type[nn.Module]] | Callable[[nn.Module], bool] | None
)
"""True for the layers of the model, classes of modules, or a function of a module."""

_MARK = "_stratagem_checkpointed"


def check_activation_checkpointing(choice: ActivationCheckpointing) -> ActivationCheckpointing:
    """Return the choice.

    Raises:
        ConfigurationError: the choice does not have an accepted form.

    Example:
        >>> from stratagem.strategies import check_activation_checkpointing
        >>> check_activation_checkpointing({nn.Linear})
        {<class 'torch.nn.modules.linear.Linear'>}
    """
    if choice is None or isinstance(choice, bool) or callable(choice):
        return choice
    if choice and all(isinstance(one, type) and issubclass(one, nn.Module) for one in choice):
        return choice
    raise ConfigurationError(
        f"activation_checkpointing={choice!r}: expected True, a class of modules or a set of them, "
        "or a function of a module that returns a bool"
    )


def apply_activation_checkpointing(
    model: nn.Module, choice: ActivationCheckpointing, layers: Iterable[nn.Module] = ()
) -> list[nn.Module]:
    """Checkpoint modules of a model in place; their names and state stay.

    A module's forward keeps its inputs only and runs again in backward, under the same random
    numbers. Buffers that it changes (the running statistics of batch norm) are changed once.

    Args:
        model: contains the modules.
        choice: the modules to checkpoint; None and False choose no module.
        layers: the modules that True chooses; if empty, the elements of ModuleLists and
            Sequentials.

    Returns:
        The checkpointed modules. An empty list comes with a warning.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from stratagem.strategies import apply_activation_checkpointing
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        >>> len(apply_activation_checkpointing(model, nn.BatchNorm1d))
        1
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> int(model[1].num_batches_tracked)
        1
    """
    if not choice:
        return []
    chosen = _chosen(model, choice, list(layers))
    if not chosen:
        kinds = ", ".join(
            sorted({type(part).__name__ for part in model.modules() if part is not model})
        )
        # No error: of several models, one may have no such module.
        warnings.warn(
            f"activation_checkpointing={choice!r} chooses none of the model's modules, so that it "
            f"does nothing; the model has {kinds}",
            stacklevel=2,
        )
    for part in chosen:
        if not hasattr(part, _MARK):
            setattr(part, _MARK, True)
            part.forward = _Checkpointed(part, part.forward)
    return chosen


def _chosen(model: nn.Module, choice: Any, layers: list[nn.Module]) -> list[nn.Module]:
    parts = [part for part in model.modules() if part is not model]
    if choice is True:
        kinds = (nn.ModuleList, nn.Sequential)
        lists: list[Any] = [part for part in parts if isinstance(part, kinds)]
        # Not of stages, of which one is a list of layers, nor around the only list.
        stages = [isinstance(child, kinds) for child in model] if isinstance(model, kinds) else []
        if len(stages) > 1 and len(set(stages)) == 1:
            lists.append(model)
        found = layers or [child for part in lists for child in part]
        # A layer in a checkpointed layer would run a third time.
        inner = {id(sub) for part in found for sub in part.modules() if sub is not part}
        return [part for part in found if id(part) not in inner]
    if callable(choice) and not isinstance(choice, type):
        return [part for part in parts if choice(part)]
    classes = choice if isinstance(choice, type) else tuple(choice)
    return [part for part in parts if isinstance(part, classes)]


class _Checkpointed:
    """Takes the place of a module's forward; not a wrapping module, which would change names."""

    def __init__(self, part: nn.Module, forward: Callable[..., Any]) -> None:
        self._part = part
        self.forward_to_repeat = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(
            self.forward_to_repeat, *args, use_reentrant=False, context_fn=self._contexts, **kwargs
        )

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        first = _NotesChanges(self._part)
        return first, _OnCopies(first)


class _NotesChanges(AbstractContextManager[None]):
    """The first forward: notes which buffers it changes."""

    def __init__(self, part: nn.Module) -> None:
        self._part = part
        self.changed: list[tuple[nn.Module, str]] = []

    def __enter__(self) -> None:
        self._before = [
            (part, name, buffer, buffer._version)
            for part in self._part.modules()
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]

    def __exit__(self, *exception: object) -> None:
        self.changed = [
            (part, name)
            for part, name, buffer, version in self._before
            if part._buffers[name] is not buffer
            or buffer._version != version
            # The kernels of batch norm change the running statistics without counting a version.
            or (isinstance(part, _NormBase) and part.training)
        ]
        self._before.clear()


class _OnCopies(AbstractContextManager[None]):
    """The forward that runs again: what changes buffers changes copies.

    Other tensors stand in their place, since autograd may have kept the buffers themselves.
    """

    def __init__(self, first: _NotesChanges) -> None:
        self._first = first

    def __enter__(self) -> None:
        self._own: list[tuple[nn.Module, str, Tensor]] = []
        for part, name in self._first.changed:
            buffer = part._buffers[name]
            assert buffer is not None
            self._own.append((part, name, buffer))
            part._buffers[name] = buffer.clone()

    def __exit__(self, *exception: object) -> None:
        for part, name, buffer in self._own:
            part._buffers[name] = buffer
