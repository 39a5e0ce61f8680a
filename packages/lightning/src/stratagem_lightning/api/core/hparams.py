"""HyperparametersMixin: records arguments as Lightning does."""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from torch import nn

from stratagem import module
from stratagem.errors import StratagemError
from stratagem.launch import rank_zero_warn
from stratagem.module import HyperParameters
from stratagem_lightning.api.utilities.parsing import get_init_args
from stratagem_lightning.api.utilities.phrases import with_phrase


class HyperparametersMixin(module.HyperParametersMixin):
    """Stratagem's; within another object's `__init__`, also records what that one was given.

    Example:
        >>> class Layer(HyperparametersMixin):
        ...     def __init__(self, width):
        ...         super().__init__()
        ...         self.save_hyperparameters()
        >>> class Net(HyperparametersMixin):
        ...     def __init__(self, depth):
        ...         super().__init__()
        ...         self.layer = Layer(8)
        >>> dict(Net(1).layer.hparams)
        {'width': 8, 'depth': 1}
    """

    def save_hyperparameters(
        self,
        *args: Any,
        ignore: str | Sequence[str] | None = None,
        frame: FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Record the arguments of `__init__`; as `Module.save_hyperparameters`.

        Warns of modules among them: a checkpoint has their weights anyway.

        Args:
            *args, ignore, frame, logger: as there.
        """
        here = inspect.currentframe()
        frame = here.f_back if frame is None and here is not None else frame
        try:
            super().save_hyperparameters(*args, ignore=ignore, frame=frame, logger=logger)
        except StratagemError as error:
            raise with_phrase(error, "save_hyperparameters") from error.__cause__
        if not args:
            ignored = {ignore} if isinstance(ignore, str) else set(ignore or ())
            self._record_of_makers(frame, ignored, logger=logger)
        self._set_hparams(dict(self.hparams))
        for name, value in self.hparams.items():
            if isinstance(value, nn.Module):
                rank_zero_warn(
                    f"Attribute {name!r} is an instance of `nn.Module` and is already saved during "
                    "checkpointing. Leave it out of the hyperparameters: "
                    f"self.save_hyperparameters(ignore=[{name!r}])"
                )

    def _set_hparams(self, hp: Namespace | Mapping[str, Any]) -> None:
        """Add hyperparameters: libraries call and override it."""
        self.hparams.update(vars(hp) if isinstance(hp, Namespace) else hp)

    def _record_of_makers(
        self, frame: FrameType | None, ignored: set[str], *, logger: bool
    ) -> None:
        """Record the arguments of the objects within whose `__init__` this one is made."""
        makers: dict[str, Any] = {}
        while frame is not None and frame.f_code.co_name == "__init__":
            own = next(iter(inspect.getargvalues(frame).locals.values()), None)
            if not isinstance(own, module.HyperParametersMixin):
                break
            if own is not self:
                makers = {**get_init_args(frame), **makers}
            frame = frame.f_back
        added: Mapping[str, Any] = {
            name: value
            for name, value in makers.items()
            if name not in self.hparams and name not in ignored
        }
        if added:
            self.hparams.update(added)
            self.__dict__["_hparams_initial"] = HyperParameters(self.hparams if logger else {})
