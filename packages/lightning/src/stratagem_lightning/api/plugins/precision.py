"""Precision by the classes that Lightning has for it, with the methods that those have."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.optim import Optimizer

from stratagem import precision as own
from stratagem.errors import ConfigurationError
from stratagem.launch import rank_zero_warn
from stratagem.precision import default_dtype
from stratagem_lightning.api.instance_check import InstanceCheck, of_class, renamed
from stratagem_lightning.api.plugins.torch_xla import require_torch_xla
from stratagem_lightning.api.utilities.exceptions import UserRuntimeError
from stratagem_lightning.api.utilities.warnings import rank_zero_deprecation


class Precision(own.Precision, metaclass=InstanceCheck):
    """A precision whose methods convert batches, as in Lightning.

    A subclass names itself by `precision`, and overrides `convert_module`, `convert_input`,
    `convert_output`, `module_init_context` and `forward_context` as it likes.

    Example:
        >>> import torch
        >>> from stratagem import Trainer
        >>> class Halves(Precision):
        ...     precision = "halves"
        ...     def convert_input(self, data):
        ...         return data / 2
        >>> Trainer(accelerator="cpu", plugins=Halves()).plan.precision.name
        'halves'
        >>> Halves().input_converter()(torch.ones(1))
        tensor([0.5000])
    """

    name = "32-true"
    is_instance = of_class(own.Precision)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if isinstance(vars(cls).get("precision"), str):
            cls.name = vars(cls)["precision"]

    @property
    def precision(self) -> str:
        """The name that selects the precision."""
        return self.name

    # -- Stratagem's methods, in Lightning's words

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Return a context in which to build a model."""
        return super().init_context()

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Return a context in which new tensors have the parameters' dtype."""
        return super().init_context()

    def init_context(self) -> AbstractContextManager[Any]:
        """Return `module_init_context`."""
        return self.module_init_context()

    def convert_input(self, data: Any) -> Any:
        """Return a batch as the model takes it."""
        convert = super().input_converter()
        return data if convert is None else convert(data)

    def convert_output(self, data: Any) -> Any:
        """Return a model's output as Fabric hands it out."""
        convert = super().output_converter()
        return data if convert is None else convert(data)

    def input_converter(self) -> Callable[[Any], Any] | None:
        """Return `convert_input` where a subclass has its own."""
        return self.convert_input if self._overrides("convert_input") else super().input_converter()

    def output_converter(self) -> Callable[[Any], Any] | None:
        """Return `convert_output` where a subclass has its own."""
        own = self._overrides("convert_output")
        return self.convert_output if own else super().output_converter()

    def _overrides(self, method: str) -> bool:
        return getattr(type(self), method) is not getattr(Precision, method)

    # -- for a loop of one's own

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Run backward from a loss, scaled if this precision scales it.

        Args:
            tensor: the loss.
            model: ignored.
            *args, **kwargs: the arguments of `Tensor.backward`.
        """
        self.scale_loss(tensor).backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def optimizer_step(
        self, optimizer: Optimizer, model: Any = None, closure: Any = None, **kwargs: Any
    ) -> None:
        """Step the optimizer.

        Args:
            optimizer: its `step` receives `kwargs`, and `closure` unless `closure` is None.
            model: ignored.
            closure: the closure of torch's optimizers.
            **kwargs: further arguments of `step`.
        """
        if closure is not None:
            kwargs["closure"] = closure
        if self.scales_loss:
            super().optimizer_step(optimizer, **kwargs)
        else:
            optimizer.step(**kwargs)

    def clip_gradients(
        self, optimizer: Optimizer, clip_val: float = 0.0, gradient_clip_algorithm: str = "norm"
    ) -> None:
        """Clip the gradients of an optimizer's parameters.

        Args:
            optimizer: has the parameters.
            clip_val: the largest norm, or value; 0 disables clipping.
            gradient_clip_algorithm: "norm" or "value".

        Raises:
            UserRuntimeError: the optimizer unscales the gradients itself.
        """
        if clip_val <= 0:
            return
        if self.scales_loss and getattr(optimizer, "_step_supports_amp_scaling", False):
            raise UserRuntimeError(
                f"The current optimizer, {type(optimizer).__qualname__}, does not allow for "
                "gradient clipping because it unscales gradients in its step: pass fused=False"
            )
        if gradient_clip_algorithm == "value":
            self.clip_grad_by_value(optimizer, clip_val)
        else:
            self.clip_grad_by_norm(optimizer, clip_val)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip each gradient's elements to a largest value."""
        nn.utils.clip_grad_value_(_parameters(optimizer), clip_val)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip the norm of all gradients together."""
        nn.utils.clip_grad_norm_(_parameters(optimizer), clip_val)


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class DoublePrecision(Precision, own.TruePrecision):
    """float64 throughout: "64-true"."""

    is_instance = of_class(own.TruePrecision, "64-true")

    def __init__(self) -> None:
        super().__init__("64-true")


class LightningDoublePrecisionModule(nn.Module):
    """A model with inputs converted to float64; `DoublePrecision` does so itself.

    Args:
        pl_module: the model.
    """

    def __init__(self, pl_module: nn.Module) -> None:
        super().__init__()
        rank_zero_deprecation(
            "The `LightningDoublePrecisionModule` is deprecated and no longer needed: use "
            "precision='64-true'"
        )
        self.module = pl_module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model with converted inputs."""
        convert = DoublePrecision().convert_input
        return self.module(*convert(args), **convert(kwargs))


