"""A Module as a program of torch.export, as TorchScript and as ONNX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import run_file
from torch import Tensor, nn

from stratagem import Lite, Module, Trainer
from stratagem.errors import ConfigurationError, UserCodeError
from stratagem_extras.export import to_exported

SCRIPT = Path(__file__).parent / "scripts" / "exported.py"

# torch recommends torch.export in its place.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.net(inputs)
        return outputs

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("method", ["script", "trace"])
def test_a_trained_module_becomes_torchscript(method: Any, tmp_path: Path) -> None:
    model, inputs = Net(), torch.ones(2, 3)
    Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    ).fit(model, [inputs])
    model.net[0].eval()
    model.example_input_array = inputs
    script = model.to_torchscript(tmp_path / "model.pt", method)
    assert model.training
    assert not model.net[0].training
    loaded = torch.jit.load(str(tmp_path / "model.pt"))  # type: ignore[no-untyped-call]
    model.eval()
    for one in (script, loaded):
        assert torch.equal(one(inputs), model(inputs))
    traced = model.to_torchscript(method="trace", example_inputs=torch.zeros(1, 3))
    assert torch.equal(traced(inputs), model(inputs))


def test_a_module_that_no_trainer_has_seen_becomes_torchscript() -> None:
    model, inputs = Net(), torch.ones(2, 3)
    assert torch.equal(model.to_torchscript()(inputs), model.eval()(inputs))
    with pytest.raises(UserCodeError, match="not attached to a Trainer"):
        model.trainer  # noqa: B018


def test_export_names_missing_inputs_and_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserCodeError) as raised:
        Net().to_torchscript(method="trace")
    assert str(raised.value) == (
        "Net.to_torchscript(method='trace') needs inputs to run forward with: pass them, or set "
        "example_input_array in the Module"
    )
    with pytest.raises(UserCodeError, match=r"method='guess'.: expected 'script' or 'trace'"):
        Net().to_torchscript(method="guess")  # type: ignore[arg-type]
    monkeypatch.setattr("stratagem_extras.export.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError) as refused:
        Net().to_onnx("model.onnx", torch.ones(1, 3))
    assert str(refused.value) == (
        "to_onnx() needs onnx and onnxscript, which is not installed: "
        "pip install stratagem-core[onnx]"
    )


def test_to_onnx_exports_the_model_in_eval_mode(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # The exporter itself needs packages that the other tests do without.
    monkeypatch.setattr("stratagem_extras.export.find_spec", lambda name: name)
    seen: list[Any] = []

    def export(model: nn.Module, inputs: Any, file: Any, **options: Any) -> str:
        seen.append((model.training, torch.is_grad_enabled(), inputs, file, options))
        return "program"

    monkeypatch.setattr("torch.onnx.export", export)
    model, inputs = Net(), torch.ones(2, 3)
    model.example_input_array = inputs
    assert model.to_onnx(tmp_path / "m.onnx", opset_version=18) == "program"
    assert seen == [(False, False, (inputs,), tmp_path / "m.onnx", {"opset_version": 18})]
    assert model.training


# -- torch.export


def fitted() -> Net:
    torch.manual_seed(1)
    model = Net()
    Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    ).fit(model, [torch.ones(2, 3)])
    return model


def test_an_exported_program_runs_other_batches_with_equal_numbers(tmp_path: Path) -> None:
    model = fitted()
    program = to_exported(model, tmp_path / "net.pt2", torch.ones(2, 3))
    assert model.training
    loaded = torch.export.load(tmp_path / "net.pt2")
    model.eval()
    for size in (1, 2, 5):
        inputs = torch.randn(size, 3)
        for one in (program, loaded):
            assert torch.equal(one.module()(inputs), model(inputs))
    assert [path.name for path in tmp_path.iterdir()] == ["net.pt2"]
    model.example_input_array = torch.ones(4, 3)
    assert torch.equal(to_exported(model).module()(inputs), model(inputs))
    fixed = to_exported(model, dynamic_shapes=None)
    with pytest.raises(AssertionError, match="Guard failed"):
        fixed.module()(torch.ones(5, 3))


class Several(nn.Module):
    def forward(self, one: Tensor, *, other: list[Tensor]) -> dict[str, Tensor]:
        return {"sum": one + other[0], "product": one * other[1]}


def test_keyword_arguments_and_dynamic_shapes_of_torch_are_exported() -> None:
    inputs = {"one": torch.ones(2, 3), "other": [torch.ones(2, 3), torch.ones(2, 3)]}
    program = to_exported(Several(), inputs=inputs)
    other = torch.randn(5, 3)
    assert torch.equal(program.module()(one=other, other=[other, other])["sum"], 2 * other)
    size = torch.export.Dim("size", min=2, max=8)
    program = to_exported(nn.ReLU(), inputs=torch.ones(3, 4), dynamic_shapes=({1: size},))
    assert program.module()(torch.ones(3, 7)).shape == (3, 7)


class ByValue(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs if inputs.sum() > 0 else -inputs


class OfTwo(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.view(2, 3)


class Draws(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + torch.randn_like(inputs)


class Named(nn.Linear):
    """Takes inputs by any name, as LanguageModule does."""

    def forward(self, **named: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(named["x"])


class Rows(nn.Linear):
    def forward(self, *rows: Tensor) -> Tensor:
        return super().forward(rows[0] + rows[1])


def test_any_number_of_inputs_and_a_model_of_lite_are_exported() -> None:
    x = torch.randn(7, 2)
    rows = Rows(2, 1)
    program = to_exported(rows, inputs=(torch.ones(4, 2), torch.ones(4, 2)))
    torch.testing.assert_close(program.module()(x, x), rows(x, x))
    set_up = Lite(accelerator="cpu", devices=1).setup(nn.Linear(2, 1))
    program = to_exported(set_up, inputs=torch.ones(4, 2))
    torch.testing.assert_close(program.module()(x), set_up(x))


def test_inputs_of_any_name_have_no_free_batch() -> None:
    inputs = {"x": torch.ones(4, 2)}
    with pytest.raises(
        ConfigurationError, match=r"takes inputs by any name \(\*\*named\), for which"
    ):
        to_exported(Named(2, 1), inputs=inputs)
    program = to_exported(Named(2, 1), inputs=inputs, dynamic_shapes=None)
    assert program.module()(**inputs).shape == (4, 1)


def test_an_export_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    inputs = torch.ones(2, 3)
    with pytest.raises(UserCodeError, match=r"cannot export ByValue \(.*test_export.py:\d+"):
        to_exported(ByValue(), inputs=inputs)
    with pytest.raises(UserCodeError, match=r"cannot export OfTwo .*batch"):
        to_exported(OfTwo(), inputs=inputs)
    with pytest.raises(UserCodeError, match=r"Draws computes something else .* pass check=False"):
        to_exported(Draws(), inputs=inputs)
    to_exported(Draws(), inputs=inputs, check=False)
    with pytest.raises(UserCodeError, match=r"Net.to_exported\(\) needs inputs to run forward"):
        to_exported(Net())
    with pytest.raises(ConfigurationError, match=r"sizes of the inputs are \[1\]: expected one"):
        to_exported(Net(), inputs=torch.ones(1, 3))
    with pytest.raises(ConfigurationError, match=r"expected a path that ends in .pt2"):
        to_exported(Net(), tmp_path / "net.onnx", inputs)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "mesh", "deepspeed_stage_3"])
def test_a_trained_model_is_exported_whole_or_from_its_checkpoint(
    strategy: str, tmp_path: Path
) -> None:
    if strategy.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    run_file(SCRIPT, strategy, folder=tmp_path, env={"PYTHONWARNINGS": "ignore"})
    said = (tmp_path / "said").read_text()
    refusal = "expected a whole model. Save a checkpoint, and export Net.load_from_checkpoint"
    assert (refusal in said) is (strategy != "ddp")
    program = torch.export.load(tmp_path / "net.pt2")
    weights = torch.load(tmp_path / "weights.pt")
    hidden = torch.relu(torch.ones(5, 4) @ weights["up.weight"].T + weights["up.bias"])
    expected = hidden @ weights["down.weight"].T + weights["down.bias"]
    assert torch.allclose(program.module()(torch.ones(5, 4)), expected, atol=1e-6)
