"""HyperParameters: the arguments that a model was made with, as a checkpoint holds them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import FrameType
from typing import Any

from stratagem.state.plain_data import find_offending_value


class HyperParameters(dict[str, Any]):
    """Hyperparameters by name; also found and set as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"there is no hyperparameter {name!r}; there are {', '.join(self) or 'none'}"
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


def arguments_of_init(module: object, frame: FrameType | None) -> dict[str, Any]:
    """Return the arguments of those `__init__` methods of `module` that are running."""
    kept: dict[str, Any] = {}
    while frame is not None and any(value is module for value in frame.f_locals.values()):
        for owner in type(module).__mro__:
            init = vars(owner).get("__init__")
            if init is None or getattr(init, "__code__", None) is not frame.f_code:
                continue
            for parameter in list(inspect.signature(init).parameters.values())[1:]:
                if parameter.kind is parameter.VAR_KEYWORD:
                    kept.update(frame.f_locals.get(parameter.name, {}))
                elif parameter.kind is not parameter.VAR_POSITIONAL:
                    # One that the method has deleted since is gone.
                    kept.update({k: v for k, v in frame.f_locals.items() if k == parameter.name})
        frame = frame.f_back
    return kept


def savable(parameters: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return those that a checkpoint can hold, and of the others by name, why it cannot.

    Example:
        >>> savable({"lr": 0.1, "activation": abs})[0]
        {'lr': 0.1}
    """
    reasons = {name: find_offending_value(value) for name, value in parameters.items()}
    kept = {name: value for name, value in parameters.items() if not reasons[name]}
    return kept, {name: reason for name, reason in reasons.items() if reason}
