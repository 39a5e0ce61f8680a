"""State that user code keeps between micro-batches, and objects that modules return."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixtures import load_script, run_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from stratagem import Module, Trainer
from stratagem.errors import ConfigurationError
from stratagem_mesh import MeshStrategy
from stratagem_mesh.pipeline.cuts import divided_copies, find_stages

SCRIPTS = Path(__file__).parents[1] / "scripts"


in_turn = load_script(SCRIPTS / "pipeline_in_turn.py")
user_state = load_script(SCRIPTS / "pipeline_user_state.py")

needs_fields = pytest.mark.skipif(
    torch.__version__ < (2, 13),  # type: ignore[operator]
    reason="FSDP2 follows dataclasses since torch 2.13: `nox -s tests` runs it",
)


def square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def programs(model: nn.Module, cut: str, step: Callable[..., Any] = square) -> list[Any]:
    torch.manual_seed(0)
    positions = in_turn.Positions(model.double(), 2, [cut])
    found: list[Any] = positions.programs(step, torch.randn(2, 4).double())
    return found


# -- objects


@dataclass
class Hidden:
    state: Tensor
    extra: dict[str, Tensor]


class Returns(nn.Module):
    def __init__(self, kind: Callable[..., Any]) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(4, 4)

    def forward(self, given: Any) -> Any:
        made = self.layer(given.state).tanh()
        return self.kind(state=made, extra={"mean": given.extra["mean"] + made.mean()})


class OfObjects(nn.Module):
    def __init__(self, kind: Callable[..., Any]) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(Returns(kind) for _ in range(4))

    def forward(self, batch: Tensor) -> Tensor:
        given = self.kind(state=batch, extra={"mean": batch.sum()})
        for layer in self.layers:
            given = layer(given)
        total: Tensor = given.state + given.extra["mean"]
        return total


@needs_fields
def test_tensors_of_dataclasses_cross() -> None:
    torch.manual_seed(0)
    model, batch = OfObjects(Hidden).double(), torch.randn(2, 4).double()
    in_turn.compare(model, square, batch, 2, ["layers.2"])
    in_turn.compare(model, square, batch, 4, ["layers.1", "layers.2", "layers.3"], virtual=2)
    for program in programs(model, "layers.2"):
        assert [value.key[1] for value in program.values] == ["layers.1", "layers.1"]
        assert sorted(value.shape for value in program.values) == [(), (2, 4)]


class Aux(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.loss: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x)
        self.loss = made.mean()
        return made


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Aux(), Aux(), Aux())

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layers(x)
        for layer in self.layers.children():
            assert isinstance(layer, Aux)
            made = made + layer.loss
        return made


class Fills(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, found: list[Tensor]) -> Tensor:
        made: Tensor = self.layer(x)
        found.append(made)
        return made


class Filled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Fills(), Fills()])

    def forward(self, x: Tensor) -> Tensor:
        found: list[Tensor] = []
        for layer in self.layers:
            x = layer(x, found)
        return x + found[0]


class ReadsStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(self.norm(x))
        mean = self.norm.running_mean
        assert mean is not None
        return made - mean


@pytest.mark.parametrize(
    ("model", "cut", "message"),
    [
        (
            partial(OfObjects, SimpleNamespace),
            "layers.2",
            "user code reads a tensor of the module 'layers.1' of stage 0 that the module does not "
            r"return, and stage 1 cannot receive it: expected it among the module's results "
            r"\(tuples, lists, dictionaries, and dataclasses since torch 2.13\), not in an attr",
        ),
        (
            Adds,
            "layers.2",
            "user code reads a tensor of the module 'layers.[01]' of stage 0 that the module does "
            "not return",
        ),
        (
            Filled,
            "layers.1",
            "the module 'layers.0' puts tensors into an argument, such as a list or an object, "
            "which other stages of a pipeline would not find there: expected a module that returns",
        ),
        (
            ReadsStatistics,
            "layer",
            "user code reads the buffer 'norm.running_mean', which stage 1 does not have, but "
            "stage 0: expected that a buffer is read by its own module",
        ),
    ],
)
def test_tensors_that_a_module_does_not_return_are_refused(
    model: Callable[[], nn.Module], cut: str, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        programs(model(), cut)


def test_a_hook_that_changes_an_output_runs_once() -> None:
    torch.manual_seed(0)
    batch = torch.randn(2, 4).double()

    def doubled(module: nn.Module, given: Any, output: Tensor) -> Tensor:
        return output * 2

    def in_place(module: nn.Module, given: Any, output: Tensor) -> None:
        output.mul_(2)

    for hook in (doubled, in_place):
        model = nn.Sequential(*[nn.Sequential(nn.Tanh(), nn.Linear(4, 4)) for _ in range(3)])
        model[0].register_forward_hook(hook)
        model[1].register_forward_hook(hook)
        in_turn.compare(model.double(), square, batch, 2, ["2"])
        in_turn.compare(model.double(), square, batch, 3, ["1", "2"])
        for program in programs(model, "2"):
            assert [value.key[:2] for value in program.values] == [("output", "1")]


# -- state of user code


def trained(model: Any, batch: Tensor) -> Tensor:
    loss: Tensor = model.training_step(batch, 0)
    return loss


def test_a_buffer_that_the_last_stage_sets_is_sent_to_the_others() -> None:
    for program in programs(user_state.Centered(), "layers.2", trained):
        assert [(str(one), one.is_shared) for one in program.state] == [("center", True)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("state")
    for name, ranks, schedule in (
        *(("alone", "1", "1f1b"), ("1f1b", "2", "1f1b")),
        ("interleaved", "2", "interleaved"),
    ):
        run_file(
            *(SCRIPTS / "pipeline_user_state.py", str(folder / name), ranks, schedule),
            folder=folder,
            timeout=300,
        )
    names = ("alone", "1f1b", "interleaved")
    return {name: json.loads((folder / name).read_text()) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Centered", "Scaled"])
def test_state_of_the_last_stage_trains_as_in_one_process(name: str, found: dict[str, Any]) -> None:
    expected, own = found["alone"][name], found["1f1b"][name]
    assert own["losses"] == pytest.approx(expected["losses"], rel=1e-12)
    center = expected["ranks"][0][0]
    for of_rank, _ in own["ranks"]:
        assert of_rank == pytest.approx(center, rel=1e-12)
    assert own["warned"] == []


@pytest.mark.slow
def test_hooks_call_the_model_without_gradients(found: dict[str, Any]) -> None:
    expected, own = found["alone"]["Samples"], found["1f1b"]["Samples"]
    assert len(own["losses"]) == 12 + 4 + 2
    assert own["losses"] == pytest.approx(expected["losses"], rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Read", "ReadScaled"])
def test_state_of_one_stage_that_another_reads_is_refused(name: str, found: dict[str, Any]) -> None:
    assert found["1f1b"][name]["error"].startswith(
        "training_step sets 'center' from results of modules, or after them, and stage 0 reads it "
        "in the next micro-batch, before the last stage has set it: expected that code after the"
    )


@pytest.mark.slow
def test_an_attribute_of_one_stage_alone_is_reported(found: dict[str, Any]) -> None:
    (said,) = set(found["1f1b"]["Late"]["warned"])
    assert said.startswith(
        "scale of Late: attributes that differ between the stages of a pipeline, since "
        "training_step sets them after the last module of some stages"
    )


@pytest.mark.slow
def test_a_teacher_in_another_stage_is_reported(found: dict[str, Any]) -> None:
    expected, own = found["alone"]["Taught"], found["1f1b"]["Taught"]
    assert own["losses"] == pytest.approx(expected["losses"], rel=1e-12)
    (said,) = own["warned"]
    assert said.startswith(
        "'teacher' of Taught is a frozen copy of 'layers', and the stages of a pipeline have other "
        "parameters of the two"
    )


@pytest.mark.slow
def test_state_that_a_step_counts_is_refused_where_it_runs_twice(found: dict[str, Any]) -> None:
    assert "error" not in found["1f1b"]["Counts"]
    assert found["interleaved"]["Counts"]["error"].startswith(
        "training_step changes 'seen', 'center', and with virtual_stages=2 it runs 2 times on each "
        "rank for a micro-batch: change state in on_train_batch_end, or use schedule="
    )


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_all_stages_draw_the_numbers_of_a_micro_batch(schedule: str, found: dict[str, Any]) -> None:
    said = found[schedule]["Noisy"]
    drawn = [{tuple(one) for one in of_rank[1]} for of_rank in said["ranks"]]
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 12


# -- before processes start


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.manual_backward(self.layers(batch).sum())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Automatic(Manual):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = True


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (
            Manual,
            {},
            "Manual has automatic_optimization = False, and the strategy 'PipelineMesh' runs "
            "backward itself: use automatic optimization",
        ),
        (
            Automatic,
            {"pipeline_cuts": ["layers.7"]},
            "pipeline_cuts has 'layers.7', which Automatic does not have: expected names of",
        ),
        (
            Automatic,
            {"virtual_stages": 2, "schedule": "interleaved"},
            r"4 stages, but Automatic has 2 module\(s\) with parameters to divide between them",
        ),
    ],
)
def test_a_model_is_refused_before_processes_start(
    model: Callable[[], Any],
    options: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strategy = MeshStrategy(pipeline=2, **options)
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False)
    monkeypatch.setattr(trainer.runtime, "starter", lambda: pytest.fail("ranks were started"))
    data: Any = torch.ones(4, 4)
    with pytest.raises(ConfigurationError, match=message):
        trainer.fit(model(), DataLoader(data, 2))


def test_a_frozen_copy_in_other_stages_is_found() -> None:
    def made(*, frozen: bool = True) -> Any:
        layers = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]
        layers[1].requires_grad_(not frozen)
        return nn.ModuleDict({"net": layers[0], "teacher": layers[1]})

    def found(model: nn.Module, *cuts: str) -> Any:
        return divided_copies(model, find_stages(model, len(cuts) + 1, list(cuts)))

    assert found(made(), "teacher") == [("net", "teacher")]
    assert found(made(), "teacher.1") == [("net", "teacher")]
    assert found(made(frozen=False), "teacher") == []
    other = made()
    other["teacher"][1] = nn.Linear(4, 3).requires_grad_(False)
    assert found(other, "teacher") == []
