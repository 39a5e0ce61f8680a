"""One step of a model on a mesh, compared with the same step in one process, in float64."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from stratagem import Lite, Module, seed_everything
from stratagem.errors import ConfigurationError
from stratagem.lite import LiteModule
from stratagem_mesh.check.refusals import in_one_line, note_of, of_ranks
from stratagem_mesh.strategy import MeshStrategy
from stratagem_torch.sharding import whole_on_cpu

TOLERANCE = 1e-9
"""The largest relative difference in float64 that rounding explains."""

_DROPOUT = re.compile(
    r"dropout|drop_?prob|drop_?path|layer_?drop|(attn|attention|hidden|resid|embd)_p?drop"
)


@dataclass(frozen=True)
class Subject:
    """The model and the mesh. New processes import it, so its functions belong to modules.

    Attributes:
        build: returns the model.
        batch: returns a batch; with a parameter, the batch of a data rank's index.
        loss: returns the loss of (model, batch).
        options: the arguments of MeshStrategy.
    """

    build: Callable[[], nn.Module]
    batch: Callable[..., Any]
    loss: Callable[[Any, Any], Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A compared quantity.

    Attributes:
        what: its name.
        difference: the largest difference, relative to the largest element in one process.
        where: the parameter or the module with it; "" if the quantity is one number.
        others: the names of further ones that differ by more than rounding.
    """

    what: str
    difference: float
    where: str = ""
    others: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether rounding explains the difference."""
        return self.difference <= TOLERANCE


def default_loss(model: Any, batch: Any) -> Tensor:
    """Return the loss of `training_step`, or of the model's output.

    Of an output without a loss, the mean of its squares is taken.

    Raises:
        ConfigurationError: the model returned neither a loss nor a tensor.
    """
    if callable(getattr(model, "training_step", None)):
        own = model.module if isinstance(model, LiteModule) else model
        takes = len(signature(own.training_step).parameters)
        output = model.training_step(*(batch, 0)[:takes])
    elif isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None:
        loss = getattr(output, "logits", output)
    if not isinstance(loss, Tensor):
        raise ConfigurationError(
            f"the model returned an object of type {type(output).__name__}, which has no loss: "
            "pass --loss module:function, a function (model, batch) that returns a scalar"
        )
    return loss if loss.ndim == 0 else loss.square().mean()


def compare(subject: Subject, ranks: int) -> list[Row]:
    """Run the step on new processes and in this one; return the compared quantities.

    Args:
        subject: the model, its batches and the sizes of the mesh.
        ranks: the number of processes.

    Raises:
        StratagemError: the model or the mesh is refused, or a function of the subject failed.
    """
    with TemporaryDirectory() as folder:
        strategy = MeshStrategy(**{"launcher": "spawn", **_options(subject)})
        lite = Lite(accelerator="cpu", devices=ranks, strategy=strategy, precision="64-true")
        with of_ranks(Path(folder)):
            lite.launch(_in_float64, subject, folder)
        on_mesh = torch.load(Path(folder, "step.pt"), weights_only=True)
        alone = Lite(accelerator="cpu", devices=1, precision="64-true")
        expected, read_back = alone.launch(_in_float64, subject, folder, on_mesh["batches"])
    differing = [_row(what, on_mesh[what], of_one) for what, of_one in expected.items()]
    return [*differing, _row("weights read back in one process", read_back, on_mesh["weights"])]


def _options(subject: Subject) -> dict[str, Any]:
    """Return the arguments of the strategy, with a batch for models that have no own example."""
    options = dict(subject.options)
    is_module = isinstance(subject.build, type) and issubclass(subject.build, Module)
    if not is_module and not {"tensor_plan", "example_input"} & options.keys():
        with in_one_line():
            options["example_input"] = _batch(subject.batch, 0)
    return options


def _in_float64(lite: Lite, subject: Subject, folder: str, batches: int = 0) -> Any:
    """Take the step, on a mesh if `batches` is 0; else also read the checkpoint back."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # the dtype to which Lite converts outputs
    try:
        note = None if batches else note_of(Path(folder), lite.global_rank)
        with in_one_line(note), _KeepFloat64():
            if not batches:
                _step(lite, subject, folder)
                return None
            found = _step(lite, subject, "", batches)
            return found, _read_back(lite, subject, Path(folder, "saved.ckpt"))
    finally:
        torch.set_default_dtype(before)


