"""LightningModule: a Module by Lightning's name."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from stratagem.errors import ConfigurationError
from stratagem.launch.rank_zero import rank_zero_warn
from stratagem.lightning.api.datamodule import of_file
from stratagem.lightning.api.warnings import LightningDeprecationWarning
from stratagem.module import Module

ModuleType = TypeVar("ModuleType", bound="LightningModule")


def _is_property(value: object) -> bool:
    return isinstance(value, property)


class LightningModule(Module):
    """A Module, under the name that Lightning has for it."""

    CHECKPOINT_HYPER_PARAMS_KEY = "hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME = "hparams_name"
    CHECKPOINT_HYPER_PARAMS_TYPE = "hparams_type"
    example_input_array: Any = None
    """What `forward` is given once for the table of layers; None: nothing."""
    __jit_unused_properties__ = [  # noqa: RUF012 - torch.jit reads a list
        "fabric",
        *(name for base in Module.__mro__ for name, v in vars(base).items() if _is_property(v)),
    ]

    # -- with Fabric in the place of a Trainer

    @property
    def fabric(self) -> Any:
        """The Fabric that has set this model up, or None."""
        return self.__dict__.get("_fabric")

    @fabric.setter
    def fabric(self, fabric: Any) -> None:
        self.__dict__["_fabric"] = fabric

    @property
    def loggers(self) -> list[Any]:
        """The Trainer's loggers, or Fabric's."""
        return super().loggers if self.fabric is None else list(self.fabric.loggers)

    def _log_outside_of_a_run(self, name: str, value: Any) -> None:
        """Let Fabric log; without it say that nothing does."""
        if self.__dict__["_trainer"] is not None:
            super()._log_outside_of_a_run(name, value)
        if self.fabric is None:
            rank_zero_warn(
                f"You are trying to `self.log({name!r}, ...)` but the `self.trainer` reference is "
                "not registered on the model yet: nothing is logged"
            )
            return
        self.fabric.log(name, value)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer, or a list of them, of the Trainer or of Fabric.

        Args:
            use_pl_optimizer: not needed here: a step always goes through the strategy.
        """
        if self.fabric is None:
            return super().optimizers()
        found = self.__dict__["_fabric_optimizers"]
        return found[0] if len(found) == 1 else list(found)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return what `forward` makes of a batch."""
        return self(kwargs["batch"] if "batch" in kwargs else args[0])

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward through the strategy, of the Trainer or of Fabric."""
        if self.fabric is None:
            super().manual_backward(loss, *args, **kwargs)
        else:
            self.fabric.backward(loss, *args, **kwargs)

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return every rank's tensors; `group` is not needed here."""
        if self.fabric is not None:
            return self.fabric.all_gather(data)
        return super().all_gather(data, sync_grads=sync_grads)

    # -- from a checkpoint, and to other formats

    @classmethod
    def load_from_checkpoint(
        cls: type[ModuleType],
        checkpoint_path: str | Path,
        map_location: Any = None,
        hparams_file: str | Path | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> ModuleType:
        """Make a model from a checkpoint; as `Module.load_from_checkpoint`.

        Args:
            checkpoint_path, map_location, **kwargs: as there.
            hparams_file: a YAML file whose values go before those of the checkpoint.
            strict: refuse names that do not match; None: True.
            weights_only: not needed here: nothing in a checkpoint is ever executed.
        """
        return super().load_from_checkpoint(
            checkpoint_path,
            map_location=map_location,
            strict=strict is not False,
            **of_file(hparams_file),
            **kwargs,
        )

    def to_onnx(self, file_path: Any = None, input_sample: Any = None, **kwargs: Any) -> Any:
        """Write the model as ONNX.

        Args:
            file_path: a path or a file object.
            input_sample: what `forward` is given; None: `example_input_array`.
            **kwargs: those of `torch.onnx.export`.

        Raises:
            ConfigurationError: there is no input.
        """
        sample = self.example_input_array if input_sample is None else input_sample
        if sample is None:
            raise ConfigurationError(
                "Could not export to ONNX since neither `input_sample` nor "
                "`model.example_input_array` attribute is set."
            )
        mode = self.training
        try:
            with torch.no_grad():
                path = str(file_path) if isinstance(file_path, Path) else file_path
                return torch.onnx.export(self.eval(), self._on_device(sample), path, **kwargs)
        finally:
            self.train(mode)

    def to_torchscript(
        self,
        file_path: str | Path | None = None,
        method: Literal["script", "trace"] = "script",
        example_inputs: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Return the model as TorchScript, which Lightning and torch call deprecated.

        Args:
            file_path: where to save it; None: nowhere.
            method: "script" or "trace".
            example_inputs: for "trace"; None: `example_input_array`.
            **kwargs: those of `torch.jit.script` or `trace`.

        Raises:
            ConfigurationError: there is no such method, or no input.
        """
        warnings.warn(
            "`LightningModule.to_torchscript` has been deprecated in v2.7 and will be removed in "
            "v2.8 of Lightning: use torch.export",
            LightningDeprecationWarning,
            stacklevel=2,
        )
        if method not in ("script", "trace"):
            raise ConfigurationError(
                f"The 'method' parameter only supports 'script' or 'trace', but value given was: "
                f"{method}"
            )
        inputs = self.example_input_array if example_inputs is None else example_inputs
        if method == "trace" and inputs is None:
            raise ConfigurationError(
                "Choosing method=`trace` requires either `example_inputs` or "
                "`model.example_input_array` to be defined."
            )
        mode, trainer = self.training, self.__dict__["_trainer"]
        # torch.jit looks at every attribute, and takes only an AttributeError for "there is none".
        self.__dict__["_trainer"] = trainer or object()
        try:
            with torch.no_grad():
                self.eval()
                jit: Any = torch.jit
                if method == "script":
                    script = jit.script(self, **kwargs)
                else:
                    script = jit.trace(self, example_inputs=self._on_device(inputs), **kwargs)
        finally:
            self.train(mode)
            self.__dict__["_trainer"] = trainer
        if file_path is not None:
            jit.save(script, str(file_path))
        return script

    def _on_device(self, inputs: Any) -> Any:
        return self.transfer_batch_to_device(inputs, self.device, 0)
