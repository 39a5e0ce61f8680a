"""Comparing a copy of a model on a mesh with one process, before the model trains."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from copy import deepcopy
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stratagem.errors import ConfigurationError, StratagemError, UserCodeError, format_text
from stratagem.precision import TruePrecision
from stratagem.rng import preserve_rng_state
from stratagem.strategies import PreparedModel, Ranks, StepModule
from stratagem_mesh.check.losses import Call, example_calls, loss_of
from stratagem_mesh.check.reduction import (
    Draws,
    former_name,
    give_values,
    reduce_layers,
    without_dropout,
)
from stratagem_mesh.check.values import (
    KeepFloat64,
    Outputs,
    Row,
    compare_outputs,
    difference,
    largest_of,
    of_pieces,
    pieces_of,
    row_of,
)
from stratagem_torch.sharding import DeferredBuild

LAYERS = 2
"""The layers of each kind that are compared."""

_STEP = "_mesh_step"
_LONGEST = 500

T = TypeVar("T")


class Mesh(Protocol):
    """What the comparison asks of a strategy: of a twin of the one that trains."""

    ranks: Ranks
    device: torch.device
    accelerator: Any
    example_input: Any

    def prepare(self, module: nn.Module) -> PreparedModel:
        """Divide and shard a model."""

    def backward(self, prepared: PreparedModel, loss: Tensor) -> None:
        """Run backward."""


def check_model(model: nn.Module, mesh: Mesh, place: str, *, layers: int | None) -> None:
    """Raise on all ranks if a copy of a model computes something else on a mesh.

    Args:
        model: does not change.
        mesh: divides the copy.
        place: the sizes of the mesh, for the error.
        layers: the layers of each kind that the copy keeps; None: all.

    Raises:
        UserCodeError: names the module or the parameter that differs.
        ConfigurationError: the model has no example of an input, or the mesh refuses the model.
    """
    before = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(preserve_rng_state(mesh.accelerator, mesh.device))
        torch.set_default_dtype(torch.float64)
        stack.callback(torch.set_default_dtype, before)
        stack.enter_context(KeepFloat64())
        rows, kept = _compared(model, mesh, layers)
    gc.collect()  # the copy, which its hooks hold in circles
    if mesh.device.type != "cpu":
        torch.get_device_module(mesh.device).empty_cache()
    texts = mesh.ranks.gather_objects(_in_words(rows, model, kept))
    said = next(filter(None, texts), "")
    if said:
        copied = f" with {layers} layers of each kind" if kept else ""
        raise UserCodeError(
            f"{type(model).__name__} computes something else on {place} than in one process: in "
            f"float64, for a copy{copied}, {said}. Divide fewer layers (tensor_plan, "
            "context_modules), or set the axis to 1; `stratagem mesh check` compares a whole step. "
            "check=False trains without this comparison"
        )


def _compared(
    model: nn.Module, mesh: Mesh, layers: int | None
) -> tuple[list[Row], dict[str, list[int]]]:
    copy, kept = _together(mesh, lambda: _copied(model, mesh, layers))
    for tensor in (*copy.parameters(), *copy.buffers()):
        dist.broadcast(tensor.detach(), 0)
    step = StepModule(copy)
    calls = example_calls(copy, mesh.example_input, mesh.device)
    vars(copy)[_STEP] = lambda: _loss(calls)

    def alone() -> tuple[Tensor, dict[str, list[Tensor]], dict[str, Tensor | None]]:
        loss, outputs = _forward(step, copy)
        if loss.requires_grad:
            torch.autograd.backward(loss)
        gradients = {name: p.grad for name, p in copy.named_parameters()}
        copy.zero_grad()
        return loss.detach(), outputs, gradients

    def on_mesh() -> list[Row]:
        prepared = mesh.prepare(step)
        loss, outputs = _forward(prepared.module, copy)
        if loss.requires_grad:
            mesh.backward(prepared, loss)
        return [
            compare_outputs(outputs, expected),
            Row("loss", difference(loss.detach(), whole)),
            _compare_gradients(copy, gradients),
        ]

    whole, expected, gradients = _together(mesh, alone)
    return _together(mesh, on_mesh), kept


def _copied(
    model: nn.Module, mesh: Mesh, layers: int | None
) -> tuple[nn.Module, dict[str, list[int]]]:
    """Return a copy in float64 on the rank's device, and the indices of layers that stay."""
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ConfigurationError(
            f"MeshStrategy(check=True) compares a copy of {type(model).__name__}, whose parameters "
            "are divided between ranks already: let the strategy divide them, or pass check=False"
        )
    copy = deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    kept = {} if layers is None else reduce_layers(copy, layers)
    draws = Draws(mesh.device)

    def in_double(name: str, parameter: nn.Parameter) -> Tensor:
        if parameter.is_meta:
            return draws(name, parameter)
        return parameter.detach().to(mesh.device, copy=True)

    with DeferredBuild(mesh.accelerator, mesh.device):  # gathers those of which a rank has a part
        give_values(copy, in_double)
    without_dropout(copy)
    return TruePrecision("64-true").convert_module(copy.to(mesh.device)).train(), kept


def _forward(step: nn.Module, copy: nn.Module) -> tuple[Tensor, dict[str, list[Tensor]]]:
    torch.manual_seed(0)  # the model may draw numbers; the states are restored afterwards
    outputs = Outputs(copy)
    loss: Tensor = step(_STEP)
    outputs.close()
    return loss, dict(outputs)


def _loss(calls: list[Call]) -> Tensor:
    return torch.stack([loss_of(part(*args, **kwargs)) for part, args, kwargs in calls]).sum()


def _compare_gradients(copy: nn.Module, expected: Mapping[str, Tensor | None]) -> Row:
    differences = {}
    for name, parameter in copy.named_parameters():
        whole, own = expected.get(name), parameter.grad
        if own is None:
            differences[name] = 0.0 if whole is None else largest_of(whole)
            continue
        if whole is None:
            whole = torch.zeros(own.shape, dtype=own.dtype, device=own.device)
        differences[name] = of_pieces(pieces_of(own), whole, largest_of(whole))
    return row_of("gradients", differences, last=True)


def _in_words(rows: list[Row], model: nn.Module, kept: Mapping[str, list[int]]) -> str:
    """Return the first quantity that differs, or ""."""
    modules = dict(model.named_modules())
    for row in rows:
        if row.is_equal:
            continue
        name = former_name(row.where, kept)
        kind = f" ({type(modules[name]).__name__})" if name in modules and name else ""
        what = {"gradients": "the gradient of ", "loss": "the loss"}.get(row.what, "the output of ")
        more = f", and {len(row.others)} more" if row.others else ""
        place = f"{name!r}{kind}" if name else ""
        return f"{what}{place} differs by {row.difference:.1e} of its largest value{more}"
    return ""


def _together(mesh: Mesh, action: Callable[[], T]) -> T:
    """Run an action; if it fails on a rank, raise on all.

    Raises:
        UserCodeError: names the rank and the error.
    """
    error, result = None, None
    try:
        result = action()
    except Exception as raised:
        error = raised
    texts = mesh.ranks.gather_objects(_of_error(error))
    if isinstance(error, StratagemError):
        raise error
    for rank, text in enumerate(texts):
        if text:
            raise UserCodeError(
                f"rank {rank}: MeshStrategy(check=True) ran a copy of the model in float64, and it "
                f"raised {text}. Pass another example_input, or check=False"
            ) from error
    assert result is not None
    return result


def _of_error(error: Exception | None) -> str:
    if error is None:
        return ""
    return f"{type(error).__name__}: {format_text(str(error), _LONGEST)}"
