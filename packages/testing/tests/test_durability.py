"""`stratagem checkpoint durability`: our formats stand it, and careless ones are found out."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "scripts"

CARELESS = (SCRIPTS / "durability_careless.py").read_text()


def durability(
    folder: Path, *arguments: str, code: int, into: str = "saved"
) -> subprocess.CompletedProcess[str]:
    (folder / "saved").mkdir()
    finished = subprocess.run(
        [sys.executable, "-m", "stratagem", "checkpoint", "durability", into, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert finished.returncode == code, finished.stdout + finished.stderr
    return finished


def rows(table: str) -> list[list[str]]:
    lines = [line.split() for line in table.splitlines()]
    return [line for line in lines if line and line[-1].isdigit()]


@pytest.fixture
def careless(tmp_path: Path) -> Path:
    """Two formats that a user might have written."""
    (tmp_path / "careless.py").write_text(textwrap.dedent(CARELESS))
    info = tmp_path / "careless-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: careless\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[stratagem.backends]\ncareless = careless\n")
    return tmp_path


def test_our_formats_survive_twenty_kills_and_every_kind_of_bad_disk(tmp_path: Path) -> None:
    finished = durability(tmp_path, "--kills", "20", "--size", "8", code=0)
    told = rows(finished.stdout)
    formats = {row[0] for row in told}
    assert "single_file" in formats
    assert "async" not in formats
    assert len(told) == 12 * len(formats)
    assert {row[-1] for row in told} == {"0"}
    # Of six numbers: runs, in a save, holds the new, holds the old, wrong.
    kills = [row for row in told if "-9" in " ".join(row)]
    assert sum(int(row[-4]) for row in kills) >= 20
    assert list((tmp_path / "saved").iterdir()) == []


def test_careless_formats_are_found_out(careless: Path) -> None:
    finished = durability(
        careless,
        *("--format", "in_place", "--format", "careless", "--no-async"),
        *("--kills", "12", "--size", "2", "--seed", "1"),
        code=1,
    )
    assert "in_place, kill -9: corrupt: " in finished.stderr
    assert "careless, kill -9: leftover: model.ckpt." in finished.stderr
    assert "careless, failing fsync: a save on a broken disk raised no error" in finished.stderr
    wrong = {tuple(row[:3]): int(row[-1]) for row in rows(finished.stdout)}
    assert wrong["in_place", "sync", "kill"] > 0


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    said = durability(tmp_path, "--format", "in_place", code=2).stderr
    assert said.startswith("--format 'in_place': there is no such checkpoint format; there are ")
    assert "single_file" in said


def test_durability_command_refuses_a_missing_directory(tmp_path: Path) -> None:
    assert durability(tmp_path, into="no/where", code=2).stderr == (
        "'no/where' is not a directory: expected one that is there, on the file system in "
        "question; make it first\n"
    )
    assert not (tmp_path / "no").exists()


BACKGROUND = (SCRIPTS / "durability_background.py").read_text()


def test_of_two_saves_that_are_under_way_in_the_background_either_is_the_new_one(
    tmp_path: Path,
) -> None:
    (tmp_path / "saved").mkdir()
    told = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(BACKGROUND)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert told.stdout.splitlines() == ["0 1 []", "1 1 []", "2 1 []"]


def test_durability_command_prints_rows_of_finished_parts_only(tmp_path: Path) -> None:
    finished = durability(
        tmp_path,
        *("--format", "single_file", "--no-async", "--kills", "1", "--size", "8"),
        code=0,
    )
    assert "0 runs" not in finished.stderr
    assert "slow disk" not in finished.stdout
    assert len(rows(finished.stdout)) == 5
