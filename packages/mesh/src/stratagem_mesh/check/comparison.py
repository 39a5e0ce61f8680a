"""One step of a model on a mesh, compared with the same step in one process, in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from stratagem import Lite, Module, seed_everything
from stratagem.errors import ConfigurationError, UserCodeError
from stratagem.launch import rank_zero_info
from stratagem.strategies import TrainStep
from stratagem_mesh.check.losses import brings_example, default_loss
from stratagem_mesh.check.reduction import (
    Draws,
    DrawsOfRanks,
    give_values,
    reduce_layers,
    without_dropout,
    without_values,
    zeros,
)
from stratagem_mesh.check.refusals import in_one_line, note_of, of_ranks
from stratagem_mesh.check.values import (
    OUTPUTS,
    KeepFloat64,
    Outputs,
    Row,
    compare_outputs,
    compare_saved,
    difference,
    save_pieces,
)
from stratagem_mesh.strategy import MeshStrategy

QUANTITIES = (
    OUTPUTS,
    *("loss", "gradients", "gradient norm", "weights", "buffers", "loss of an evaluation"),
)
"""The compared values of a step, in the order in which it computes them.

Buffers are compared on meshes whose ranks all read the same batches, since statistics of batches
differ between others, and only if the model has some.
"""

MICRO_BATCHES = 3
"""The batches of each rank, if stages of a pipeline work on several of them at a time."""

Keep = Callable[[str, Mapping[str, Tensor]], None]


@dataclass(frozen=True)
class Subject:
    """The model and the mesh. New processes import it, so its functions belong to modules.

    Attributes:
        build: returns the model.
        batch: returns a batch; with a parameter, the batch of a data rank's index.
        loss: returns the loss of (model, batch).
        options: the arguments of MeshStrategy.
        layers: the number of layers of each kind that stay, with values that are drawn anew; None:
            all layers stay, with their values.
    """

    build: Callable[[], nn.Module]
    batch: Callable[..., Any]
    loss: Callable[[Any, Any], Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)
    layers: int | None = None


def compare(subject: Subject, ranks: int) -> list[Row]:
    """Run the step on new processes and in this one; return the compared quantities.

    Args:
        subject: the model, its batches and the sizes of the mesh.
        ranks: the number of processes.

    Raises:
        StratagemError: the model or the mesh is refused, or a function of the subject failed.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        options = {"launcher": "spawn", **subject.options}
        if subject.layers is not None:  # no rank gathers a whole model, which may be large
            options["state_dict_type"] = "sharded"
        strategy = MeshStrategy(**options)
        lite = Lite(accelerator="cpu", devices=ranks, strategy=strategy, precision="64-true")
        with of_ranks(folder):
            lite.launch(_in_float64, _on_mesh, subject, folder)
        rows: list[Row] = []
        for run in (_alone, _read_back):  # one after the other, each with one model in memory
            one = Lite(accelerator="cpu", devices=1, precision="64-true")
            rows += one.launch(_in_float64, run, subject, folder, ranks)
    return rows


def _in_float64(lite: Lite, run: Callable[..., Any], *arguments: Any) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # the dtype to which Lite converts outputs
    try:
        with KeepFloat64():
            return run(lite, *arguments)
    finally:
        torch.set_default_dtype(before)


def _on_mesh(lite: Lite, subject: Subject, folder: Path) -> None:
    """Take the step on a rank, which writes its values."""
    rank = lite.global_rank
    with in_one_line(note_of(folder, rank)):
        draws = DrawsOfRanks(folder, rank, lite.world_size, lite.barrier)
        model, optimizer, _ = _model(lite, subject, draws)
        count = lite.ranks.data_split[1]
        if getattr(lite.strategy, "pipeline", 1) > 1:
            count *= MICRO_BATCHES
        keep = partial(save_pieces, folder, rank)
        found = _step(lite, subject, model, optimizer, count, keep)
        lite.save(folder / "saved.ckpt", {"model": model, "optimizer": optimizer})
        if lite.is_global_zero:
            torch.save({**found, "batches": count}, folder / "step.pt")
        lite.barrier()


def _alone(lite: Lite, subject: Subject, folder: Path, ranks: int) -> list[Row]:
    """Take the step in one process; return the rows of its values."""
    on_mesh = torch.load(folder / "step.pt", weights_only=True)
    rows: dict[str, Row] = {}

    def keep(what: str, tensors: Mapping[str, Tensor]) -> None:
        rows[what] = compare_saved(what, folder, what, ranks, tensors)

    with in_one_line():
        model, optimizer, kept = _model(lite, subject, Draws())
        for name, own in kept.items():
            rank_zero_info("%s keeps layers %s", name, ", ".join(map(str, own)))
        expected = _step(lite, subject, model, optimizer, on_mesh["batches"], keep)
    for what, of_one in expected.items():
        if what == OUTPUTS:
            rows[what] = compare_outputs(on_mesh[what], of_one)
        else:
            rows[what] = Row(what, difference(on_mesh[what], of_one))
    return [rows[what] for what in QUANTITIES if what in rows]


