"""One step of a model on a mesh, compared with the same step in one process, in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from stratagem import Lite, Module, seed_everything
from stratagem.errors import ConfigurationError, UserCodeError
from stratagem.launch import rank_zero_info
from stratagem.strategies import TrainStep, user_module
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
from stratagem_torch.parallel import is_owner

QUANTITIES = (
    OUTPUTS,
    *("loss", "gradients", "gradient norm", "weights", "buffers", "loss of an evaluation"),
)
"""The compared values of a step, in the order in which it computes them.

Statistics of batches differ between ranks that read different ones. So buffers, and an evaluation
after a step that changed some, are compared on meshes whose ranks all read the same batches; and
buffers only if the model has some.
"""

MICRO_BATCHES = 3
"""The batches of each rank, if stages of a pipeline work on several of them at a time."""

Keep = Callable[[str, Mapping[str, Tensor]], None]


class _Made(NamedTuple):
    """A model that is set up.

    Attributes:
        model, optimizer: of Lite.
        kept: the indices of layers that stay, by the name of their list.
        names: the names of the whole model's parameters and buffers.
    """

    model: Any
    optimizer: Any
    kept: dict[str, list[int]]
    names: list[str]


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
        made = _model(lite, subject, draws)
        readers = lite.ranks.data_split[1]
        strategy: Any = lite.strategy
        count = readers * (MICRO_BATCHES if strategy.pipeline > 1 else 1)
        whole, lacks = _names_on_rank(strategy, made)

        def keep(what: str, tensors: Mapping[str, Tensor]) -> None:
            named = {whole.get(name, name): tensor for name, tensor in tensors.items()}
            save_pieces(folder, rank, what, named, lacks)

        parts = strategy.units(user_module(made.model.module)) if strategy.pipeline > 1 else None
        outputs = Outputs(made.model, parts if is_owner(lite.ranks) else ())
        found = _step(lite, subject, made, count, outputs, keep)
        lite.save(folder / "saved.ckpt", {"model": made.model, "optimizer": made.optimizer})
        torch.save(dict(outputs), folder / f"{OUTPUTS}{rank}.pt")
        if lite.is_global_zero:
            torch.save({**found, "batches": count, "readers": readers}, folder / "step.pt")
        lite.barrier()


def _names_on_rank(strategy: MeshStrategy, made: _Made) -> tuple[dict[str, str], list[str]]:
    """Return the whole model's names of parameters, and those that only other stages have."""
    local_names = strategy.local_names(user_module(made.model.module))
    whole = {here: name for name, here in local_names.items() if here}
    present = {whole.get(name, name) for name in _names(made.model)}
    lacks = [name for name in made.names if name not in present]
    return whole, lacks if strategy.pipeline > 1 else []


def _names(model: nn.Module) -> list[str]:
    return [name for name, _ in (*model.named_parameters(), *model.named_buffers())]


def _alone(lite: Lite, subject: Subject, folder: Path, ranks: int) -> list[Row]:
    """Take the step in one process; return the rows of its values."""
    on_mesh = torch.load(folder / "step.pt", weights_only=True)
    rows: dict[str, Row] = {}

    def keep(what: str, tensors: Mapping[str, Tensor]) -> None:
        if what != "buffers" or (tensors and on_mesh["readers"] == 1):
            rows[what] = compare_saved(what, folder, what, ranks, tensors)

    with in_one_line():
        made = _model(lite, subject, Draws())
        for name, own in made.kept.items():
            rank_zero_info("%s keeps layers %s", name, ", ".join(map(str, own)))
        outputs = Outputs(made.model)
        expected = _step(lite, subject, made, on_mesh["batches"], outputs, keep)
    rows[OUTPUTS] = compare_outputs(_outputs_of(folder, ranks), outputs)
    for what, of_one in expected.items():
        if what in on_mesh:
            rows[what] = Row(what, difference(on_mesh[what], of_one))
    return [rows[what] for what in QUANTITIES if what in rows]


def _read_back(lite: Lite, subject: Subject, folder: Path, ranks: int) -> list[Row]:
    """Read the checkpoint in one process; return the row of the weights."""
    with in_one_line():
        made = _model(lite, subject, zeros)
        lite.load(folder / "saved.ckpt", {"model": made.model, "optimizer": made.optimizer})
    weights = {name: parameter.detach() for name, parameter in made.model.named_parameters()}
    what = "weights read back"
    return [compare_saved(what, folder, "weights", ranks, weights)]


def _outputs_of(folder: Path, ranks: int) -> dict[str, list[Tensor]]:
    """Return the outputs that ranks have written, each those of its stages."""
    found: dict[str, list[Tensor]] = {}
    for rank in range(ranks):
        found |= torch.load(folder / f"{OUTPUTS}{rank}.pt", weights_only=True, mmap=True)
    return found


def _step(
    lite: Lite, subject: Subject, made: _Made, count: int, outputs: Outputs, keep: Keep
) -> dict[str, Any]:
    """Take a step over this rank's batches; return values, and hand over those by name."""
    model = made.model
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    numbers: Any = range(count)
    loader: Any = DataLoader(numbers, collate_fn=lambda own: _batch(subject.batch, *own))
    own = list(lite.setup_dataloaders(loader))
    step = _ComparedStep(lite, subject, model, outputs, keep)
    lite.strategy.train_step(model.prepared, step, own)
    model.eval()
    with torch.no_grad():
        evaluated = torch.stack([subject.loss(model, batch) for batch in own]).mean()
    keep("weights", dict(model.named_parameters()))
    buffers = {n: b.double() for n, b in model.named_buffers() if not b.is_complex()}
    keep("buffers", buffers)
    found = {
        "loss": lite.all_reduce(torch.stack(step.losses).mean()),
        "gradient norm": step.norm,
        "loss of an evaluation": lite.all_reduce(evaluated),
    }
    changed = [not torch.equal(before[name], buffer) for name, buffer in model.named_buffers()]
    if lite.ranks.data_split[1] > 1 and any(map(any, lite.ranks.gather_objects(changed))):
        del found["loss of an evaluation"]
    return found


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


def _model(lite: Lite, subject: Subject, values: Callable[[str, nn.Parameter], Tensor]) -> _Made:
    """Return the model and its optimizer, set up."""
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
    names = _names(model)
    sgd = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    set_up, optimizer = lite.setup(model.train(), sgd)
    return _Made(set_up, optimizer, kept, names)


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
