"""What the ranks of a session run: one check after another; each writes what it has found."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from stratagem.errors import ConfigurationError, RankFailedError
from stratagem.launch import this_rank
from stratagem.lite import Lite
from stratagem.strategies import Strategy
from stratagem_testing.strategies.check import CHECKS
from stratagem_testing.strategies.checks import load_checks
from stratagem_testing.strategies.probe import Probe
from stratagem_testing.strategies.target import Target
from stratagem_testing.surroundings import Surroundings
from stratagem_torch.launch import free_port

BROKEN = 71
"""The exit code of a rank that a check has left without the others."""
LOST = RankFailedError.__name__
"""What the error of a rank begins with that has lost another one."""
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""The variable with the file in which a rank leaves its last error for the process of rank 0."""
REFUSED = "refused"
"""The file that says of a check with more ranks that the strategy does not take so many."""


@dataclass(frozen=True)
class Work:
    """A check of a target, as ranks do it.

    Attributes:
        target: the strategy under test.
        check: a name.
        folder: the folder where ranks may leave files.
        reference: the folder of `single_device`, or of the check that this check follows, which has
            run before.
    """

    target: Target
    check: str
    folder: str
    reference: str


@dataclass(frozen=True, kw_only=True)
class Session:
    """The work of a session of ranks; a JSON file.

    Attributes:
        folder: of this session.
        work: in this order; the first target's launcher starts the ranks.
        after: whether to call the checks' `after` in the place of their `run`.
        begin: the first work to do.
        deadline: seconds that a check may take.
    """

    folder: str
    work: tuple[Work, ...]
    after: bool = False
    begin: int = 0
    deadline: float = 60.0

    @classmethod
    def read(cls, path: str) -> Session:
        """Return the content of a file."""
        told = json.loads(Path(path).read_text())
        work = tuple(Work(**{**w, "target": Target.read(w["target"])}) for w in told.pop("work"))
        return cls(**told, work=work)

    def result(self, position: int, rank: int) -> Path:
        """Return the path to which a rank writes its findings."""
        return Path(self.folder) / f"result.{position}.{rank}.json"


def main(path: str) -> None:
    """Start the ranks and run a session's checks on each; called by the session's script."""
    session = Session.read(path)
    before = Surroundings.now()
    load_checks()
    first = session.work[0].target
    plugins = ["single_file"]
    if first.nodes > 1:
        play_nodes(first)
    # More ranks than a strategy's own test has need not be started by its own launcher.
    elif CHECKS[session.work[0].check].ranks and first.capabilities().launchers is None:
        plugins += ["fork"] if first.accelerator == "cpu" else []
    # Only their number counts: each check makes its own front end.
    try:
        lite = Lite(
            accelerator=first.accelerator,
            strategy=first.make(),
            devices=first.devices // first.nodes,
            num_nodes=first.nodes,
            plugins=plugins,
        )
    except ConfigurationError as error:
        for work in session.work:
            Path(work.folder).mkdir(parents=True, exist_ok=True)
            (Path(work.folder) / REFUSED).write_text(str(error))
        raise
    lite.launch(_run, path, before if lite.plan.launcher.name == "script" else None)


def play_nodes(target: Target) -> None:
    """Become a rank of several nodes, as torchrun starts them; this process forks the others."""
    on_node = target.devices // target.nodes
    rank = 0
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
        TORCHELASTIC_RUN_ID="kit",
        WORLD_SIZE=str(target.devices),
        LOCAL_WORLD_SIZE=str(on_node),
    )
    for other in range(1, target.devices):
        if os.fork() == 0:
            rank = other
            break
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank % on_node), GROUP_RANK=str(rank // on_node)
    )


def _run(lite: Lite, path: str, before: Surroundings | None) -> None:
    """Run all items on this rank."""
    warnings.simplefilter("ignore")  # messages for users are tested elsewhere
    session = Session.read(path)
    load_checks()
    rank, world_size = lite.ranks.global_rank, lite.ranks.world_size
    up = _watch_teardown(lite.strategy)
    # Functions at the end are called in reverse order: this one comes last. It holds the strategy,
    # which is torn down only while a reference exists.
    note = partial(_note_what_is_left, session, rank, before, up, lite.strategy)
    this_rank.at_end.insert(0, note)
    faulthandler.enable(sys.stderr)
    for position in range(session.begin, len(session.work)):
        work = session.work[position]
        folder = Path(work.folder)
        folder.mkdir(parents=True, exist_ok=True)
        probe = Probe(work.target, rank, world_size, folder, Path(work.reference))
        check = CHECKS[work.check]
        run = check.after if session.after else check.run
        assert run is not None
        (Path(session.folder) / f"at.{rank}").write_text(str(position))
        faulthandler.dump_traceback_later(session.deadline, file=sys.stderr)
        # An error that an earlier check expected would be taken for the cause of this rank's end.
        if error_file := os.environ.get(ERROR_FILE):
            Path(error_file).unlink(missing_ok=True)
        found = _found(run, probe, raises=check.alone)
        _write(session.result(position, rank), found)
        if found.get("error", "").startswith(LOST):
            os._exit(BROKEN)
        try:
            probe.meet("ended")
        except TimeoutError:
            print(
                f"rank {rank} ends: others have not ended {work.check!r}",
                file=sys.stderr,
                flush=True,
            )
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


def _watch_teardown(strategy: Strategy) -> set[str]:
    """Return the names of a strategy's components whose `teardown` was not called yet."""
    up = {"checkpoint_io", "cluster_environment", "accelerator"}

    def noted(name: str, teardown: Callable[[], None]) -> None:
        up.discard(name)
        teardown()

    for name in up:
        component = getattr(strategy, name)
        component.teardown = partial(noted, name, component.teardown)
    return up


def _note_what_is_left(
    session: Session, rank: int, before: Surroundings | None, up: set[str], strategy: Strategy
) -> None:
    found = {"left": before.changes() if before is not None else [], "up": sorted(up)}
    _write(Path(session.folder) / f"left.{rank}.json", found)
