"""Bench: what a check has at hand, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from stratagem.lite import Lite
from stratagem_testing.child import Child, Report
from stratagem_testing.components.component import Component
from stratagem_testing.processes import clean_environment

Result = TypeVar("Result")


class Bench:
    """A check's view of a component.

    The process is a fork that ends with the check: changes by the check stay in this fork.

    Args:
        component: the component under test.
        folder: an empty folder for the check, which is the current folder.
    """

    def __init__(self, component: Component, folder: Path) -> None:
        self.component = component
        self.folder = folder

    def option(self, name: str) -> Any:
        """Return an option of the kit's class."""
        return self.component.options[name]

    def make(self) -> Any:
        """Return a new component."""
        return self.component.make()

    def lite(self, **options: Any) -> Lite:
        """Return a Lite on one CPU process where nothing else is said."""
        return Lite(**{"accelerator": "cpu", "strategy": "single_device", "devices": 1, **options})

    def error(self, action: Callable[[], Any], *kinds: type[Exception]) -> Exception | None:
        """Return the error of an action, of the given kinds (any kind by default).

        None: it ends with none.
        """
        try:
            action()
        except Exception as error:
            if kinds and not isinstance(error, kinds):
                raise
            return error
        return None

    def files(self) -> list[str]:
        """Return the names of all files and folders in the check's folder, at any depth."""
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*"))

    @contextmanager
    def environ(self, variables: Mapping[str, str]) -> Iterator[None]:
        """Have other environment variables in addition."""
        before = dict(os.environ)
        os.environ.update(variables)
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)

    def in_child(
        self, function: Callable[[Report], None], environ: Mapping[str, str] | None = None
    ) -> Child:
        """Run a function in a fork of this process; see `Child`."""
        with (self.folder.parent / "children.log").open("ab") as log:
            return Child(function, log, dict(environ or {}))

    def python(
        self,
        *arguments: str,
        environ: Mapping[str, str] | None = None,
        timeout: float = 50.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a new Python in the check's folder."""
        return subprocess.run(
            [sys.executable, *arguments],
            env={**clean_environment(self.component.search_path), **(environ or {})},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )


def brief(error: BaseException | None) -> str:
    """Return class and text of an error for a message."""
    return "no error" if error is None else f"{type(error).__name__}: {error}"
