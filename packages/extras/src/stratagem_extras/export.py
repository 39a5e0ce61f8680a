"""A model as a file that other programs run: TorchScript and ONNX, by torch's own exporters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stratagem.errors import ConfigurationError, UserCodeError


def to_torchscript(
    model: nn.Module,
    file_path: str | Path | None,
    method: str,
    example_inputs: Any,
    options: dict[str, Any],
) -> Any:
    """See `Module.to_torchscript`."""
    with _evaluation(model), _attached(model):
        if method == "script":
            script = torch.jit.script(model, **options)
        elif method == "trace":
            inputs = _given(model, example_inputs, "to_torchscript(method='trace')")
            script = torch.jit.trace(model, inputs, **options)  # type: ignore[no-untyped-call]
        else:
            raise UserCodeError(f"to_torchscript(method={method!r}): expected 'script' or 'trace'")
    if file_path is not None:
        torch.jit.save(script, str(file_path))
    return script


def to_onnx(model: nn.Module, file_path: Any, input_sample: Any, options: dict[str, Any]) -> Any:
    """See `Module.to_onnx`."""
    needed = ("onnx", "onnxscript") if options.get("dynamo", True) else ("onnx",)
    if missing := [name for name in needed if find_spec(name) is None]:
        raise ConfigurationError(
            f"to_onnx() needs {' and '.join(missing)}, which is not installed: "
            "pip install stratagem-core[onnx]"
        )
    with _evaluation(model):
        inputs = _given(model, input_sample, "to_onnx()")
        inputs = inputs if isinstance(inputs, tuple) else (inputs,)
        return torch.onnx.export(model, inputs, file_path, **options)


def _given(model: nn.Module, inputs: Any, who: str) -> Any:
    if inputs is None:
        raise UserCodeError(
            f"{type(model).__name__}.{who} needs inputs to run forward with: pass them, or set "
            "example_input_array in the Module"
        )
    return inputs


@contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every submodule gets its own mode back."""
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, mode in modes:
            part.training = mode


@contextmanager
def _attached(model: nn.Module) -> Iterator[None]:
    """A Module without a Trainer as one that has some Trainer.

    torch.jit reads every property of a class, and goes on after an AttributeError only.
    """
    trainer = vars(model).get("_trainer")
    vars(model)["_trainer"] = trainer or object()
    try:
        yield
    finally:
        vars(model)["_trainer"] = trainer
