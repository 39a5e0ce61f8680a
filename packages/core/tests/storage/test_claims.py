"""Claims on names in a folder that several processes share, whatever its locks are."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stratagem import Lite
from stratagem.callbacks.checkpoints.names import CheckpointNames
from stratagem.storage.claims import claim
from stratagem.storage.owner import Owner

SCRIPTS = Path(__file__).parents[1] / "scripts"

RunScript = Callable[..., "subprocess.CompletedProcess[str]"]

ELSEWHERE = "0123456789abcdef"


@pytest.fixture
def claimed_elsewhere(tmp_path: Path) -> Callable[..., Path]:
    """Claim a name as a process of another machine would; return the marker."""

    def make(name: str, *, age: float = 0.0) -> Path:
        marker = tmp_path / f".{name}.claim"
        owner = dataclasses.replace(Owner.this(), boot=ELSEWHERE)
        marker.write_text(f"{owner} 0011223344556677")
        os.utime(marker, (time.time() - age,) * 2)
        return marker

    return make


@pytest.mark.parametrize("locks", ["seen", "none", "unseen"])
def test_concurrent_claims_of_a_name_have_one_winner(
    locks: str, run_script: RunScript, tmp_path: Path
) -> None:
    """Also where the name was that of a process that was killed."""
    folder = tmp_path / "shared"
    folder.mkdir()
    env = {"TEST_LOCKS": locks, "PYTHONPATH": str(SCRIPTS)}
    finished = run_script((SCRIPTS / "claims_at_once.py").read_text(), str(folder), env=env)
    assert finished.stdout == f"{locks}: twice 0, nobody's 0\n"


def test_a_claim_of_another_machine_counts_for_a_day(
    tmp_path: Path, claimed_elsewhere: Callable[..., Path]
) -> None:
    claimed_elsewhere("a.ckpt", age=23 * 3600)
    assert claim(tmp_path / "a.ckpt") is None
    claimed_elsewhere("a.ckpt", age=25 * 3600)
    mine = claim(tmp_path / "a.ckpt")
    assert mine is not None
    mine.release()
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_resumed_on_another_machine_moves_its_last(
    tmp_path: Path, claimed_elsewhere: Callable[..., Path]
) -> None:
    claimed_elsewhere("last.ckpt")
    lite = Lite(accelerator="cpu")
    lite.launch()
    resumed, another = CheckpointNames(), CheckpointNames()
    assert resumed.may_move(lite.ranks, str(tmp_path / "last.ckpt"))
    assert not another.may_move(lite.ranks, str(tmp_path / "last.ckpt"))
    resumed.release_all()
    assert list(tmp_path.iterdir()) == []


def test_a_marker_that_says_nothing_yet_is_its_makers(tmp_path: Path) -> None:
    marker = tmp_path / ".a.ckpt.claim"
    marker.touch()
    assert claim(tmp_path / "a.ckpt", from_unseen=True) is None
    os.utime(marker, (0, 0))
    mine = claim(tmp_path / "a.ckpt")
    assert mine is not None
    mine.release()


def test_a_claim_that_another_has_taken_over_is_not_given_back(
    tmp_path: Path, claimed_elsewhere: Callable[..., Path]
) -> None:
    """As when this machine was cut off for a day."""
    mine = claim(tmp_path / "a.ckpt")
    assert mine is not None
    (tmp_path / ".a.ckpt.claim").unlink()
    theirs = claimed_elsewhere("a.ckpt")
    mine.release()
    assert theirs.exists()


def test_a_full_disk_leaves_no_marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        claim(tmp_path / "a.ckpt")
    assert list(tmp_path.iterdir()) == []
