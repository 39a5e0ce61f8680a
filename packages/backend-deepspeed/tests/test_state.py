"""State of a DeepSpeed engine in checkpoints of every other strategy, and back."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import run_file
from torch.distributed.checkpoint.metadata import MetadataIndex

from stratagem.checkpoint import DirectoryCheckpointIO, consolidate_checkpoint
from stratagem.errors import CheckpointSaveError
from stratagem_deepspeed import convert_zero_checkpoint_to_fp32_state_dict

SCRIPT = Path(__file__).parent / "deepspeed_state.py"
WAYS = (
    "ddp on 1",
    "stage 2 on 1",
    "stage 3 on 1",
    "ddp on 2",
    "fsdp on 2",
    "stage 1 on 2",
    "stage 2 on 2",
    "stage 3 on 2",
    "stage 3 in small groups on 2",
    "stage 3 offload on 2",
)

IN_BOTH_FORMATS = ("ddp on 2", "stage 2 on 2", "stage 3 on 2")


def launch(folder: Path, what: str, ranks: int) -> dict[str, Any]:
    arguments = (str(ranks), what, "saved")
    run_file(SCRIPT, *arguments, folder=folder, timeout=300)
    told: dict[str, Any] = json.loads((folder / f"{what}-{ranks}.json").read_text())
    return told


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("state")
    (folder / "saved").mkdir()
    return folder


@pytest.fixture(scope="module")
def saves(folder: Path) -> dict[str, Any]:
    """What each strategy loses without an interruption; the saves lie in the folder."""
    return launch(folder, "save", 1) | launch(folder, "save", 2)


@pytest.fixture(scope="module")
def resumes(saves: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What each loses after resuming each save."""
    return launch(folder, "resume", 1) | launch(folder, "resume", 2)


@pytest.mark.parametrize("target", WAYS)
@pytest.mark.parametrize("source", WAYS)
def test_losses_after_a_resume_equal_an_uninterrupted_run_across_formats(
    source: str, target: str, saves: dict[str, Any], resumes: dict[str, Any]
) -> None:
    # Tied and frozen parameters, two groups, sizes that two ranks do not divide, a scheduler.
    expected = saves[source]
    assert len(expected) == 4
    for form in ("single_file", "directory") if source in IN_BOTH_FORMATS else ("directory",):
        resumed = resumes[f"{source}.{form} -> {target}"]
        if source == target:
            assert resumed == expected
        else:
            assert resumed == pytest.approx(expected, rel=0, abs=1e-6)


def test_each_rank_writes_its_own_shard_only(saves: dict[str, Any], folder: Path) -> None:
    for stage in (2, 3):
        path = folder / "saved" / f"stage {stage} on 2.directory"
        layout = pickle.loads((path / ".metadata").read_bytes())
        written = {"__0_0.distcp": 0, "__1_0.distcp": 0}
        for name, entry in layout.state_dict_metadata.items():
            if name.endswith("exp_avg"):
                for chunk in entry.chunks:
                    place = layout.storage_data[MetadataIndex(name, chunk.offsets)]
                    written[place.relative_path] += chunk.sizes.numel()
        assert written["__1_0.distcp"] == pytest.approx(written["__0_0.distcp"], rel=0.1)