class HalfPrecision(Precision, own.TruePrecision):
    """float16 or bfloat16 throughout.

    Args:
        precision: "16-true" or "bf16-true".
    """

    is_instance = of_class(own.TruePrecision, "16-true", "bf16-true")

    def __init__(self, precision: str = "16-true") -> None:
        super().__init__(precision)


class MixedPrecision(Precision, own.MixedPrecision):
    """float32 parameters; autocast to bfloat16 or float16 for operations that are safe.

    Args:
        precision: "bf16-mixed"; or "16-mixed", which stratagem-backend-cuda provides.
        device: the argument of Lightning; ignored: the accelerator's type is used.
        scaler: for "16-mixed": the scaler of the loss; None for a default scaler of torch.

    Raises:
        ConfigurationError: the precision is unknown, or a scaler is passed for "bf16-mixed".
    """

    scaler: Any = None
    is_instance = of_class(own.Precision, "16-mixed", "bf16-mixed")

    def __new__(cls, precision: str = "", *args: Any, **options: Any) -> MixedPrecision:
        """Return one that scales the loss for "16-mixed"."""
        if cls is not MixedPrecision or precision != "16-mixed":
            return super().__new__(cls)
        from stratagem_lightning.api.plugins.float16 import Float16MixedPrecision

        return Float16MixedPrecision.__new__(Float16MixedPrecision)

    def __init__(self, precision: str, device: str = "cuda", scaler: Any = None) -> None:
        if precision not in ("16-mixed", "bf16-mixed"):
            raise ConfigurationError(
                f"Passed `MixedPrecision(precision={precision!r})`. Precision must be '16-mixed' "
                "or 'bf16-mixed'"
            )
        if precision == "bf16-mixed" and scaler is not None:
            raise ConfigurationError(
                "`precision='bf16-mixed'` does not use a scaler, since bfloat16 has the range of "
                "float32: leave it out, or pass '16-mixed'"
            )
        super().__init__(precision, **({} if scaler is None else {"scaler": scaler}))
        self.device = device

    def autocast_context_manager(self) -> Any:
        """Return the context of forward passes."""
        return self.forward_context()


class _TruePrecision(Precision, own.TruePrecision):
    """One dtype throughout."""


_OF_XLA = ("32-true", "16-true", "bf16-true")
_OF_SHARDING = ("32-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed")


class FSDPPrecision(Precision):
    """The precision of that name, for a sharding strategy.

    Args:
        precision: "32-true", "bf16-true", "16-true", "bf16-mixed" or "16-mixed".
        scaler: see `MixedPrecision`.

    Raises:
        ConfigurationError: the precision is unknown, or does not use the scaler.

    Example:
        >>> precision = FSDPPrecision("bf16-mixed")
        >>> isinstance(precision, FSDPPrecision), isinstance(precision, MixedPrecision)
        (True, True)
    """

    is_instance = of_class(own.Precision, *_OF_SHARDING)

    def __new__(cls, precision: str = "", scaler: Any = None) -> Any:
        """Return the one that computes so."""
        _check("FSDPPrecision", precision)
        if precision.endswith("mixed"):
            return _sharding(type(MixedPrecision(precision)))(precision, scaler=scaler)
        return _sharding(_TruePrecision)(precision)


@cache
def _sharding(kind: Any) -> Any:
    """Return a class of precisions with the dtypes that FSDP1 is told."""
    return type(kind)(kind.__name__, (_Dtypes, kind), {"__module__": __name__})


