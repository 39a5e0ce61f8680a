"""The `stratagem` program as a user runs it, beside plugins that a test installs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from fixtures import run_python
from zygote import can_fork

PROGRAM = Path(__file__).parents[1] / "scripts" / "stratagem_program.py"
CORE = "stratagem-core"
TORCH = "stratagem-backend-torch"
GUESTS = ("stratagem-extras", "stratagem-testing")
"""Distributions that add commands."""
GOOD_PLUGIN = """
    from stratagem.discovery import StrategySpec, hookimpl

    @hookimpl
    def stratagem_components():
        return [StrategySpec(name="average", target="stratagem.strategies:Strategy", api_version=1,
                             aliases=("mean",), summary="Averages [often] what it can")]
"""


def row_of(table: str, first: str) -> list[str]:
    """Return the cells of the line that begins with `first`."""
    (line,) = [line for line in table.splitlines() if line.split("  ")[0] == first]
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


class Program:
    """The `stratagem` program in an environment where only chosen plugins are enabled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plugins = [CORE, TORCH, *GUESTS]
        self.variables: dict[str, str] = {}

    def install(self, name: str, code: str, *, requires: str = "") -> Path:
        """Install a distribution with one plugin module, as pip would leave it.

        Returns the folder of its metadata.
        """
        module = name.replace("-", "_")
        self.folder.joinpath(f"{module}.py").write_text(textwrap.dedent(code))
        info = self.folder / f"{module}-1.5.dist-info"
        info.mkdir()
        requirement = f"Requires-Dist: {requires}\n" if requires else ""
        info.joinpath("METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n{requirement}"
        )
        info.joinpath("entry_points.txt").write_text(f"[stratagem.backends]\nplug = {module}\n")
        self.plugins.append(name)
        return info

    def environment(self) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("STRATAGEM_", "TORCHELASTIC_")) and name != "LOCAL_RANK"
        }
        return {
            **kept,
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(self.folder), os.environ.get("PYTHONPATH")])
            ),
            "PYTHONWARNINGS": "error",
            "STRATAGEM_ONLY_PLUGINS": ",".join(self.plugins),
            **self.variables,
        }

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    def __call__(
        self, *arguments: str, code: int = 0, fresh: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a fork that has imported torch, or in a new interpreter."""
        if fresh or not can_fork(self.variables):
            done = self.python("-m", "stratagem", *arguments)
        else:
            environment = self.environment()
            done = run_python(
                ("-W", "error"), PROGRAM, arguments, environment, self.folder, 240, fresh=False
            )
        assert done.returncode == code, (done.stdout, done.stderr)
        return done

    def json(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(self(*arguments, "--json", code=code).stdout)
