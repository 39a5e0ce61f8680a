"""The harness: which scenarios, how often, of which formats."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from stratagem.discovery import get_registry
from stratagem_testing.durability.saver import Subject
from stratagem_testing.durability.scenarios import Row, Scenarios

_ELSEWHERE = ("/dev/shm", "/tmp", "/var/tmp")


@dataclass
class Outcome:
    """The result of a scenario.

    Attributes:
        rows: a row for each scenario of each subject.
        temporary: TMPDIR of the processes that saved.
        is_elsewhere: whether TMPDIR is on another file system than the checkpoints.
        log: the output of the processes at the end.
    """

    rows: list[Row]
    temporary: str
    is_elsewhere: bool
    log: str


def formats() -> list[str]:
    """Return the names of all checkpoint formats that are installed here."""
    names = [candidate.spec.name for candidate in get_registry().candidates("checkpoint_io")]
    return [name for name in names if not _is_asynchronous(name)]


def _is_asynchronous(name: str) -> bool:
    return bool(get_registry().find("checkpoint_io", name).spec.build().asynchronous)


def run(
    directory: Path,
    *,
    names: Sequence[str],
    ways: Sequence[bool],
    kills: int,
    megabytes: float,
    seed: int,
) -> Outcome:
    """Torment checkpoint formats in a directory.

    Args:
        directory: an existing directory on the file system under test.
        names: the names of formats.
        ways: whether to save asynchronously; one or both.
        kills: of writers while they save, over all formats and ways.
        megabytes: size of a checkpoint.
        seed: of all random moments.
    """
    # The processes are forked from this one. Beside other work, threads of theirs that wait for one
    # another took ten times as long as a save.
    torch.set_num_threads(1)
    subjects = [Subject(name, way, megabytes) for name in names for way in ways]
    share = -(-kills // len(subjects))
    elsewhere = _other_file_system(directory)
    environ = {} if elsewhere is None else {"TMPDIR": str(elsewhere)}
    scenarios = Scenarios(directory, environ, seed)
    rows: list[Row] = []
    for subject in subjects:
        for scenario in (
            lambda s: scenarios.kill(s, -(-share // 2)),
            lambda s: scenarios.kill(s, share // 2, slow=True),
            lambda s: scenarios.lose_rank(s, max(1, share // 10)),
            lambda s: scenarios.fill_disk(s, max(2, share // 10)),
            scenarios.fail_syncs,
            scenarios.forbid_writing,
        ):
            row = scenario(subject)
            if row.runs == 0:
                continue  # few kills are not enough for every scenario
            rows.append(row)
            how = "in the background" if subject.asynchronous else "waited for"
            verdict = f"{len(row.wrong)} WRONG" if row.wrong else "good"
            print(
                f"{subject.format}, {how}: {row.scenario}, {row.runs} runs: {verdict}",
                file=sys.stderr,
                flush=True,
            )
    temporary = str(elsewhere or tempfile.gettempdir())
    return Outcome(rows, temporary, elsewhere is not None, scenarios.log())


def _other_file_system(directory: Path) -> Path | None:
    """Return a folder for temporary files that is on another file system, if there is one."""
    device = directory.stat().st_dev
    for name in _ELSEWHERE:
        folder = Path(name)
        if folder.is_dir() and folder.stat().st_dev != device:
            return folder
    return None
