"""The server: a process that has imported torch, and forks one for each check.

So that a check takes what it does and not the seconds of an import, and that nothing which a
component leaves behind (a default dtype, a thread, a hanging call) meets the next check.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import os
import subprocess
import sys
import traceback
import warnings
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from stratagem_testing.child import Child, Report, StuckError
from stratagem_testing.components.bench import Bench
from stratagem_testing.components.check import checks_of
from stratagem_testing.components.component import Component
from stratagem_testing.processes import clean_environment, end_children, end_session
from stratagem_testing.reports import failure_of

_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of prctl(2): whose parent ends becomes this process's child."""
_PATIENCE = 2.0
"""Seconds that processes have to end by themselves when their check is over."""


class Server:
    """Runs checks of components, each in a separate process; ends with `close`.

    Args:
        search_path: folders that are searched for modules and distributions before others.
    """

    def __init__(self, search_path: tuple[str, ...] = ()) -> None:
        self._search_path = search_path
        self._process: subprocess.Popen[str] | None = None

    def failure(self, component: Component, check: str, deadline: float = 60.0) -> str:
        """Return why a check of a component fails, in the words of a test's failure; "": it passes.

        Args:
            component: the component under test.
            check: its name.
            deadline: the time limit in seconds.
        """
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                env=clean_environment(self._search_path),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {"component": asdict(component), "check": check, "deadline": deadline}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process that forks the checks has ended ({check})")
        failure: str = json.loads(answer)
        return failure

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            with self._process as process:
                assert process.stdin is not None
                process.stdin.close()
            self._process = None


def failures(component: Component) -> dict[str, str]:
    """Run all checks on a component, without pytest; return the messages of failures by name."""
    server = Server()
    try:
        said = {name: server.failure(component, name) for name in checks_of(component.kind)}
    finally:
        server.close()
    return {name: failure for name, failure in said.items() if failure}


def main() -> None:
    """Serve: a line of JSON for each check, from stdin, and one with its failure to stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of a check is no answer
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    # A fork copies no threads: waiting for a thread of torch would never end.
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # as the first optimizer does, in seconds
    for line in sys.stdin:
        asked = json.loads(line)
        told = asked["component"]
        component = Component(**{**told, "search_path": tuple(told["search_path"])})
        failure = _failure(component, asked["check"], asked["deadline"])
        answers.write(json.dumps(failure) + "\n")
        answers.flush()


def _failure(component: Component, check: str, deadline: float) -> str:
    """Run a check in a fork; return why it fails, or ""."""
    about = checks_of(component.kind)[check].about

    def run(report: Report) -> None:
        faulthandler.dump_traceback_later(deadline)
        folder = scratch / "folder"
        folder.mkdir()
        os.chdir(folder)
        sys.path[:0] = component.search_path
        warnings.simplefilter("ignore")  # messages for users are tested elsewhere
        report(failure=_said(component, check, folder))

    with TemporaryDirectory(prefix="stratagem-kit-") as name:
        scratch = Path(name)
        with (scratch / "log").open("wb") as log:
            child = Child(run, log, {})
            try:
                said: Any = child.wait_for("failure", deadline + 2.0)
            except StuckError as error:
                child.kill()
                said = f"the process of the check did not come to its end ({error})"
            # An orderly end: processes that still run belong to the component.
            left = end_session(child.pid, 0.0) if said else end_session(child.pid, _PATIENCE)
            child.end()
            left += end_children(0.0 if said else _PATIENCE)
        printed = (scratch / "log").read_text(errors="replace")[-4000:]
    if not said and left:
        said = f"left running when the check was over: {'; '.join(left)}"
    if said.startswith(("the process of the check", "the check ended")):
        said += f"\n--- printed\n{printed}"
    return failure_of(check, said, about) if said else ""


def _said(component: Component, check: str, folder: Path) -> str:
    try:
        checks_of(component.kind)[check].run(Bench(component, folder))
    except AssertionError as error:
        return str(error) or f"an assertion: {traceback.format_exc()}"
    # Whatever a component raises where nothing was expected to be raised fails its check.
    except BaseException as error:
        return (
            f"the check ended in {type(error).__name__}: {error}\n{traceback.format_exc()[-3000:]}"
        )
    return ""


if __name__ == "__main__":
    main()