def _read_back(lite: Lite, subject: Subject, folder: Path, ranks: int) -> list[Row]:
    """Read the checkpoint in one process; return the row of the weights."""
    with in_one_line():
        model, optimizer, _ = _model(lite, subject, zeros)
        lite.load(folder / "saved.ckpt", {"model": model, "optimizer": optimizer})
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    what = "weights read back"
    return [compare_saved(what, folder, "weights", ranks, weights)]


def _step(
    lite: Lite, subject: Subject, model: Any, optimizer: Any, count: int, keep: Keep
) -> dict[str, Any]:
    """Take a step over this rank's batches; return values, and hand over those by name."""
    numbers: Any = range(count)
    loader: Any = DataLoader(numbers, collate_fn=lambda own: _batch(subject.batch, *own))
    own = list(lite.setup_dataloaders(loader))
    outputs = Outputs(model if lite.is_global_zero else nn.Module())
    step = _ComparedStep(lite, subject, model, outputs, keep)
    lite.strategy.train_step(model.prepared, step, own)
    model.eval()
    with torch.no_grad():
        evaluated = torch.stack([subject.loss(model, batch) for batch in own]).mean()
    keep("weights", dict(model.named_parameters()))
    buffers = {n: b.double() for n, b in model.named_buffers() if not b.is_complex()}
    if buffers and count == 1:
        keep("buffers", buffers)
    return {
        OUTPUTS: dict(outputs),
        "loss": lite.all_reduce(torch.stack(step.losses).mean()),
        "gradient norm": step.norm,
        "loss of an evaluation": lite.all_reduce(evaluated),
    }


class _ComparedStep(TrainStep):
    """An optimizer step that keeps the losses, the gradients and their norm."""

    norm: Any = None

    def __init__(
        self, lite: Lite, subject: Subject, model: Any, outputs: Outputs, keep: Keep
    ) -> None:
        self.losses: list[Tensor] = []
        self._lite, self._subject, self._model = lite, subject, model
        self._outputs, self._keep = outputs, keep

    def loss(self, part: Any, *, converted: bool = False) -> Tensor:
        """Return the loss of a batch."""
        return self._subject.loss(self._model, part)

    def before_backward(self, loss: Tensor) -> None:
        """Keep the loss, and the outputs of the first batch."""
        if not self.losses:
            self._outputs.close()
        if not bool(torch.isfinite(loss)):
            raise UserCodeError(
                f"the loss of batch {len(self.losses)} is {loss.item()}: expected a finite loss, "
                "since nothing can be compared with others"
            )
        self.losses.append(loss.detach())

    def before_optimizer_step(self, optimizer: Any) -> None:
        """Keep the gradients, then clip them."""
        trained = self._model.named_parameters()
        self._keep("gradients", {name: p.grad for name, p in trained if p.grad is not None})
        self.norm = self._lite.clip_gradients(self._model, optimizer, max_norm=0.5)


def _model(
    lite: Lite, subject: Subject, values: Callable[[str, nn.Parameter], Tensor]
) -> tuple[Any, Any, dict[str, list[int]]]:
    """Return the model and its optimizer, set up, and the indices of layers that stay."""
    seed_everything(0)
    kept: dict[str, list[int]] = {}
    if subject.layers is None:
        model = subject.build()
    else:
        model = _built_without_values(subject)
        kept = reduce_layers(model, subject.layers)
        give_values(model, values)
    if not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"the model is an object of type {type(model).__name__}: expected an nn.Module, or a "
            "function that returns one"
        )
    without_dropout(model)
    if not isinstance(model, Module) and not brings_example(model):
        _give_example(lite.strategy, subject)
    if isinstance(model, Module):
        if not model.automatic_optimization and subject.loss is default_loss:
            raise ConfigurationError(
                f"{type(model).__name__} sets automatic_optimization=False, so that its "
                "training_step returns no loss to compare: pass --loss module:function"
            )
        for name in ("log", "log_dict"):  # they work under a Trainer alone
            vars(model)[name] = _log_nothing
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    set_up = lite.setup(model.train(), torch.optim.SGD(trained, lr=0.1, momentum=0.9))
    return *set_up, kept


def _built_without_values(subject: Subject) -> nn.Module:
    try:
        with without_values():
            return subject.build()
    except (RuntimeError, NotImplementedError) as error:
        if "meta" not in str(error):
            raise
        raise ConfigurationError(
            "--layers builds the model without values of its parameters, and its constructor reads "
            f"them ({type(error).__name__}: {error}): check a small model without --layers"
        ) from error


def _give_example(strategy: Any, subject: Subject) -> None:
    """Let a mesh find layers to divide by a batch."""
    is_mesh = isinstance(strategy, MeshStrategy)
    if is_mesh and strategy.tensor_plan is None and strategy.example_input is None:
        strategy.example_input = _batch(subject.batch, 0)


def _log_nothing(*arguments: Any, **options: Any) -> None:
    """Take the place of a Module's `log`."""


def _batch(make: Callable[..., Any], index: int) -> Any:
    torch.manual_seed(index)
    return make(index) if signature(make).parameters else make()
