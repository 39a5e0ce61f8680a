"""A model as a file for other programs, by torch.export, ONNX and TorchScript."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from stratagem.data import map_tensors
from stratagem.errors import ConfigurationError, UserCodeError, format_text
from stratagem.launch import line_in_traceback
from stratagem.lite import LiteModule
from stratagem.storage import durable_replace


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


def to_exported(
    model: nn.Module,
    file_path: str | Path | None = None,
    inputs: Any = None,
    *,
    dynamic_shapes: Any = "batch",
    check: bool = True,
) -> ExportedProgram:
    """Export the forward pass of a model in evaluation mode by `torch.export`.

    The program needs no code of the model: `torch.export.load(path).module()` runs it. With several
    ranks, call this on rank 0.

    Args:
        model: the model, such as a trained Module, whole on this rank.
        file_path: the path of a new file, which ends in ".pt2". Default: only return the program.
        inputs: inputs of `forward`: a tensor, a tuple of arguments or a dict of keyword arguments.
            Default: `example_input_array`.
        dynamic_shapes: the sizes that may differ from the inputs, as `torch.export.export` takes
            them. "batch": the first size of each tensor, alike for all. `None`: no size.
        check: compare the program with the model on the inputs.

    Raises:
        ConfigurationError: the parameters are sharded, or an argument does not fit.
        UserCodeError: torch cannot export the model; the message has torch's reason. Or the program
            computes something else.

    Example:
        >>> import torch
        >>> from stratagem_extras.export import to_exported
        >>> program = to_exported(torch.nn.Linear(2, 1), inputs=torch.ones(4, 2))
        >>> program.module()(torch.ones(7, 2)).shape
        torch.Size([7, 1])
    """
    _check_whole(model)
    if isinstance(model, LiteModule):
        model = model.module
    if file_path is not None and Path(file_path).suffix != ".pt2":
        raise ConfigurationError(
            f"to_exported(file_path={str(file_path)!r}): expected a path that ends in .pt2"
        )
    inputs = getattr(model, "example_input_array", None) if inputs is None else inputs
    given = _given(model, inputs, "to_exported()")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    given = map_tensors(lambda tensor: tensor.to(device), given)
    if not isinstance(given, (tuple, dict)):
        given = (given,)
    args, kwargs = ((), given) if isinstance(given, dict) else (given, {})
    if dynamic_shapes == "batch":
        dynamic_shapes = _batches(_by_argument(model, args, kwargs) or given)
    with _evaluation(model):
        try:
            program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes)
        except Exception as error:
            raise UserCodeError(
                f"torch.export cannot export {type(model).__name__} ({line_in_traceback(error)}): "
                f"{type(error).__name__}: {format_text(str(error), 1500)}"
            ) from error
        if check:
            _compare(model, program, args, kwargs)
    if file_path is not None:
        with durable_replace(file_path) as new, new.open("wb") as file:
            torch.export.save(program, file)
    return program


def _check_whole(model: nn.Module) -> None:
    """Refuse a model of which this rank has a part."""
    for name, parameter in model.named_parameters():
        # Parameters of DeepSpeed's stage 3 have a shape of their own.
        if hasattr(parameter, "full_tensor") or hasattr(parameter, "ds_shape"):
            raise ConfigurationError(
                f"to_exported() received a {type(model).__name__} whose parameters are sharded "
                f"({name}): expected a whole model. Save a checkpoint, and export "
                f"{type(model).__name__}.load_from_checkpoint(path) in one process"
            )
    if any(type(part).__module__.startswith("stratagem_mesh.") for part in model.modules()):
        raise ConfigurationError(
            f"to_exported() received a {type(model).__name__} that is divided over a mesh: "
            "expected a whole model. Save a checkpoint, and export "
            f"{type(model).__name__}.load_from_checkpoint(path) in one process"
        )


def _by_argument(model: nn.Module, args: Any, kwargs: Any) -> dict[str, Any] | None:
    """Return inputs by the arguments of forward; None: forward takes others.

    Raises:
        ConfigurationError: forward takes inputs by any name, for which torch has no shapes.
    """
    takes = signature(model.forward)
    for name, parameter in takes.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD and set(kwargs) - set(takes.parameters):
            raise ConfigurationError(
                f"to_exported(dynamic_shapes='batch'): forward of {type(model).__name__} takes "
                f"inputs by any name (**{name}), for which torch has no dynamic shapes: export the "
                "module that it calls, such as module.model, or pass dynamic_shapes=None"
            )
    try:
        return dict(takes.bind(*args, **kwargs).arguments)
    except TypeError:  # torch.export names the missing input
        return None


def _batches(inputs: Any) -> Any:
    """Return dynamic shapes in which the first size of each tensor is the batch."""
    batch = Dim("batch")
    sizes: set[int] = set()

    def shape_of(value: Any) -> Any:
        if isinstance(value, Tensor):
            sizes.update(value.shape[:1])
            return {0: batch} if value.ndim else None
        if isinstance(value, dict):
            return {name: shape_of(one) for name, one in value.items()}
        return type(value)(map(shape_of, value)) if isinstance(value, (tuple, list)) else None

    shapes = shape_of(inputs)
    if len(sizes) != 1 or min(sizes) < 2:
        raise ConfigurationError(
            f"to_exported(dynamic_shapes='batch'): the first sizes of the inputs are "
            f"{sorted(sizes)}: expected one size of at least 2 in all of them, since torch takes "
            "a size of 1 as fixed. For other inputs pass the dynamic_shapes of torch.export, or "
            "None"
        )
    return shapes


def _compare(model: nn.Module, program: ExportedProgram, args: Any, kwargs: Any) -> None:
    """Compare a program with its model."""
    try:
        torch.testing.assert_close(program.module()(*args, **kwargs), model(*args, **kwargs))
    except (AssertionError, TypeError) as error:
        raise UserCodeError(
            f"the exported program of {type(model).__name__} computes something else than the "
            f"model: {format_text(str(error), 500)}. A forward pass that draws random numbers "
            "differs in each call: pass check=False then"
        ) from error


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
