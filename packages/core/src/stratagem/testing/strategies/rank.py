"""What the ranks of a session run: one check after another; each writes what it has found."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stratagem.launch.rank import this_rank
from stratagem.lite import Lite
from stratagem.testing.strategies.check import CHECKS
from stratagem.testing.strategies.checks import load_checks
from stratagem.testing.strategies.probe import Probe
from stratagem.testing.strategies.surroundings import Surroundings
from stratagem.testing.strategies.target import Target

BROKEN = 71
"""The exit code of a rank that a check has left without the others."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """What a session of ranks does; a JSON file.

    Attributes:
        folder: of this session.
        reference: of the session of `single_device` before, with the same layout.
        targets: what is tested; the first one's launcher starts the ranks.
        items: (index of a target, name of a check), in order.
        after: whether to call the checks' `after` in the place of their `run`.
        begin: the first item to do.
        deadline: seconds that an item may take.
    """

    folder: str
    reference: str
    targets: tuple[Target, ...]
    items: tuple[tuple[int, str], ...]
    after: bool = False
    begin: int = 0
    deadline: float = 60.0

    @classmethod
    def read(cls, path: str) -> Session:
        """Return what stands in a file."""
        told = json.loads(Path(path).read_text())
        targets = tuple(
            Target(**{**t, **{name: tuple(t[name]) for name in ("models", "kept", "search_path")}})
            for t in told.pop("targets")
        )
        items = tuple((index, name) for index, name in told.pop("items"))
        return cls(**told, targets=targets, items=items)

    def folder_of(self, item: int, root: str = "", *, index: int | None = None) -> Path:
        """Return the folder of an item, which depends on the check and the target only.

        Args:
            item: which.
            root: of another session; "": of this one.
            index: of the target there; None: as here.
        """
        own, name = self.items[item]
        place = own if index is None else index
        return Path(root or self.folder) / f"{place}.{name.replace('/', '.').replace(' ', '_')}"

    def result(self, item: int, rank: int) -> Path:
        """Return where a rank writes what it has found."""
        return Path(self.folder) / f"result.{item}.{rank}.json"


def main(path: str) -> None:
    """Start the ranks and run a session's checks on each; called by the session's script."""
    session = Session.read(path)
    before = Surroundings.now()
    load_checks()
    first = session.targets[0]
    # Only their number counts: each check makes its own front end.
    lite = Lite(
        accelerator=first.accelerator,
        strategy=first.make(),
        devices=first.devices,
        plugins="single_file",
    )
    lite.launch(_run, path, before if lite.plan.launcher.name == "script" else None)


def _run(lite: Lite, path: str, before: Surroundings | None) -> None:
    """Run all items on this rank."""
    warnings.simplefilter("ignore")  # what users are told is tested elsewhere
    session = Session.read(path)
    load_checks()
    rank, world_size = lite.ranks.global_rank, lite.ranks.world_size
    if before is not None:
        # What is called at the end is called from the last to the first: this comes after all else.
        this_rank.at_end.insert(0, lambda: _note_what_is_left(session, rank, before))
    faulthandler.enable(sys.stderr)
    for item in range(session.begin, len(session.items)):
        index, name = session.items[item]
        folder = session.folder_of(item)
        folder.mkdir(parents=True, exist_ok=True)
        probe = Probe(
            session.targets[index],
            rank,
            world_size,
            folder,
            session.folder_of(item, session.reference, index=0),
        )
        check = CHECKS[name]
        run = check.after if session.after else check.run
        assert run is not None
        (Path(session.folder) / f"at.{rank}").write_text(str(item))
        faulthandler.dump_traceback_later(session.deadline, file=sys.stderr)
        found = _found(run, probe, raises=check.alone)
        _write(session.result(item, rank), found)
        try:
            probe.meet("ended")
        except TimeoutError:
            print(f"rank {rank} ends: others have not ended {name!r}", file=sys.stderr, flush=True)
            faulthandler.dump_traceback(sys.stderr)
            os._exit(BROKEN)
        faulthandler.cancel_dump_traceback_later()


def _found(run: Any, probe: Probe, *, raises: bool) -> dict[str, Any]:
    try:
        return {"value": run(probe)}
    except Exception as error:
        if raises:
            raise
        return {
            "error": f"{type(error).__name__}: {error}",
            "traceback": traceback.format_exc(),
        }


def _write(path: Path, found: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(found))
    temporary.replace(path)


def _note_what_is_left(session: Session, rank: int, before: Surroundings) -> None:
    changed = before.changes()
    _write(Path(session.folder) / f"left.{rank}.json", {"left": changed})
