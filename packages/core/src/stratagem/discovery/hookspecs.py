"""The hooks that a plugin module may implement; each docstring says who is called, and when."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, final

import pluggy

from stratagem.discovery.capabilities import check_fields
from stratagem.discovery.specs import ComponentSpec, is_target
from stratagem.errors import PluginError

if TYPE_CHECKING:
    from stratagem.plan.plan import RunPlan, RunRequest

PROJECT = "stratagem"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl: pluggy.HookimplMarker = pluggy.HookimplMarker(PROJECT)

_COMMAND = re.compile(r"[a-z][a-z0-9_-]*( [a-z][a-z0-9_-]*)?")


@final
@dataclass(frozen=True)
class Check:
    """One line of `stratagem doctor`, from a backend that examines itself.

    Attributes:
        name: the subject of the check ("deepspeed 0.19.8", "compiler").
        status: "ok", "warning" or "error".
        detail: the finding, and the remedy for a problem.
    """

    name: str
    status: Literal["ok", "warning", "error"]
    detail: str = ""


@final
@dataclass(frozen=True)
class Command:
    """A command that a plugin adds to the `stratagem` program.

    Attributes:
        name: the words that users type after `stratagem`: one ("tune"), or two for a sub-command
            ("checkpoint upload"). Words have lower-case letters, digits, "-" and "_".
        summary: one line for `stratagem --help`.
        target: the function that runs the command, as "package.module:function". A call of the
            command imports it. It takes the arguments after the name (`Sequence[str]`) and returns
            the exit code.

    Raises:
        PluginError: a field does not have the form described here.
    """

    name: str
    summary: str
    target: str

    def __post_init__(self) -> None:
        check_fields(self, f"the command {self.name!r}")
        if not _COMMAND.fullmatch(self.name):
            raise PluginError(
                f"a command has the name {self.name!r}; expected one or two words of lower-case "
                "letters, digits, '-' and '_', each beginning with a letter"
            )
        if not is_target(self.target):
            raise PluginError(
                f"the command {self.name!r} has target={self.target!r}; expected "
                "'package.module:function'"
            )


@hookspec
def stratagem_components() -> Iterable[ComponentSpec]:  # type: ignore[empty-body]
    """Return the specs of this plugin's components.

    Called once per process for each plugin, when the registry is first used. An exception is
    recorded in that plugin's report, and other plugins still load. Return data only: import neither
    torch nor an SDK.
    """


@hookspec(firstresult=True)
def stratagem_choose_strategy(request: RunRequest, candidates: tuple[str, ...]) -> str | None:
    """Choose a strategy for a request with `strategy="auto"`.

    Called while a request is resolved, in every process that resolves a request. `candidates` are
    the names that fit the chosen accelerator and the number of devices. Return one of them, or None
    to leave the choice to other plugins. The first answer that is not None wins, and the plan names
    the plugin that gave it.
    """


@hookspec(firstresult=True)
def stratagem_read_checkpoint(contents: dict[str, Any], path: str) -> dict[str, Any] | None:
    """Convert a checkpoint of another library to the format of a Trainer's checkpoint.

    Called on every rank when a Trainer, `load_from_checkpoint` or `stratagem checkpoint convert`
    has read a checkpoint that no Trainer of Stratagem wrote. `contents` is the dict that
    weights-only loading returned, `path` is its name for errors. Return a dict with the keys of a
    Trainer's checkpoint (at least `state_dict`), or None if the format is unknown. Do not change
    `contents`: other plugins may receive it. The first answer that is not None wins; plugins that
    were registered later are asked first. Raise an error of `stratagem.errors` if the format is
    known and the checkpoint is damaged.
    """


@hookspec
def stratagem_run_planned(plan: RunPlan) -> None:
    """Observe a plan, or refuse it by raising `ConfigurationError`.

    Called once for each resolved request before any process starts, and again in each started
    process.
    """


@hookspec
def stratagem_doctor() -> Iterable[Check]:  # type: ignore[empty-body]
    """Examine this backend for `stratagem doctor`.

    Called only by that command, which should answer at once. Read metadata and files, and import
    neither torch nor an SDK (`stratagem.discovery.installed` has functions for the most common
    checks). An exception is shown as a failed check.
    """


@hookspec
def stratagem_check_spec(spec: ComponentSpec) -> Iterable[str]:  # type: ignore[empty-body]
    """Return the problems of a component's spec, a sentence each.

    `stratagem doctor` calls it for each component of every distribution except core, and shows the
    sentences as failed checks of that distribution. Do not import torch, an SDK, or the target of
    the spec. An exception is shown as a failed check of the plugin that raised it.
    """


@hookspec(firstresult=True)
def stratagem_examine(distribution: str, as_json: bool, verbose: bool) -> int | None:
    """Print a report on a distribution, and return the exit code.

    `stratagem doctor NAME` calls it once. `distribution` is the name that the user typed, of a
    distribution or of an entry point. With `as_json`, print JSON. With `verbose`, also print the
    tracebacks of plugin modules that failed. Return 0 if there is no problem, 1 if there is one, 2
    if nothing has that name, or None to leave the answer to other plugins. The first answer that is
    not None wins. It may import torch and the targets of specs.
    """


@hookspec
def stratagem_cli() -> Iterable[Command]:  # type: ignore[empty-body]
    """Return the commands that this plugin adds to the `stratagem` program.

    Called when a user runs a command that core does not have, when a user lists the commands, and
    by `stratagem doctor`. A plugin cannot replace a command of core, and a name that two plugins
    use is refused. `doctor` shows an exception or a missing target as a failed check; other
    commands keep working. A target may parse its arguments with any library, such as argparse.
    """
