"""Each of the five wheels, built and installed alone in an empty environment, works.

An environment starts with no package at all, not even pip (the pip that runs the tests installs
into it). What a wheel must bring along by its own metadata is therefore really missing until the
wheel is installed. The one exception is torch with its dependencies, hundreds of megabytes: it is
installed once, into an environment of its own, which the five environments see through a .pth file.
"""

import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [pytest.mark.wheels, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[1]
TORCH = "torch==2.13.0"
IMPORT_NAMES = {
    "stratagem-core": "stratagem",
    "stratagem-backend-cuda": "stratagem_cuda",
    "stratagem-backend-deepspeed": "stratagem_deepspeed",
    "stratagem-backend-xla": "stratagem_xla",
    "stratagem-backend-hpu-ipu": "stratagem_hpu_ipu",
}
TIMEOUT = 300  # seconds, for any one command


def run(*command: str | Path, cwd: Path) -> str:
    """Run `command` as a user's shell would, and return its stdout; fails with all its output."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
        and not name.startswith("STRATAGEM_")
    }
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class Environment:
    """A virtual environment without pip."""

    folder: Path

    @classmethod
    def create(cls, folder: Path) -> "Environment":
        venv.create(folder, with_pip=False, symlinks=os.name != "nt")
        return cls(folder)

    @property
    def scripts(self) -> Path:
        return self.folder / ("Scripts" if os.name == "nt" else "bin")

    @property
    def site_packages(self) -> Path:
        (found,) = self.folder.glob("lib/python*/site-packages")
        return found

    def python(self, *arguments: str) -> str:
        # -I: neither the working folder nor the user's site-packages can lend a module.
        return run(self.scripts / "python", "-I", *arguments, cwd=self.folder)

    def script(self, name: str, *arguments: str) -> str:
        return run(self.scripts / name, *arguments, cwd=self.folder)

    def pip(self, *arguments: str | Path) -> str:
        interpreter = self.scripts / "python"
        return run(
            sys.executable, "-m", "pip", "--python", interpreter, *arguments, cwd=self.folder
        )


@pytest.fixture(scope="session")
def wheelhouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the five wheels, built from copies so that the source tree stays clean."""
    sources = tmp_path_factory.mktemp("sources")
    wheels = tmp_path_factory.mktemp("wheels")
    for package in sorted((ROOT / "packages").iterdir()):
        copy = sources / package.name
        shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__", "dist"))
        build = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
        run(*build, "--outdir", wheels, copy, cwd=sources)
    return wheels


@pytest.fixture(scope="session")
def torch_environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment that holds torch, what torch needs, and nothing else."""
    environment = Environment.create(tmp_path_factory.mktemp("torch"))
    environment.pip("install", "--quiet", TORCH)
    return environment


@pytest.fixture(scope="session", params=IMPORT_NAMES)
def installed(
    request: pytest.FixtureRequest,
    wheelhouse: Path,
    torch_environment: Environment,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, Environment]:
    """A distribution's name, and the environment in which only it was asked for."""
    name: str = request.param
    (wheel,) = wheelhouse.glob(f"{name.replace('-', '_')}-*.whl")
    environment = Environment.create(tmp_path_factory.mktemp(name))
    pointer = environment.site_packages / "torch_from_its_own_environment.pth"
    pointer.write_text(f"{torch_environment.site_packages}\n")
    environment.pip("install", "--quiet", "--find-links", wheelhouse, wheel)
    return name, environment


def test_there_is_one_wheel_for_each_distribution(wheelhouse: Path) -> None:
    built = sorted(path.name.partition("-")[0] for path in wheelhouse.iterdir())
    assert built == sorted(name.replace("-", "_") for name in IMPORT_NAMES)


def test_what_is_installed_is_complete_and_compatible(installed: tuple[str, Environment]) -> None:
    name, environment = installed
    assert "No broken requirements found" in environment.pip("check")
    expected = {name, "stratagem-core"}
    listed = environment.pip("list", "--format=freeze").splitlines()
    ours = {line.partition("==")[0] for line in listed if line.startswith("stratagem")}
    assert ours == expected


def test_the_package_imports_typed_and_licensed(installed: tuple[str, Environment]) -> None:
    name, environment = installed
    package = IMPORT_NAMES[name]
    code = (
        f"import {package}, pathlib; from importlib.metadata import distribution\n"
        f"assert pathlib.Path({package}.__file__).with_name('py.typed').is_file()\n"
        f"files = [path.name for path in distribution({name!r}).files]\n"
        "assert 'LICENSE' in files, files\n"
    )
    environment.python("-c", code)


def test_import_stratagem_does_not_import_torch(installed: tuple[str, Environment]) -> None:
    _, environment = installed
    code = "import sys, stratagem; print('torch' in sys.modules)"
    assert environment.python("-c", code).strip() == "False"


def test_torch_is_there_for_the_one_who_uses_it(installed: tuple[str, Environment]) -> None:
    _, environment = installed
    # numpy is optional to torch, which says so by a warning when it is missing.
    version = environment.python("-W", "ignore", "-c", "import torch; print(torch.__version__)")
    assert version.partition("+")[0].strip() == TORCH.partition("==")[2]


def test_the_command_says_how_it_is_used(installed: tuple[str, Environment]) -> None:
    _, environment = installed
    assert "strategies" in environment.script("stratagem", "--help")


def test_the_command_lists_the_strategies(installed: tuple[str, Environment]) -> None:
    _, environment = installed
    assert "single_device" in environment.script("stratagem", "strategies")
