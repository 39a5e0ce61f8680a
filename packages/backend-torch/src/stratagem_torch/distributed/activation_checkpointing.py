"""Activation checkpointing: computing activations again in backward in place of keeping them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from stratagem.errors import ConfigurationError
from stratagem_torch.distributed.kept_operations import (
    Keep,
    Keeping,
    KeptOutputs,
    Returning,
    check_keep,
    keeps,
)

Modules = (
    bool
    | str
    | type[nn.Module]
    | Collection[str]
    | Collection[type[nn.Module]]
    | Callable[[nn.Module], bool]
)
"""True for the layers of the model; names, classes, or a function of a module."""

_MARK = "_stratagem_checkpointed"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


@dataclass(frozen=True)
class Recompute:
    """A choice of modules that compute their activations again in backward.

    Operations that draw random numbers are always computed again, so that dropout draws the same
    numbers in both passes.

    Args:
        modules: True: the layers of ModuleLists and Sequentials. Names, in which `*` stands for a
            number and whose beginning may be left out ("layers.*"); a class or several; or a
            function of a module.
        keep: the operations whose outputs are kept. "matmul": matrix products, convolutions and
            attention. A collection of operations, such as `torch.ops.aten.mm`; or a function of an
            operation. By default only the inputs of each module are kept.
        offload: keep the inputs of the modules in the memory of the host until backward.
        share: which share of the modules is computed again, from 0 to 1, spread evenly. Of four
            layers, 0.5 means the second and the fourth.

    Raises:
        ConfigurationError: a value has no accepted form.

    Example:
        >>> from stratagem import Trainer
        >>> from stratagem.strategies import Recompute
        >>> half = Recompute("layers.*", keep="matmul", share=0.5)
        >>> trainer = Trainer(activation_checkpointing=half, logger=False)
        >>> trainer.activation_checkpointing.share
        0.5
    """

    modules: Modules = True
    keep: Keep = None
    offload: bool = False
    share: float = 1.0

    def __post_init__(self) -> None:
        """Refuse other forms."""
        if not self.modules:
            raise ConfigurationError(
                f"Recompute(modules={self.modules!r}): expected True, names or classes of modules, "
                "or a function of a module"
            )
        _check_modules("modules", self.modules)
        check_keep(self.keep)
        is_number = isinstance(self.share, (int, float)) and not isinstance(self.share, bool)
        if not is_number or not 0 < self.share <= 1:
            raise ConfigurationError(
                f"Recompute(share={self.share!r}): expected a number above 0, and at most 1"
            )


ActivationCheckpointing = Modules | Recompute | None
"""The modules that compute their activations again; None and False: no module."""


def check_activation_checkpointing(choice: ActivationCheckpointing) -> ActivationCheckpointing:
    """Return the choice.

    Raises:
        ConfigurationError: the choice does not have an accepted form.

    Example:
        >>> from stratagem.strategies import check_activation_checkpointing
        >>> check_activation_checkpointing({nn.Linear})
        {<class 'torch.nn.modules.linear.Linear'>}
    """
    if choice is not None and not isinstance(choice, Recompute):
        _check_modules("activation_checkpointing", choice)
    return choice


def check_given_once(strategy: str, own: ActivationCheckpointing, choice: Any) -> None:
    """Check that a strategy's own argument and the step options do not both choose modules.

    Raises:
        ConfigurationError: both do.

    Example:
        >>> from stratagem_torch.parallel import check_given_once
        >>> check_given_once("FSDPStrategy", None, True)
        >>> check_given_once("FSDPStrategy", "layers.*", True)
        Traceback (most recent call last):
            ...
        stratagem.errors.ConfigurationError: activation_checkpointing=True was passed to the ...
    """
    if own:
        raise ConfigurationError(
            f"activation_checkpointing={choice!r} was passed to the Trainer or in step_options, "
            f"and {strategy}(activation_checkpointing={own!r}) as well: give one of the two"
        )


def _check_modules(option: str, choice: Any) -> None:
    if isinstance(choice, bool) or (callable(choice) and not isinstance(choice, type)):
        return
    several = isinstance(choice, Collection) and not isinstance(choice, str)
    each = list(choice) if several else [choice]
    if each and all(isinstance(one, str) and one for one in each):
        return
    if each and all(isinstance(one, type) and issubclass(one, nn.Module) for one in each):
        return
    raise ConfigurationError(
        f"{option}={choice!r}: expected True, names of modules such as 'layers.*', a class of "
        "modules or a set of them, a function of a module that returns a bool, or a Recompute"
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

    Raises:
        ConfigurationError: no module has a given name.

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
    how = choice if isinstance(choice, Recompute) else Recompute(choice)
    chosen = _chosen(model, how.modules, list(layers))
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
    count = min(len(chosen), max(1, round(how.share * len(chosen))))
    chosen = [chosen[(index + 1) * len(chosen) // count - 1] for index in range(count)]
    for part in chosen:
        if not hasattr(part, _MARK):
            setattr(part, _MARK, True)
            part.forward = _Checkpointed(part, part.forward, how)
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
    each: list[Any] = [choice] if isinstance(choice, (str, type)) else list(choice)
    if isinstance(each[0], str):
        return _named(model, each)
    return [part for part in parts if isinstance(part, tuple(each))]


def _named(model: nn.Module, patterns: list[str]) -> list[nn.Module]:
    """Return the modules that patterns name, by whole names or their ends, in the model's order.

    Raises:
        ConfigurationError: a pattern names no module.
    """
    named = [(name, part) for name, part in model.named_modules() if name]
    found: set[int] = set()
    for pattern in patterns:
        expression = re.escape(pattern).replace(r"\*", r"\d+")
        ids = {id(part) for name, part in named if re.fullmatch(rf"(.+\.)?{expression}", name)}
        if not ids:
            names = [name.removeprefix("module.") for name, _ in named if name != "module"]
            known = sorted({_NUMBER.sub("*", name) for name in names})
            near = get_close_matches(pattern, known, 3, 0.4) or known[:8]
            raise ConfigurationError(
                f"activation_checkpointing has {pattern!r}, which names no module: expected names "
                f"such as {', '.join(map(repr, near))}"
            )
        found |= ids
    return [part for _, part in named if id(part) in found]


class _Checkpointed:
    """Takes the place of a module's forward; not a wrapping module, which would change names."""

    def __init__(self, part: nn.Module, forward: Callable[..., Any], how: Recompute) -> None:
        self._part = part
        self._offload = how.offload
        self._is_kept = None if how.keep is None else keeps(how.keep)
        self.forward_to_repeat = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._inputs_on_host():
            return checkpoint(
                self.forward_to_repeat,
                *args,
                use_reentrant=False,
                context_fn=self._contexts,
                **kwargs,
            )

    def _inputs_on_host(self) -> AbstractContextManager[Any]:
        if self._offload and torch.is_grad_enabled():
            return save_on_cpu(pin_memory=torch.cuda.is_available())
        return nullcontext()

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        first = _NotesChanges(self._part)
        second = _OnCopies(first)
        if self._is_kept is None:
            return first, second
        kept = KeptOutputs(self._is_kept)
        return _Both(first, Keeping(kept)), _Both(second, Returning(kept))


class _Both(AbstractContextManager[None]):
    """Two contexts, entered in order; a second backward pass enters them again."""

    def __init__(self, *contexts: AbstractContextManager[Any]) -> None:
        self._contexts = contexts

    def __enter__(self) -> None:
        self._stack = ExitStack()
        for context in self._contexts:
            self._stack.enter_context(context)

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)


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