class _Dtypes:
    """What FSDP1 is told of a precision."""

    name: str

    @property
    def mixed_precision_config(self) -> Any:
        """The dtypes as a `torch.distributed.fsdp.MixedPrecision`."""
        if self.name in ("16-true", "bf16-true"):
            rank_zero_warn(
                f"FSDP with `{self.name}` enables computation in lower precision; with this "
                "`MixedPrecision`, FSDP1 keeps a full-precision copy of the parameters"
            )
        dtypes = {"32": torch.float32, "16": torch.float16, "bf16": torch.bfloat16}
        dtype = dtypes[self.name.partition("-")[0]]
        return fsdp.MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype)


def _check(who: str, precision: str) -> None:
    if precision not in _OF_SHARDING:
        expected = ", ".join(map(repr, _OF_SHARDING))
        engine = who.removesuffix("Precision")
        raise ConfigurationError(
            f"`precision={precision!r}` is not supported in {engine}. `precision` must be one of "
            f"{expected}"
        )


class DeepSpeedPrecision(Precision, own.EnginePrecision):
    """The precision that DeepSpeed's engine computes in.

    Args:
        precision: "32-true", "bf16-true", "16-true", "bf16-mixed" or "16-mixed".

    Raises:
        ConfigurationError: the precision is unknown.
    """

    is_instance = of_class(own.EnginePrecision)

    def __init__(self, precision: str) -> None:
        _check("DeepSpeedPrecision", precision)
        super().__init__(precision)
        if precision == "32-true":
            self.dtype = torch.float32

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return a model of half precision for "true" names; DeepSpeed converts the others."""
        return module if self.name.endswith("mixed") else super().convert_module(module)

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Return a context in which to build a model; "true" names have half-precision ones."""
        stays = self.name.endswith("mixed")
        return super().module_init_context() if stays else default_dtype(self.dtype)

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Let the engine run backward.

        Args:
            tensor: the loss.
            model: the engine.
            *args, **kwargs: for its `backward`.
        """
        model.backward(tensor, *args, **kwargs)


class XLAPrecision(Precision):
    """The precision of that name on XLA devices.

    Args:
        precision: "32-true", "16-true" or "bf16-true".

    Raises:
        ConfigurationError: the precision is unknown.
        MissingPackageError: torch_xla is not installed.
    """

    is_instance = of_class(own.TruePrecision, *_OF_XLA)

    def __new__(cls, precision: str = "32-true") -> Any:
        """Return the one that computes so."""
        require_torch_xla("XLAPrecision")
        if precision not in _OF_XLA:
            raise ConfigurationError(
                f"`precision={precision!r}` is not supported in XLA. `precision` must be one of "
                f"{', '.join(map(repr, _OF_XLA))}"
            )
        return _TruePrecision(precision)


def _of_bfloat16(name: str) -> Any:
    """Return the earlier class of `XLAPrecision("bf16-true")`."""
    earlier = renamed(name, XLAPrecision)
    make = earlier.__new__
    earlier.__new__ = lambda cls: make(cls, "bf16-true")
    return earlier


PrecisionPlugin = renamed("PrecisionPlugin", Precision)
DoublePrecisionPlugin = renamed("DoublePrecisionPlugin", DoublePrecision)
HalfPrecisionPlugin = renamed("HalfPrecisionPlugin", HalfPrecision)
MixedPrecisionPlugin = renamed("MixedPrecisionPlugin", MixedPrecision)
FSDPPrecisionPlugin = renamed("FSDPPrecisionPlugin", FSDPPrecision)
DeepSpeedPrecisionPlugin = renamed("DeepSpeedPrecisionPlugin", DeepSpeedPrecision)
FSDPMixedPrecisionPlugin = renamed("FSDPMixedPrecisionPlugin", MixedPrecision)
XLAPrecisionPlugin = renamed("XLAPrecisionPlugin", XLAPrecision)
TPUPrecision = renamed("TPUPrecision", XLAPrecision)
TPUPrecisionPlugin = renamed("TPUPrecisionPlugin", XLAPrecision)
TPUBf16Precision = _of_bfloat16("TPUBf16Precision")
TPUBf16PrecisionPlugin = _of_bfloat16("TPUBf16PrecisionPlugin")
XLABf16Precision = _of_bfloat16("XLABf16Precision")
XLABf16PrecisionPlugin = _of_bfloat16("XLABf16PrecisionPlugin")