class _KeepFloat64(TorchFunctionMode):
    """Computes in float64 where a model asks for float32, as norms and losses often do."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.float and args[0].dtype is torch.float64:
            return args[0]
        kept = [torch.float64 if one is torch.float32 else one for one in args]
        named = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*kept, **named)


def _step(lite: Lite, subject: Subject, folder: str, batches: int = 0) -> dict[str, Any]:
    """Take a step over this rank's batches; return the compared values, which rank 0 also saves."""
    model, optimizer = _model(lite, subject)
    count = batches or lite.ranks.data_split[1]
    numbers: Any = range(count)
    loader: Any = DataLoader(numbers, collate_fn=lambda own: _batch(subject.batch, *own))
    own = list(lite.setup_dataloaders(loader))
    outputs: dict[str, Tensor] = {}
    hooks = _record(model, outputs)
    losses = []
    for position, batch in enumerate(own):
        loss = subject.loss(model, batch)
        if position == 0:
            _remove(hooks)
        lite.backward(loss / len(own))
        losses.append(loss.detach())
    trained = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    gradients = {name: whole_on_cpu(gradient) for name, gradient in trained.items()}
    norm = lite.clip_gradients(model, optimizer, max_norm=0.5)
    optimizer.step()
    model.eval()
    with torch.no_grad():
        evaluated = torch.stack([subject.loss(model, batch) for batch in own]).mean()
    assert norm is not None
    found: dict[str, Any] = {
        "outputs of modules": outputs,
        "loss": lite.all_reduce(torch.stack(losses).mean()),
        "gradients": gradients,
        "gradient norm": norm,
        "weights": {name: whole_on_cpu(p) for name, p in model.named_parameters()},
        "loss of an evaluation": lite.all_reduce(evaluated),
    }
    if folder:
        lite.save(Path(folder, "saved.ckpt"), {"model": model, "optimizer": optimizer})
        if lite.is_global_zero:
            torch.save({**found, "batches": count}, Path(folder, "step.pt"))
        lite.barrier()
    return found


def _model(lite: Lite, subject: Subject) -> tuple[Any, Any]:
    seed_everything(0)
    model = subject.build()
    for part in model.modules():
        for name, value in vars(part).items():
            if isinstance(value, float) and (
                _DROPOUT.search(name) or (name == "p" and "Dropout" in type(part).__name__)
            ):
                setattr(part, name, 0.0)
    if isinstance(model, Module):
        if not model.automatic_optimization and subject.loss is default_loss:
            raise ConfigurationError(
                f"{type(model).__name__} sets automatic_optimization=False, so that its "
                "training_step returns no loss to compare: pass --loss module:function"
            )
        for name in ("log", "log_dict"):  # they work under a Trainer alone
            vars(model)[name] = _log_nothing
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = lite.setup(model.train(), torch.optim.SGD(trained, lr=0.1, momentum=0.9))
    return model, optimizer


def _log_nothing(*arguments: Any, **options: Any) -> None:
    """Take the place of a Module's `log`."""


def _read_back(lite: Lite, subject: Subject, path: Path) -> dict[str, Tensor]:
    model, optimizer = _model(lite, subject)
    lite.load(path, {"model": model, "optimizer": optimizer})
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _batch(make: Callable[..., Any], index: int) -> Any:
    torch.manual_seed(index)
    return make(index) if signature(make).parameters else make()


def _record(model: nn.Module, outputs: dict[str, Tensor]) -> list[Any]:
    """Keep the first output of each module, in the order in which they end."""

    def keep(name: str) -> Callable[..., None]:
        def hook(part: nn.Module, inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, (tuple, list)) and output else output
            if isinstance(first, Tensor) and first.is_floating_point():
                outputs.setdefault(name, whole_on_cpu(first))

        return hook

    return [part.register_forward_hook(keep(n)) for n, part in model.named_modules() if n]


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()


def _row(what: str, found: Any, expected: Any) -> Row:
    """Compare a tensor, or tensors by name; outputs of parts, which have other shapes, are not."""
    if isinstance(expected, Tensor):
        return Row(what, _difference(found, expected))
    if what == "outputs of modules":
        expected = {n: t for n, t in expected.items() if n in found and found[n].shape == t.shape}
    differences = {
        name: _difference(found[name], tensor) if name in found else float("inf")
        for name, tensor in expected.items()
    }
    apart = [name for name, difference in differences.items() if difference > TOLERANCE]
    # The order in which modules end; a gradient goes the other way.
    first = apart[:1] if what == "outputs of modules" else apart[-1:]
    worst = first or sorted(differences, key=differences.__getitem__)[-1:]
    others = tuple(name for name in apart if name not in worst)
    return Row(what, max(differences.values(), default=0.0), "".join(worst), others)


def _difference(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    apart = float((found - expected).abs().max()) if expected.numel() else 0.0
    return apart / largest if largest > 1e-12 else apart
