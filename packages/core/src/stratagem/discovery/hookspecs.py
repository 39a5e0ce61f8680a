"""The hooks that a plugin module may implement; each docstring says who is called, and when."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, final

import pluggy

from stratagem.discovery.specs import ComponentSpec

if TYPE_CHECKING:
    import typer

    from stratagem.plan.plan import RunPlan, RunRequest

PROJECT = "stratagem"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@final
@dataclass(frozen=True)
class Check:
    """One line of `stratagem doctor`, from a backend that examines itself.

    Attributes:
        name: what was examined ("deepspeed 0.19.8", "compiler").
        status: "ok", "warning" or "error".
        detail: what was found, and what to do about it.
    """

    name: str
    status: Literal["ok", "warning", "error"]
    detail: str = ""


@hookspec
def stratagem_components() -> Iterable[ComponentSpec]:  # type: ignore[empty-body]
    """Return the specs of this plugin's components.

    Called once a process, when the registry is first looked at, for each plugin by itself: an
    exception becomes that plugin's report and stops nobody else. Return data only: import neither
    torch nor an SDK.
    """


@hookspec(firstresult=True)
def stratagem_choose_strategy(request: RunRequest, candidates: tuple[str, ...]) -> str | None:
    """Choose a strategy for a request that left it to us (`strategy="auto"`).

    Called while a request is resolved, in every process that resolves one. `candidates` are the
    names that fit the chosen accelerator and the number of devices. Return one of them, or None to
    leave the choice to others. The first answer that is not None wins; the plan says whose it was.
    """


@hookspec(firstresult=True)
def stratagem_read_checkpoint(contents: dict[str, Any], path: str) -> dict[str, Any] | None:
    """Convert a checkpoint of another library to the form of a Trainer's.

    Called on every rank when a Trainer, `load_from_checkpoint` or `stratagem checkpoint convert`
    has read a checkpoint that no Trainer of Stratagem wrote. `contents` is the dict that
    weights-only loading returned, `path` is its name for errors. Return a dict with the keys of a
    Trainer's checkpoint (at least `state_dict`), or None if the form is not known. Leave `contents`
    as it is: other plugins may receive it. The first answer that is not None wins; plugins that
    were registered later are asked first. Raise an error of `stratagem.errors` if the form is known
    and the checkpoint is damaged.
    """


@hookspec
def stratagem_run_planned(plan: RunPlan) -> None:
    """Observe a plan, or refuse it by raising `ConfigurationError`.

    Called once for each resolved request, before any process starts, and again in each process
    that is started.
    """


@hookspec
def stratagem_doctor() -> Iterable[Check]:  # type: ignore[empty-body]
    """Examine this backend for `stratagem doctor`.

    Called only by that command, which is to answer at once: read metadata and files, and import
    neither torch nor an SDK (`stratagem.discovery.installed` has what is asked most). An exception
    is shown as a failed check.
    """


@hookspec
def stratagem_cli(app: typer.Typer) -> None:
    """Add commands to the `stratagem` program.

    Called when that program starts, but for `run`, `strategies` and `explain`, which do without
    typer. `doctor` calls it to see whether it fails.
    """
