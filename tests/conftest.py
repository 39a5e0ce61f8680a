"""Fixtures for tests across distributions: wheels, and empty environments to install them in.

An environment starts with no package at all, not even pip (the pip that runs the tests installs
into it). What a wheel must bring along by its own metadata is therefore really missing until the
wheel is installed. The one exception is torch with its dependencies, hundreds of megabytes: it is
installed once, into an environment of its own, which the others see through a .pth file.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# The version that the tests run with, whatever its build.
TORCH = f"torch=={version('torch').partition('+')[0]}"
TIMEOUT = 1200  # seconds, for any one command, such as a whole kit on a busy machine


def run(
    *command: str | Path, cwd: Path, env: Mapping[str, str] | None = None, status: int = 0
) -> str:
    """Run `command` as a user's shell would, and return its stdout.

    Args:
        *command: the program and its arguments.
        cwd: where.
        env: further variables.
        status: what it exits with; at another one this fails, with all that it printed.
    """
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**clean_environment(), **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == status, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def clean_environment() -> dict[str, str]:
    """This process's variables, but for those that lead Python or Stratagem elsewhere."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
        and not name.startswith("STRATAGEM_")
    }


@dataclass(frozen=True)
class Environment:
    """A virtual environment without pip."""

    folder: Path

    @classmethod
    def create(cls, folder: Path, *, with_pip: bool = False) -> Environment:
        venv.create(folder, with_pip=with_pip, symlinks=os.name != "nt")
        return cls(folder)

    @property
    def scripts(self) -> Path:
        return self.folder / ("Scripts" if os.name == "nt" else "bin")

    @property
    def site_packages(self) -> Path:
        (found,) = self.folder.glob("lib/python*/site-packages")
        return found

    def python(self, *arguments: str | Path, env: Mapping[str, str] | None = None) -> str:
        # -I: neither the working folder nor the user's site-packages can lend a module.
        return run(self.scripts / "python", "-I", *arguments, cwd=self.folder, env=env)

    def script(
        self, name: str, *arguments: str, env: Mapping[str, str] | None = None, status: int = 0
    ) -> str:
        return run(self.scripts / name, *arguments, cwd=self.folder, env=env, status=status)

    def see(self, other: Environment) -> None:
        """Let this environment import what another one holds, without a copy."""
        pointer = self.site_packages / "what_another_environment_holds.pth"
        pointer.write_text(f"{other.site_packages}\n")

    def shell(self, program: str, cwd: Path) -> str:
        """Run lines of bash, whose `python` is this environment's; return all that they print."""
        path = f"{self.scripts}{os.pathsep}{os.environ['PATH']}"
        return run("bash", "-e", "-c", f"exec 2>&1\n{program}", cwd=cwd, env={"PATH": path})

    def pip(self, *arguments: str | Path) -> str:
        interpreter = self.scripts / "python"
        return run(
            sys.executable, "-m", "pip", "--python", interpreter, *arguments, cwd=self.folder
        )


@pytest.fixture(scope="session")
def build_wheel(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path, Path], Path]:
    """Build the wheel of a source folder into another folder and return it."""
    sources = tmp_path_factory.mktemp("sources")

    def build(package: Path, wheels: Path) -> Path:
        # So that the source tree stays clean, and two commits of one package can be built.
        copy = Path(tempfile.mkdtemp(dir=sources)) / package.name
        shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__", "dist"))
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
        run(*command, "--outdir", wheels, copy, cwd=sources)
        return max(wheels.glob("*.whl"), key=lambda wheel: wheel.stat().st_mtime_ns)

    return build


@pytest.fixture
def build_release(tmp_path: Path) -> Callable[..., dict[str, bytes]]:
    """Build the wheel and the source archive of a package; return their bytes by file name."""

    def build(package: str, *, umask: int, zone: str) -> dict[str, bytes]:
        source = tmp_path / f"{umask:o}"
        before = os.umask(umask)
        try:
            shutil.copytree(
                ROOT / "packages" / package,
                source,
                ignore=shutil.ignore_patterns("__pycache__", "dist"),
                copy_function=shutil.copyfile,  # without times and rights
            )
            command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", "."]
            run(*command, cwd=source, env={"TZ": zone})
        finally:
            os.umask(before)
        return {path.name: path.read_bytes() for path in (source / "dist").iterdir()}

    return build


@pytest.fixture(scope="session")
def wheelhouse(
    build_wheel: Callable[[Path, Path], Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder with the wheels of all distributions."""
    wheels = tmp_path_factory.mktemp("wheels")
    for package in sorted((ROOT / "packages").iterdir()):
        build_wheel(package, wheels)
    return wheels


@pytest.fixture(scope="session")
def torch_environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment that holds torch, what torch needs, and nothing else."""
    environment = Environment.create(tmp_path_factory.mktemp("torch"))
    environment.pip("install", "--quiet", TORCH)
    return environment


@pytest.fixture
def environment_with_pip(torch_environment: Environment, tmp_path: Path) -> Environment:
    """An environment with pip, as `python -m venv` makes it, that sees torch."""
    environment = Environment.create(tmp_path / "environment", with_pip=True)
    environment.see(torch_environment)
    return environment


@pytest.fixture(scope="session")
def new_environment(
    torch_environment: Environment, wheelhouse: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Environment]:
    """Return an environment that sees torch and into which these wheels were installed."""

    def create(name: str, *wheels: Path | str) -> Environment:
        environment = Environment.create(tmp_path_factory.mktemp(name))
        environment.see(torch_environment)
        environment.pip("install", "--quiet", "--find-links", wheelhouse, *wheels)
        return environment

    return create
