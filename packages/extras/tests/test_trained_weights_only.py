"""TrainedWeightsOnly: what a checkpoint leaves out, and that a run resumes from it exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import run_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from stratagem import Lite, Module, Trainer
from stratagem.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    TrainedWeightsOnly,
)
from stratagem.checkpoint import PretrainedWeights, SingleFileCheckpointIO
from stratagem.errors import CheckpointMismatchError, ConfigurationError
from stratagem_extras.callbacks.trained_weights_only import fingerprints
from stratagem_extras.pretrained.writer import NewFolder

SCRIPT = Path(__file__).parent / "scripts" / "trained_only.py"
FROZEN = {"base.weight", "base.bias"}


class Net(Module):
    """A base, which is frozen, and a head."""

    def __init__(self, seed: int = 0, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(2, width).requires_grad_(False)
        self.head = nn.Linear(width, 1)
        self.norm = nn.BatchNorm1d(width, affine=False)
        self.drifts = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.drifts:
            self.base.bias.data += 0.5
        loss: Tensor = self.head(self.norm(self.base(batch))).square().mean()
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.head(self.norm(self.base(batch))).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def trainer(*callbacks: Any, **options: Any) -> Trainer:
    options = {"max_steps": 2, "logger": False, "enable_progress_bar": False, **options}
    return Trainer(accelerator="cpu", devices=1, callbacks=[*callbacks], **options)


def loader() -> Any:
    data: Any = torch.randn(16, 2, generator=torch.Generator().manual_seed(1))
    return DataLoader(data, 4)


def saved(folder: Path, net: Module, **options: Any) -> Path:
    """The path of a checkpoint of two steps."""
    saver = ModelCheckpoint(folder, save_last=True)
    trainer(TrainedWeightsOnly(), saver, **options).fit(net, loader())
    return folder / "last.ckpt"


def contents(path: Path) -> dict[str, Any]:
    return SingleFileCheckpointIO().load_checkpoint(path)


def test_a_checkpoint_has_trained_weights_and_buffers(tmp_path: Path) -> None:
    net = Net()
    checkpoint = contents(saved(tmp_path, net))
    assert set(checkpoint["state_dict"]) == set(net.state_dict()) - FROZEN
    assert set(checkpoint["frozen_weights"]) == FROZEN


def test_a_frozen_weight_that_changes_is_kept(tmp_path: Path) -> None:
    net = Net()
    net.drifts = True
    path = saved(tmp_path, net)
    assert set(contents(path)["frozen_weights"]) == {"base.weight"}
    again = trainer(TrainedWeightsOnly(), ModelCheckpoint(tmp_path / "b", save_last=True))
    again.fit(resumed := Net(), loader(), ckpt_path=path)
    assert torch.equal(resumed.base.bias, net.base.bias)
    # It is the base's no longer, although it has not changed in this run.
    again = trainer(
        TrainedWeightsOnly(), ModelCheckpoint(tmp_path / "b", save_last=True), max_steps=3
    )
    again.fit(Net(), loader(), ckpt_path=path)
    assert set(contents(tmp_path / "b/last.ckpt")["frozen_weights"]) == {"base.weight"}


def test_a_weight_that_is_unfrozen_later_is_kept(tmp_path: Path) -> None:
    net = Net()
    path = saved(tmp_path / "a", net)

    class Unfrozen(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    assert contents(saved(tmp_path / "b", Unfrozen()))["frozen_weights"] == {}
    assert contents(path)["frozen_weights"].keys() == FROZEN


def test_another_base_is_refused_before_a_weight_changes(tmp_path: Path) -> None:
    path = saved(tmp_path, Net())
    other = Net(seed=5)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    text = r"saved over another base model: of 2 frozen weights 2 differ.*base\.weight is float32"
    with pytest.raises(CheckpointMismatchError, match=text):
        trainer(TrainedWeightsOnly(), max_steps=4).fit(other, loader(), ckpt_path=path)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    other.base = nn.Linear(2, 4, bias=False)
    with pytest.raises(CheckpointMismatchError, match=r"lacks nothing, and has base\.bias, which"):
        trainer(TrainedWeightsOnly(), max_steps=4).fit(other, loader(), ckpt_path=path)
    other = Net()
    other.more = nn.Linear(2, 2)
    with pytest.raises(
        CheckpointMismatchError, match=r"it lacks more\.weight, more\.bias, and has"
    ):
        trainer(TrainedWeightsOnly(), max_steps=4).fit(other, loader(), ckpt_path=path)
    with pytest.raises(CheckpointMismatchError, match=r"base\.weight is float32 .8, 2. \w+ .expec"):
        trainer(TrainedWeightsOnly(), max_steps=4).fit(Net(width=8), loader(), ckpt_path=path)
    with pytest.raises(CheckpointMismatchError, match=r"lacks base\."):
        trainer(max_steps=4).fit(Net(), loader(), ckpt_path=path)


def test_a_run_is_evaluated_over_its_base_and_is_strict_again(tmp_path: Path) -> None:
    net = Net()
    path = saved(tmp_path, net)
    (expected,) = trainer().test(net, loader(), verbose=False)
    other = Net()
    (found,) = trainer(TrainedWeightsOnly()).test(other, loader(), ckpt_path=path, verbose=False)
    assert found == expected
    assert other.strict_loading is True


def test_the_base_is_read_from_the_weights_of_the_trainer(tmp_path: Path) -> None:
    path = saved(tmp_path, Net())
    base = {
        name.removeprefix("base."): v for name, v in Net().state_dict().items() if "base" in name
    }
    described = {name: (tuple(value.shape), value.dtype) for name, value in base.items()}
    written = NewFolder(tmp_path / "base", described, None, None)
    for name, value in base.items():
        written.write(name, value)
    written.commit()
    other = Net(seed=5)
    weights = PretrainedWeights(tmp_path / "base", part="base")
    trainer(TrainedWeightsOnly(), max_steps=3, weights=weights).fit(other, loader(), ckpt_path=path)
    assert torch.equal(other.base.weight, Net().base.weight)


def test_averages_of_weights_are_refused(tmp_path: Path) -> None:
    for averaging in (EMAWeightAveraging(), StochasticWeightAveraging(0.1)):
        with pytest.raises(ConfigurationError, match=r"both change the weights of a checkpoint"):
            trainer(TrainedWeightsOnly(), averaging).fit(Net(), loader())


def test_fingerprints_tell_values_places_shapes_and_dtypes() -> None:
    strategy = Lite(accelerator="cpu").strategy
    values = torch.arange(6.0)
    several = {
        "plain": values,
        "turned": values.flip(0),
        "shaped": values.reshape(2, 3),
        "double": values.double(),
        "half": values.bfloat16(),
        "one": torch.tensor(1.0),
        "complex": torch.complex(values, values),
        "none": values[:0],
        "bits": values.to(torch.uint8),
    }
    found = fingerprints(strategy, several)
    assert len(set(found.values())) == len(several)
    assert fingerprints(strategy, several) == found


@pytest.mark.slow
@pytest.mark.parametrize("form", ["single_file", "directory"])
@pytest.mark.parametrize("strategy", ["single_device", "ddp", "fsdp", "mesh"])
def test_a_run_resumes_within_an_epoch_bit_for_bit(
    strategy: str, form: str, tmp_path: Path
) -> None:
    ranks = "1" if strategy == "single_device" else "2"
    found = {}
    for what in ("whole", "first", "second", "other"):
        run_file(SCRIPT, str(tmp_path), strategy, ranks, form, what, folder=tmp_path)
        found[what] = json.loads((tmp_path / f"{what}.json").read_text())
    assert (found["first"]["step"], found["whole"]["step"]) == (5, 16)
    assert found["first"]["losses"] + found["second"]["losses"] == found["whole"]["losses"]
    assert found["other"]["error"].startswith("the checkpoint was saved over another base model")
    assert found["other"]["losses"] == []
    if form == "single_file":
        whole, second = (torch.load(tmp_path / f"{name}.pt") for name in ("whole", "second"))
        assert all(torch.equal(second[name], value) for name, value in whole.items())
