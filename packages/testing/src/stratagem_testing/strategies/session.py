"""Sessions: ranks started once for many checks, and watched; what they have found is collected."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from stratagem_testing.processes import clean_environment, end_session
from stratagem_testing.reports import failure_of
from stratagem_testing.strategies.check import CHECKS, Ended, Result
from stratagem_testing.strategies.checks import load_checks
from stratagem_testing.strategies.rank import Session, Work
from stratagem_testing.strategies.target import REFERENCE, Target

SCRIPT = """\
import sys

from stratagem_testing.strategies.rank import main

if __name__ == "__main__":
    main(sys.argv[1])
"""
_RESTARTS = 3
"""How often ranks are started again to go on behind a check that has ended them."""
_ENDED = "the ranks ended"
"""What a failure begins with behind which new ranks have to go on."""

Item = tuple[Target, str]
"""A target and the name of a check."""


@dataclass(frozen=True)
class Outcome:
    """What came of a check: what each rank returned, or why there is nothing.

    Attributes:
        found: for the judge; None where a rank failed.
        failure: why; "" where none failed.
    """

    found: Result | None = None
    failure: str = ""

    def judge(self, name: str) -> None:
        """Judge a check.

        Raises:
            AssertionError: what is wrong, with the check's name and what it means.
        """
        about = CHECKS[name].about
        if self.found is None:
            raise AssertionError(failure_of(name, self.failure, about))
        try:
            CHECKS[name].judge(self.found)
        except AssertionError as error:
            raise AssertionError(failure_of(name, str(error), about)) from None


class Reference:
    """What single_device comes to; each check is run once, whatever the strategies compared.

    Args:
        folder: an empty one.
        deadline: seconds that a check may take.
    """

    def __init__(self, folder: Path, deadline: float = 60.0) -> None:
        self.folder = folder
        self.deadline = deadline
        self._ran: dict[tuple[Target, str], _Ran] = {}
        self._folders: dict[Target, Path] = {}

    def of(self, target: Target, names: Sequence[str]) -> tuple[Path, dict[str, _Ran]]:
        """Return the folder, and what came of some checks for a target; run what is missing."""
        plain = replace(
            target, strategy=REFERENCE, devices=1, data_groups=1, tolerance=0.0, equal=True
        )
        own = self._folders.setdefault(plain, self.folder / f"reference{len(self._folders)}")
        missing = [name for name in names if (plain, name) not in self._ran]
        if missing:
            # All at once: what takes time is the start of a process.
            missing = [n for n, c in CHECKS.items() if c.reference and (plain, n) not in self._ran]
            work = {(plain, name): _work((plain, name), own, own) for name in missing}
            self._ran.update(_run(work, own, self.deadline))
        return own, {name: self._ran[plain, name] for name in names}


def run_checks(
    items: Sequence[Item],
    folder: Path,
    *,
    reference: Reference | None = None,
    deadline: float = 60.0,
) -> dict[Item, Outcome]:
    """Run checks on ranks of their targets, which all have as many devices.

    Args:
        items: in which order.
        folder: an empty one; files of the ranks are left there.
        reference: shared with other calls; None: one of its own.
        deadline: seconds that a check may take.

    Returns:
        What came of each.
    """
    load_checks()
    outcomes: dict[Item, Outcome] = {}
    together = [item for item in items if not CHECKS[item[1]].alone]
    names = list(dict.fromkeys(name for _, name in items if CHECKS[name].reference))
    reference = reference or Reference(folder, deadline)
    reference_folder, references = reference.of(items[0][0], names)
    groups = [together, *([item] for item in items if CHECKS[item[1]].alone)]
    for number, group in enumerate(group for group in groups if group):
        own = folder / f"ranks{number}"
        targets = list(dict.fromkeys(target for target, _ in group))
        work = {
            item: _work(item, own / f"target{targets.index(item[0])}", reference_folder)
            for item in group
        }
        ran = _run(work, own, deadline)
        follow = {
            item: replace(work[item], target=_plain(item[0]))
            for item in group
            if CHECKS[item[1]].after and not ran[item].failure
        }
        after = _run(follow, own / "after", deadline, after=True) if follow else {}
        for item in group:
            outcomes[item] = _outcome(item, ran[item], references, after.get(item))
    return outcomes


def failures(target: Target, folder: Path) -> dict[str, str]:
    """Run all checks on a strategy, without pytest; return what those that fail say, by name.

    Args:
        target: what is tested.
        folder: an empty one; files of the ranks are left there.
    """
    load_checks()
    said = {}
    for (_, name), outcome in run_checks([(target, name) for name in CHECKS], folder).items():
        try:
            outcome.judge(name)
        except AssertionError as error:
            said[name] = str(error)
    return said


@dataclass(frozen=True)
class _Ran:
    """What the ranks of a session have written of one item."""

    folder: Path
    ranks: list[Any]
    failure: str
    ended: Ended


def _plain(target: Target) -> Target:
    """Return the target of which the numbers are right."""
    return replace(target, strategy=REFERENCE, devices=1, data_groups=1)


def _work(item: Item, folder: Path, reference: Path) -> Work:
    """Return what ranks do of an item, in a folder of its own."""
    target, check = item
    name = check.replace("/", ".").replace(" ", "_")
    return Work(target, check, str(folder / name), str(reference / name))


def _outcome(item: Item, ran: _Ran, references: Mapping[str, _Ran], after: _Ran | None) -> Outcome:
    target, name = item
    if ran.failure:
        return Outcome(failure=ran.failure)
    reference = references.get(name)
    if reference is not None and reference.failure:
        return Outcome(failure=f"{REFERENCE}, to compare with: {reference.failure}")
    if after is not None and after.failure:
        return Outcome(failure=f"{REFERENCE}, with what the ranks have left: {after.failure}")
    return Outcome(
        Result(
            target=target,
            capabilities=target.capabilities(),
            ranks=ran.ranks,
            reference=None if reference is None else reference.ranks[0],
            after=None if after is None else after.ranks[0],
            ended=ran.ended,
            folder=ran.folder,
        )
    )


def _run(
    work: Mapping[Item, Work], folder: Path, deadline: float, *, after: bool = False
) -> dict[Item, _Ran]:
    """Start ranks and let them do all the work; start them again behind what has ended them."""
    folder.mkdir(parents=True, exist_ok=True)
    items = list(work)
    session = Session(folder=str(folder), work=tuple(work.values()), after=after, deadline=deadline)
    ran: dict[Item, _Ran] = {}
    for _ in range(_RESTARTS + 1):
        ended = _start(session)
        done = session.begin
        for position in range(session.begin, len(items)):
            ranks, failure = _collect(session, position, ended)
            own = Path(session.work[position].folder)
            ran[items[position]] = _Ran(own, ranks, failure, ended)
            done = position + 1
            if failure.startswith(_ENDED):
                break
        if done == len(items):
            return ran
        session = replace(session, begin=done)
    for position in range(session.begin, len(items)):
        failure = f"not run, since the ranks had ended {_RESTARTS + 1} times before"
        ran[items[position]] = _Ran(folder, [], failure, ended)
    return ran


def _collect(session: Session, position: int, ended: Ended) -> tuple[list[Any], str]:
    """Return what the ranks have written of an item, and why there is nothing."""
    values, errors, missing = [], {}, []
    world_size = session.work[0].target.world_size
    for rank in range(world_size):
        path = session.result(position, rank)
        if not path.exists():
            missing.append(rank)
            continue
        told = json.loads(path.read_text())
        values.append(told.get("value"))
        if "error" in told:
            errors[rank] = told
    if CHECKS[session.work[position].check].alone:
        return values, ""
    where = "".join(
        f"\nrank {rank} raised {told['error']}\n{told['traceback']}"
        for rank, told in errors.items()
    )
    if missing:
        how = "they were killed" if ended.exit_code is None else f"exit code {ended.exit_code}"
        done = ", ".join(str(rank) for rank in range(world_size) if rank not in missing)
        return [], (
            f"{_ENDED} in it or did not come to its end ({how}): rank(s) "
            f"{', '.join(map(str, missing))} returned nothing"
            + (f", rank(s) {done} did" if done else "")
            + f"{where}\n--- stderr\n{ended.stderr[-6000:]}"
        )
    if errors:
        who = (
            "every rank" if len(errors) == world_size else f"rank(s) {', '.join(map(str, errors))}"
        )
        return [], f"{who} raised {next(iter(errors.values()))['error']}{where}"
    return values, ""


def _start(session: Session) -> Ended:
    """Run a session's script until it ends or a check takes too long; leave no process."""
    folder = Path(session.folder)
    (folder / "session.json").write_text(json.dumps(asdict(session)))
    (folder / "ranks.py").write_text(SCRIPT)
    began = time.monotonic()
    with (folder / "stderr").open("wb") as stderr, (folder / "stdout").open("wb") as stdout:
        process = subprocess.Popen(
            [sys.executable, str(folder / "ranks.py"), str(folder / "session.json")],
            cwd=folder,
            env=clean_environment(session.work[0].target.search_path),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            exit_code = _wait(process, folder, session.deadline)
        finally:
            processes = end_session(process.pid, 2.0 if process.poll() is not None else 0.0)
            process.wait()
    left = {
        int(path.name.split(".")[1]): json.loads(path.read_text())["left"]
        for path in folder.glob("left.*.json")
    }
    return Ended(
        exit_code=exit_code,
        stderr=(folder / "stderr").read_text(errors="replace"),
        left=left,
        processes=processes,
        seconds=time.monotonic() - began,
    )


def _wait(process: subprocess.Popen[bytes], folder: Path, deadline: float) -> int | None:
    """Wait for a session's end; None: nothing has gone on for too long."""
    progress, since = "", time.monotonic()
    # Ranks give up by themselves first, and leave their stacks.
    patience = deadline + 45.0
    while True:
        try:
            return process.wait(timeout=0.05)
        except subprocess.TimeoutExpired:
            pass
        now = "".join(path.read_text() for path in sorted(folder.glob("at.*")))
        if now != progress:
            progress, since = now, time.monotonic()
        if time.monotonic() - since > patience:
            return None
