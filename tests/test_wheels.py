"""The wheel of each distribution, built and installed alone in an empty environment, works."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Environment

ROOT = Path(__file__).resolve().parents[1]

pytestmark = [pytest.mark.wheels, pytest.mark.slow]

IMPORT_NAMES = {
    "stratagem-core": "stratagem",
    "stratagem-backend-torch": "stratagem_torch",
    "stratagem-backend-cuda": "stratagem_cuda",
    "stratagem-backend-deepspeed": "stratagem_deepspeed",
    "stratagem-backend-xla": "stratagem_xla",
    "stratagem-backend-hpu-ipu": "stratagem_hpu_ipu",
    "stratagem-backend-mps": "stratagem_mps",
    "stratagem-backend-xpu": "stratagem_xpu",
    "stratagem-mesh": "stratagem_mesh",
    "stratagem-extras": "stratagem_extras",
    "stratagem-lightning": "stratagem_lightning_plugin",
    "stratagem-testing": "stratagem_testing",
    "stratagem": "stratagem",
}
TORCH = {"stratagem-core", "stratagem-backend-torch"}
# What each brings of ours, with itself; the others bring core and the torch backend.
BROUGHT = {
    "stratagem-core": {"stratagem-core"},
    "stratagem-extras": {"stratagem-core", "stratagem-extras"},
    "stratagem-lightning": {"stratagem-lightning", "stratagem-extras", *TORCH},
    "stratagem-testing": {"stratagem-testing", "stratagem-extras", *TORCH},
    "stratagem": {
        *("stratagem", "stratagem-extras", "stratagem-backend-cuda", *TORCH),
        "stratagem-backend-xpu",  # and on macOS, stratagem-backend-mps
    },
}
# Extras of core that bring another distribution: what can then be imported.
EXTRAS = {
    "tensorboard": ("stratagem-extras", "tensorboard"),
    "testing": ("stratagem-testing", "pytest"),
}


@pytest.fixture(scope="session", params=IMPORT_NAMES)
def installed(
    request: pytest.FixtureRequest, wheelhouse: Path, new_environment: Callable[..., Environment]
) -> tuple[str, Environment]:
    """A distribution's name, and the environment in which only it was asked for."""
    name: str = request.param
    return name, new_environment(name, wheel_of(name, wheelhouse))


def wheel_of(name: str, wheelhouse: Path) -> Path:
    (wheel,) = wheelhouse.glob(f"{name.replace('-', '_')}-*.whl")
    return wheel


def test_each_distribution_has_one_wheel(wheelhouse: Path) -> None:
    built = sorted(path.name.partition("-")[0] for path in wheelhouse.iterdir())
    assert built == sorted(name.replace("-", "_") for name in IMPORT_NAMES)


@pytest.mark.parametrize("name", IMPORT_NAMES)
def test_two_builds_are_the_same_bytes(
    build_release: Callable[..., dict[str, bytes]], name: str
) -> None:
    """Whoever builds a release again can tell that it was made of these sources."""
    package = name.removeprefix("stratagem-")  # `stratagem` itself is in a folder of its name
    first = build_release(package, umask=0o022, zone="UTC")
    second = build_release(package, umask=0o077, zone="Asia/Tokyo")
    assert len(first) == 2  # the wheel and the source archive
    assert first == second


def test_installed_wheels_are_complete_and_compatible(installed: tuple[str, Environment]) -> None:
    name, environment = installed
    assert "No broken requirements found" in environment.pip("check")
    expected = BROUGHT.get(name, {name, *TORCH})
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


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_of_core_brings_the_distribution_and_its_library(
    extra: str, wheelhouse: Path, new_environment: Callable[..., Environment]
) -> None:
    distribution, library = EXTRAS[extra]
    core = wheel_of("stratagem-core", wheelhouse)
    environment = new_environment(extra, f"{core}[{extra}]")
    listed = environment.pip("list", "--format=freeze").splitlines()
    assert {distribution, library} <= {line.partition("==")[0] for line in listed}


def test_core_wheel_names_the_missing_extras(
    wheelhouse: Path, new_environment: Callable[..., Environment]
) -> None:
    environment = new_environment("core_alone", wheel_of("stratagem-core", wheelhouse))
    code = (
        "try:\n"
        "    from stratagem.callbacks import LearningRateMonitor\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    assert "pip install stratagem-extras" in environment.python("-c", code)


def test_wheel_environment_has_torch(installed: tuple[str, Environment]) -> None:
    _, environment = installed
    # numpy is optional to torch, which says so by a warning when it is missing.
    version = environment.python("-W", "ignore", "-c", "import torch; print(torch.__version__)")
    assert version.partition("+")[0].strip() == "2.13.0"


def test_stratagem_script_prints_its_help(installed: tuple[str, Environment]) -> None:
    _, environment = installed
    assert "strategies" in environment.script("stratagem", "--help")


def test_the_command_explains_an_error(installed: tuple[str, Environment]) -> None:
    _, environment = installed
    assert "Usual causes of a hang:" in environment.script("stratagem", "errors", "hang")


def test_the_command_lists_the_strategies(installed: tuple[str, Environment]) -> None:
    _, environment = installed
    assert "single_device" in environment.script("stratagem", "strategies")


def test_the_first_lines_of_the_readme_work_in_an_empty_environment(
    environment_with_pip: Environment, tmp_path: Path
) -> None:
    """pip builds each package as for a user; torch alone is there first, for its size."""
    readme = (ROOT / "README.md").read_text()
    lines, script = re.findall(r"^```(?:python)?\n(.+?)^```$", readme, re.MULTILINE | re.DOTALL)[:2]
    for_a_checkout = [line for line in lines.splitlines() if "# once released" not in line]
    assert "pip install ./packages/core " in for_a_checkout[0]
    environment_with_pip.shell("\n".join(for_a_checkout), cwd=ROOT)
    (tmp_path / "script.py").write_text(script)
    said = environment_with_pip.shell("python script.py && stratagem doctor", cwd=tmp_path)
    assert "training ended after 20 epochs" in said
    assert "No problem found." in said
