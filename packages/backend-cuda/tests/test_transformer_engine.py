"""Transformer Engine, against a stub that has its documented signatures and states."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from stratagem import Lite, Module, Trainer
from stratagem.accelerators import CPUAccelerator
from stratagem.errors import CheckpointMismatchError, ConfigurationError
from stratagem_cuda.accelerator import CUDAAccelerator
from stratagem_cuda.precision import TransformerEnginePrecision

STUBS = Path(__file__).parent / "stubs"


@pytest.fixture(autouse=True)
def te(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stub's `transformer_engine.pytorch`, on a machine with a played H100."""
    monkeypatch.syspath_prepend(STUBS)
    monkeypatch.setattr(metadata, "version", lambda name: "2.20.2")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    before = [name for name in sys.modules if name.startswith("transformer_engine")]
    assert not before, "the real one is here"
    import transformer_engine.pytorch as stub

    yield stub
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        del sys.modules[name]


class OnCPU(TransformerEnginePrecision):
    """Runs on the processor, where the stub computes."""

    def bind(self, accelerator: Any) -> None:
        pass


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 32, bias=False), nn.Linear(32, 4)
    )


def launched(precision: TransformerEnginePrecision) -> Lite:
    lite = Lite(accelerator="cpu", plugins=precision)
    lite.launch()
    return lite


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("transformer-engine", torch.bfloat16), ("transformer-engine-float16", torch.float16)],
)
def test_layers_are_exchanged_and_run_with_the_recipe(
    name: str, dtype: torch.dtype, te: Any
) -> None:
    net = network()
    weights = list(net.parameters())
    exact = net(torch.ones(8, 16)).detach()
    lite = launched(OnCPU(name))
    model, optimizer = lite.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    assert [type(part).__name__ for part in net] == ["Linear", "LayerNorm", "Linear", "Linear"]
    kinds = [type(part).__module__.partition(".")[0] for part in net]
    assert kinds == ["transformer_engine"] * 3 + ["torch"]
    # The same parameters, so that optimizers and names stay; in the dtype.
    assert all(a is b for a, b in zip(net.parameters(), weights, strict=True))
    assert {parameter.dtype for parameter in weights} == {dtype}
    output = model(torch.ones(8, 16))
    assert output.dtype is torch.float32
    assert (output - exact).abs().max() < 0.05
    assert [kind for kind, _ in te.forwards] == ["Linear", "LayerNorm", "Linear"]
    assert {type(recipe).__name__ for _, recipe in te.forwards} == {"Float8CurrentScaling"}
    lite.backward(output.square().mean())
    optimizer.step()
    with torch.no_grad():
        assert not torch.equal(model(torch.ones(8, 16)), output)
    assert te.active == []


def test_transformer_engine_checkpoints_have_no_pickled_state(tmp_path: Path, te: Any) -> None:
    lite = launched(OnCPU())
    model = lite.setup(network())
    model(torch.ones(8, 16))
    lite.save(tmp_path / "te.ckpt", {"model": model})
    saved = torch.load(tmp_path / "te.ckpt", weights_only=True)["model"]
    assert saved.keys() == network().state_dict().keys()
    lite.load(tmp_path / "te.ckpt", {"model": lite.setup(network())})
    # Into another precision, and from a checkpoint that somebody else has prepared.
    plain = Lite(accelerator="cpu")
    plain.launch()
    plain.load(tmp_path / "te.ckpt", {"model": plain.setup(network())})
    hostile = {**saved, "0._extra_state": torch.zeros(4, dtype=torch.uint8)}
    with pytest.raises(CheckpointMismatchError, match=r"it has 0\._extra_state, which the model"):
        model.load_state_dict(hostile)
    own = nn.Sequential(te.Linear(16, 16, device="cpu"))
    assert "0._extra_state" in own.state_dict()
    lite.setup(own)
    assert "0._extra_state" not in own.state_dict()
    own.load_state_dict({"0._extra_state": hostile["0._extra_state"]}, strict=False)


def test_a_model_with_layers_of_its_own_is_left_alone_unless_asked(te: Any) -> None:
    def model() -> nn.Module:
        return nn.Sequential(te.Linear(16, 16, device="cpu"), nn.Linear(16, 16))

    def modules(net: nn.Module) -> list[str]:
        return [type(part).__module__.partition(".")[0] for part in net.children()]

    for replace_layers, second in ((None, "torch"), (True, "transformer_engine")):
        net = model()
        launched(OnCPU(replace_layers=replace_layers)).setup(net)
        assert modules(net) == ["transformer_engine", second]
    hooked = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    hooked[1].register_forward_hook(lambda *_: None)
    launched(OnCPU(ignore_modules={"0"})).setup(hooked)
    assert modules(hooked) == ["torch", "torch", "transformer_engine"]
    with pytest.warns(UserWarning, match="has converted nothing.*multiples of 16, and no torch"):
        launched(OnCPU()).setup(nn.Sequential(nn.Linear(16, 3)))


def test_stateful_recipe_warns_of_inexact_resume(te: Any) -> None:
    from transformer_engine.common.recipe import DelayedScaling, MXFP8BlockScaling

    with pytest.warns(UserWarning, match="a resumed run begins without them, and is not exact"):
        launched(OnCPU(recipe=DelayedScaling())).setup(network())
    with warnings.catch_warnings():
        recipe = MXFP8BlockScaling()
        model = launched(OnCPU(recipe=recipe)).setup(network())
    model(torch.ones(8, 16))
    assert te.forwards[-1][1] is recipe


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).float().square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.net(batch).float().square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_trainer_trains_and_validates_with_transformer_engine(te: Any) -> None:
    module = Net()
    trainer = Trainer(
        accelerator="cpu",
        plugins=OnCPU(),
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    data: Any = torch.randn(16, 16, generator=torch.Generator().manual_seed(2))
    trainer.fit(module, DataLoader(data, batch_size=8), DataLoader(data, batch_size=8))
    assert module.losses[-1] < module.losses[0]
    assert all(recipe is not None for _, recipe in te.forwards)


def test_unsupported_arguments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="expected one of 'transformer-engine', 'transf"):
        TransformerEnginePrecision("te")
    with pytest.raises(ConfigurationError, match=r"recipe='hybrid'.*a recipe of transformer"):
        TransformerEnginePrecision(recipe="hybrid")
    with pytest.raises(ConfigurationError, match="works on 'cuda', received accelerator='cpu'"):
        TransformerEnginePrecision().bind(CPUAccelerator())
    with pytest.raises(ConfigurationError, match="works on 'cuda', received accelerator='cpu'"):
        Trainer(accelerator="cpu", precision="transformer-engine", logger=False)
    monkeypatch.setattr(metadata, "version", lambda name: "1.13.0")
    with pytest.raises(ConfigurationError, match=r">=2\.9,<3, received transformer-engine 1\.13"):
        TransformerEnginePrecision().bind(CUDAAccelerator())