def test_a_checkpoint_of_shards_becomes_one_file_in_float32(
    saves: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    path = folder / "saved" / "stage 3 on 2.directory"
    consolidate_checkpoint(path, tmp_path / "one.ckpt")
    one = torch.load(tmp_path / "one.ckpt", weights_only=True)
    other = torch.load(folder / "saved" / "ddp on 2.single_file", weights_only=True)
    assert one["state_dict"].keys() == other["state_dict"].keys()
    for name, weight in one["state_dict"].items():
        assert weight.dtype == torch.float32
        assert torch.allclose(weight, other["state_dict"][name], rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def more(folder: Path) -> dict[str, Any]:
    return launch(folder, "more", 2)


@pytest.mark.parametrize("stage", [2, 3])
def test_bfloat16_resumes_bit_for_bit(stage: int, more: dict[str, Any], folder: Path) -> None:
    assert more[f"bf16 {stage}"]["resumed"] == more[f"bf16 {stage}"]["whole"]
    # The optimizer's weights are what is saved, in full precision.
    saved = DirectoryCheckpointIO().load_checkpoint(folder / "saved" / f"bf16 {stage}")
    weight = saved["state_dict"]["net.first.weight"]
    assert weight.dtype == torch.float32
    assert not torch.equal(weight, weight.bfloat16().float())


@pytest.mark.parametrize("stage", [2, 3])
def test_a_resume_in_the_middle_of_an_epoch_is_exact(
    stage: int, more: dict[str, Any], folder: Path
) -> None:
    # Dropout, and batches in a random order.
    found = more[f"middle {stage}"]
    assert len(found["resumed"]) == 7
    assert found["resumed"] == found["whole"]
    whole, resumed = (
        DirectoryCheckpointIO().load_checkpoint(folder / "saved" / f"middle {stage} {name}")
        for name in ("whole", "resumed")
    )
    for name, weight in whole["state_dict"].items():
        assert torch.equal(resumed["state_dict"][name], weight)


@pytest.mark.parametrize("stage", [2, 3])
def test_scheduler_of_the_config_resumes(stage: int, more: dict[str, Any]) -> None:
    found = more[f"scheduler {stage}"]
    assert len(found["resumed"]) == 10
    assert found["resumed"] == found["whole"]


@pytest.mark.parametrize("stage", [2, 3])
def test_numbers_that_differ_by_parameter_group_are_kept(stage: int, more: dict[str, Any]) -> None:
    found = more[f"groups {stage}"]
    assert len(found["resumed"]) == 10
    assert found["resumed"] == found["whole"]


@pytest.mark.parametrize("stage", [2, 3])
def test_an_optimizer_with_fewer_groups_than_were_saved_is_refused(
    stage: int, more: dict[str, Any]
) -> None:
    assert "has parameter groups that this one lacks: " in more[f"groups {stage}"]["with one group"]


def test_a_bfloat16_checkpoint_becomes_one_file_of_float32_weights(
    more: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    source = folder / "saved" / "bf16 3"
    contents = convert_zero_checkpoint_to_fp32_state_dict(
        source.parent, tmp_path / "fp32.ckpt", source.name
    )
    one = torch.load(tmp_path / "fp32.ckpt", weights_only=True)
    assert one.keys() == contents.keys()
    assert "optimizer_states" not in one
    expected = DirectoryCheckpointIO().load_checkpoint(source)["state_dict"]
    assert one["state_dict"].keys() == expected.keys()
    for name, weight in one["state_dict"].items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, expected[name].float())
    with pytest.raises(CheckpointSaveError, match="is there already"):
        convert_zero_checkpoint_to_fp32_state_dict(source, tmp_path / "fp32.ckpt")


def test_deepspeed_lite_loop_restores_its_checkpoint(more: dict[str, Any]) -> None:
    assert more["lite"]["again"] == more["lite"]["first"]
    assert "__1_0.distcp" in more["lite"]["files"]


FORKED = """
import torch
from torch.utils.data import DataLoader

from stratagem import Module, Trainer
from stratagem.strategies import DDPStrategy, DeepSpeedStrategy


class Net(Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


strategies = [DeepSpeedStrategy(stage=stage, launcher="fork") for stage in (1, 3)]
for strategy in (DDPStrategy(launcher="fork"), *strategies):
    net = Net()
    data = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=2,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    ).fit(net, DataLoader(data, 2))
    print("WEIGHTS", [round(w, 5) for w in net.net.weight.flatten().tolist()])
"""


@pytest.mark.slow
def test_a_fit_in_a_notebook_returns_whole_weights(tmp_path: Path) -> None:
    (tmp_path / "forked.py").write_text(FORKED)
    output = run_file(tmp_path / "forked.py", folder=tmp_path).stdout
    weights = [line for line in output.splitlines() if line.startswith("WEIGHTS")]
    assert len(weights) == 3
    assert len(set(weights)) == 1, weights
