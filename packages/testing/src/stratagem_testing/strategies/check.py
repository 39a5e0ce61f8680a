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
        exit_code: of the process that was started; None: it was killed at its deadline.
        stderr: what all ranks printed there.
        left: what was still there after each rank's teardown, by rank.
        up: the components that each rank's strategy has not torn down, by rank.
        processes: what ran when the session was over.
        seconds: how long it took.
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
        target, capabilities: what was tested, and what it says that it can do.
        ranks: what each rank returned.
        reference: what `single_device` returned, where the check asks for it.
        after: what `single_device` returned afterwards, where the check asks for that.
        ended: how the session ended.
        folder: the check's, where the ranks may have left files.
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
        about: what it means when it fails, in a sentence.
        run: on every rank.
        judge: in pytest's process, once.
        reference: whether `run` is also run under `single_device` before, to compare with.
        after: run under `single_device` when the ranks are gone, in the same folder; None: nothing.
        alone: needs ranks of its own, since it ends them.
        ranks: how many it needs; 0: as many as the target has.
        nodes: into how many nodes these ranks are divided; with more than one, `ranks` is set.
        follows: the check that runs before, on the target's own ranks, and whose folder is the
            probe's `reference`; "": none.
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
        judge: None: what `judge_of` decorates.
        about: what it means when it fails; "": the function's docstring.
        reference, after, alone, ranks, nodes, follows: as `Check` has them.
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
