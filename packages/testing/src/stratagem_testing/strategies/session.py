"""Sessions: ranks started once for many checks, and watched; what they have found is collected."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from stratagem_testing.processes import clean_environment, end_session
from stratagem_testing.reports import failure_of
from stratagem_testing.strategies.check import CHECKS, Ended, Result
from stratagem_testing.strategies.checks import load_checks
from stratagem_testing.strategies.probe import PATIENCE
from stratagem_testing.strategies.rank import LOST, REFUSED, Session, Work
from stratagem_testing.strategies.stacks import waiting
from stratagem_testing.strategies.starter import starter
from stratagem_testing.strategies.target import REFERENCE, Target

SCRIPT = """\
import sys

from stratagem_testing.strategies.probe import PATIENCE
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
    """The outcome of a check: each rank's result, or the reason for having no result.

    Attributes:
        found: the result for the judge; None if a rank failed, or the check does not concern the
            target.
        failure: the reason of a failure; "" after success.
    """

    found: Result | None = None
    failure: str = ""

    def judge(self, name: str) -> None:
        """Judge a check.

        Raises:
            AssertionError: the check failed; the message has its name, the defect and its meaning.
        """
        about = CHECKS[name].about
        if self.found is None and not self.failure:
            return
        if self.found is None:
            raise AssertionError(failure_of(name, self.failure, about))
        try:
            CHECKS[name].judge(self.found)
        except AssertionError as error:
            raise AssertionError(failure_of(name, str(error), about)) from None


class Reference:
    """The results of single_device; each check runs once for all compared strategies.

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
        """Return the folder and the outcomes of some checks for a target; run missing checks."""
        plain = replace(
            target,
            strategy=REFERENCE,
            devices=1,
            nodes=1,
            data_groups=1,
            tolerance=0.0,
            equal=True,
        )
        own = self._folders.setdefault(plain, self.folder / f"reference{len(self._folders)}")
        missing = [name for name in names if (plain, name) not in self._ran]
        if missing:
            # All at once: starting processes takes most of the time.
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
        items: the checks, in the order of execution.
        folder: an empty folder; files of the ranks stay there.
        reference: shared with other calls; None for a new reference.
        deadline: the time limit of a check in seconds.

    Returns:
        The outcome of each check, and of each check that a check follows.
    """
    load_checks()
    before = [(target, CHECKS[name].follows) for target, name in items if CHECKS[name].follows]
    items = list(dict.fromkeys([*before, *items]))
    outcomes: dict[Item, Outcome] = {}
    names = list(dict.fromkeys(name for _, name in items if CHECKS[name].reference))
    reference = reference or Reference(folder, deadline)
    reference_folder, references = reference.of(items[0][0], names)
    targets = list(dict.fromkeys(target for target, _ in items))
    folders: dict[Item, str] = {}
    for number, group in enumerate(_groups(items)):
        own = folder / f"ranks{number}"
        work = {}
        for target, name in group:
            ranks, nodes = CHECKS[name].ranks, CHECKS[name].nodes
            tested = target.with_devices(ranks) if ranks else target
            if nodes > 1:
                tested = target.on_nodes(nodes, ranks)
            if tested is None:
                outcomes[target, name] = Outcome()
                continue
            target_folder = own / f"target{targets.index(target)}"
            one = _work((tested, name), target_folder, reference_folder)
            if followed := CHECKS[name].follows:
                one = replace(one, reference=folders[target, followed])
            work[target, name] = one
            folders[target, name] = one.folder
        ran = _run(work, own, deadline) if work else {}
        follow = {
            item: replace(one, target=_plain(one.target))
            for item, one in work.items()
            if CHECKS[item[1]].after and not ran[item].failure
        }
        after = _run(follow, own / "after", deadline, after=True) if follow else {}
        for item, one in work.items():
            outcomes[item] = _outcome(one, ran[item], references, after.get(item))
            followed = CHECKS[item[1]].follows
            if followed and outcomes[item[0], followed].failure:
                outcomes[item] = Outcome()  # a requirement is missing, as the other outcome says
    return outcomes


def _groups(items: Sequence[Item]) -> list[list[Item]]:
    """Return what runs together; a check that ends its ranks runs by itself."""
    groups: dict[Any, list[Item]] = {}
    for item in items:
        check = CHECKS[item[1]]
        key = (check.ranks, check.nodes)
        groups.setdefault(item if check.alone else key, []).append(item)
    return list(groups.values())


def failures(target: Target, folder: Path) -> dict[str, str]:
    """Run all checks on a strategy, without pytest; return the messages of failures by name.

    Args:
        target: the strategy under test.
        folder: an empty folder; files of the ranks stay there.
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
    return replace(target, strategy=REFERENCE, devices=1, nodes=1, data_groups=1)


def _work(item: Item, folder: Path, reference: Path) -> Work:
    """Return what ranks do of an item, in a folder of its own."""
    target, check = item
    name = check.replace("/", ".").replace(" ", "_")
    return Work(target, check, str(folder / name), str(reference / name))


def _outcome(work: Work, ran: _Ran, references: Mapping[str, _Ran], after: _Ran | None) -> Outcome:
    target, name = work.target, work.check
    if CHECKS[name].ranks and (ran.folder / REFUSED).exists():
        return Outcome()
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
    lost = [rank for rank, told in errors.items() if told["error"].startswith(LOST)]
    if missing or lost:
        how = "they were killed" if ended.exit_code is None else f"exit code {ended.exit_code}"
        done = [rank for rank in range(world_size) if rank not in missing and rank not in lost]
        waits = "".join(f"\na rank was {place}" for place in waiting(ended.stderr))
        return [], (
            f"{_ENDED} in it or did not come to its end ({how}): rank(s) "
            f"{', '.join(map(str, sorted([*missing, *lost])))} returned nothing"
            + (f", rank(s) {', '.join(map(str, done))} did" if done else "")
            + f"{waits}{where}\n--- stderr\n{ended.stderr[-6000:]}"
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
    script = folder / "ranks.py"
    script.write_text(SCRIPT)
    began = time.monotonic()
    environ = clean_environment(session.work[0].target.search_path)
    process = starter().start(script, str(folder / "session.json"), environ)
    exit_code = None
    try:
        exit_code = _wait(folder, session.deadline)
    finally:
        processes = end_session(process, 0.0 if exit_code is None else 2.0)
        if exit_code is None:
            starter().wait(60.0)
    at_end = {
        int(path.name.split(".")[1]): json.loads(path.read_text())
        for path in folder.glob("left.*.json")
    }
    return Ended(
        exit_code=exit_code,
        stderr=(folder / "stderr").read_text(errors="replace"),
        left={rank: told["left"] for rank, told in at_end.items()},
        up={rank: told["up"] for rank, told in at_end.items()},
        processes=processes,
        seconds=time.monotonic() - began,
    )


def _wait(folder: Path, deadline: float) -> int | None:
    """Wait for a session's end; None: nothing has gone on for too long."""
    progress, since = "", time.monotonic()
    # Ranks give up by themselves first, and leave their stacks.
    patience = deadline + PATIENCE + 5.0
    while time.monotonic() - since <= patience:
        exit_code = starter().wait(0.05)
        if exit_code is not None:
            return exit_code
        now = "".join(path.read_text() for path in sorted(folder.glob("at.*")))
        if now != progress:
            progress, since = now, time.monotonic()
    return None
