"""Checkpoints of four real ranks of which each has a part of the model's names."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import run_file

from stratagem.checkpoint import consolidate_checkpoint
from stratagem.errors import CheckpointMismatchError
from stratagem.strategies import Axis, Ranks, SingleDeviceStrategy
from stratagem_torch.distributed.state_by_owner import owned_optimizer_state

SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from state_by_owner import Net, fitted, state_of  # type: ignore[import-not-found]  # noqa: E402

SCRIPT = SCRIPTS / "state_by_owner.py"


def merged(folder: Path, prefix: str) -> dict[str, Any]:
    """Return the state of the first two ranks, which the other two have as well."""
    ranks = [torch.load(folder / f"{prefix}{rank}.pt", weights_only=True) for rank in range(4)]
    for one, other in (ranks[0::2], ranks[1::2]):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    return {part: {**ranks[1][part], **ranks[0][part]} for part in ("model", "optimizer")}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["single_file", "directory"])
def test_stages_save_one_checkpoint_of_all_names_and_load_it(form: str, tmp_path: Path) -> None:
    run_file(SCRIPT, form, "save", folder=tmp_path)
    saved, file = merged(tmp_path, "rank"), tmp_path / "saved.ckpt"
    assert set(saved["model"]) == set(Net().state_dict())
    if form == "directory":
        consolidate_checkpoint(tmp_path / "saved", file)
    checkpoint = torch.load(file, weights_only=True)
    torch.testing.assert_close(dict(checkpoint["state_dict"]), saved["model"], rtol=0, atol=0)
    # One process loads it, and saves what the stages load.
    whole = Net()
    trainer = fitted(whole, SingleDeviceStrategy(), devices=1, ckpt_path=file)
    torch.testing.assert_close(state_of(trainer, whole), saved, rtol=0, atol=0)
    trainer.save_checkpoint(tmp_path / "of_one.ckpt")
    run_file(SCRIPT, form, "resume", folder=tmp_path)
    torch.testing.assert_close(merged(tmp_path, "resumed"), saved, rtol=0, atol=0)
    for rank in range(4):
        of_rank = torch.load(tmp_path / f"resumed{rank}.pt", weights_only=True)
        assert set(of_rank["model"]) == set(Net((rank % 2,)).state_dict())


@pytest.mark.slow
def test_strict_loading_compares_the_names_of_all_ranks_together(tmp_path: Path) -> None:
    whole = Net(extra="spare")
    trainer = fitted(whole, SingleDeviceStrategy(), devices=1)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    text = run_file(SCRIPT, "single_file", "unexpected", folder=tmp_path, expect=1).stderr
    assert (
        "it has layers.spare.weight, layers.spare.bias, which the model lacks. Build the model"
    ) in text
    fitted(Net(), SingleDeviceStrategy(), devices=1).save_checkpoint(tmp_path / "saved.ckpt")
    text = run_file(SCRIPT, "single_file", "missing", folder=tmp_path, expect=1).stderr
    assert text.count("it lacks layers.spare.weight, layers.spare.bias. Build the model") > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            "clash",
            "rank 0 (data 0, stage 0) and rank 1 (data 0, stage 1) have different values of "
            "'tied', and a checkpoint holds one of them: give the parameters of each rank along a "
            "divided axis their names in the whole model, and keep weights that several ranks "
            "share equal",
        ),
        (
            "groups",
            "rank 1 (data 0, stage 1) has an optimizer with 3 parameter groups, and rank 0 (data "
            "0, stage 0) one with 2: give it the same groups on every rank; a group may be empty",
        ),
        (
            "renamed",
            "rank 1 (data 0, stage 1) and rank 3 (data 1, stage 1) have the same parameters by the "
            "axes of the strategy, but state of different names: build the same part of the model "
            "on both, or change `rank_axes`",
        ),
    ],
)
def test_state_that_would_be_lost_is_refused(kind: str, said: str, tmp_path: Path) -> None:
    assert said in run_file(SCRIPT, "single_file", kind, folder=tmp_path, expect=1).stderr
    assert not (tmp_path / "saved.ckpt").exists()


def test_an_optimizer_state_of_other_parameters_is_refused() -> None:
    axes = [Axis("stage", 2, batches="same", parameters="divided")]
    ranks = Ranks(world_size=2, axes=axes)
    groups = [{"params": ["a"], "lr": 0.1}, {"params": ["c"], "lr": 0.2}]
    with pytest.raises(CheckpointMismatchError) as caught:
        owned_optimizer_state(ranks, {"a", "b"}, {"state": {}, "param_groups": groups})
    assert str(caught.value).startswith(
        "the checkpoint's optimizer has other parameters: it lacks b; it has c, which no rank has: "
        "use the optimizer and the parameter groups that it was saved with"
    )
    found = owned_optimizer_state(ranks, {"a", "c"}, {"state": {}, "param_groups": groups})
    assert found["param_groups"] == groups
