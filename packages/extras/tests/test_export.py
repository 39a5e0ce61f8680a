"""A Module as TorchScript and as ONNX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stratagem import Module, Trainer
from stratagem.errors import ConfigurationError, UserCodeError

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
