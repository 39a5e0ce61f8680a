"""Check: one thing that every strategy must do, and the registry of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratagem.discovery import Capabilities
from stratagem_testing.reports import sentence_of
from stratagem_testing.strategies.target import Target

if TYPE_CHECKING:
    from stratagem_testing.strategies.probe import Probe

Run = Callable[["Probe"], Any]
"""What a rank does; returns weights-only-safe data (JSON)."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a session of ranks ended.

    Attributes:
        exit_code: exit code of the started process; None: it was killed at its deadline.
        stderr: the output of all ranks on stderr.
        left: the resources that remained after each rank's teardown, by rank.
        up: the components that each rank's strategy has not torn down, by rank.
        processes: the processes that ran after the end of the session.
        seconds: the duration.
    """

    exit_code: int | None = None
    stderr: str = ""
    left: Mapping[int, list[str]] = field(default_factory=dict)
    up: Mapping[int, list[str]] = field(default_factory=dict)
    processes: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Result:
    """The findings that a check is judged by.

    Attributes:
        target, capabilities: the strategy under test, and its capabilities.
        ranks: the results of the ranks.
        reference: the result of `single_device`, if the check requests a reference.
        after: the result of `single_device` afterwards, if the check requests this result.
        ended: how the session ended.
        folder: the folder of the check, which may contain files of the ranks.
    """

    target: Target
    capabilities: Capabilities
    ranks: list[Any]
    reference: Any = None
    after: Any = None
    ended: Ended = Ended()
    folder: Path = Path()

    @property
    def replicated(self) -> bool:
        """Whether every rank has whole parameters, which are to be alike."""
        return self.capabilities.parameters == "same" and not self.capabilities.sharded_state


Judge = Callable[[Result], None]
"""Raises AssertionError with what is wrong."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """A duty of every strategy.

    Attributes:
        name: "group/what".
        about: the meaning of a failure, in a sentence.
        run: runs on every rank.
        judge: runs in pytest's process, once.
        reference: whether `run` is also run under `single_device` before, to compare with.
        after: run under `single_device` after the end of the ranks, in the same folder; None: no
            run.
        alone: needs separate ranks, since the check ends them.
        ranks: the number of ranks; 0: the ranks of the target.
        nodes: the number of nodes of these ranks; with more than one node, `ranks` is set.
        follows: the check that runs before, on the same ranks of the target; its folder is the
            probe's `reference`; "" for no check.
    """

    name: str
    about: str
    run: Run
    judge: Judge
    reference: bool = False
    after: Run | None = None
    alone: bool = False
    ranks: int = 0
    nodes: int = 1
    follows: str = ""


CHECKS: dict[str, Check] = {}
"""Every check by its name, in the order in which they run."""


def check(
    name: str,
    judge: Judge | None = None,
    *,
    about: str = "",
    reference: bool = False,
    after: Run | None = None,
    alone: bool = False,
    ranks: int = 0,
    nodes: int = 1,
    follows: str = "",
) -> Callable[[Run], Check]:
    """Make the decorated function a check; see `Check`.

    Args:
        name: "group/what".
        judge: None for the function that `judge_of` decorates.
        about: the meaning of a failure; "": the docstring of the function.
        reference, after, alone, ranks, nodes, follows: see `Check`.
    """

    def register(run: Run) -> Check:
        made = CHECKS[name] = Check(
            name=name,
            about=about or sentence_of(run),
            run=run,
            judge=judge or _unjudged,
            reference=reference,
            after=after,
            alone=alone,
            ranks=ranks,
            nodes=nodes,
            follows=follows,
        )
        return made

    return register


def judge_of(judged: Check) -> Callable[[Judge], Judge]:
    """Let the decorated function judge a check."""

    def register(judge: Judge) -> Judge:
        CHECKS[judged.name] = replace(judged, judge=judge)
        return judge

    return register


def _unjudged(found: Result) -> None:
    raise NotImplementedError("a check that nobody judges")
