"""What importing and listing loads; `benchmarks/import_cost.py` measures how long it takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Each takes from tens to thousands of milliseconds, which a listing of names must not cost.
HEAVY = (
    *("torch", "numpy", "jsonargparse", "click", "rich", "pytest", "importlib_metadata", "fsspec"),
)
# What neither the listing nor a simple requirement needs; `dataclasses` and `pluggy` bring no more.
UNUSED = ("packaging", "importlib.metadata", "email", "socket", "subprocess", "asyncio")

SDKS = ("deepspeed", "torch_xla", "habana_frameworks", "poptorch")
# Commands that are there at once: what they load beyond a bare interpreter counts in milliseconds.
# Each distribution with an accelerator adds its package, its plugin and its probe.
COMMANDS = {"strategies": 136, "explain": 134, "doctor": 148}

PROGRAMS = {
    "import": "import stratagem",
    "list": "import stratagem\nassert 'ddp' in stratagem.StrategyRegistry.available_strategies()",
    "specs": "import stratagem.discovery",
    "resolve": (
        "from stratagem.discovery.registry import get_registry\n"
        "from stratagem.plan.plan import RunRequest\n"
        "from stratagem.plan.resolution import resolve\n"
        "resolve(RunRequest(strategy='ddp', accelerator='cpu', devices=2), get_registry())"
    ),
}


def loaded(code: str, path: Path | None = None) -> set[str]:
    """The modules that a program of its own has loaded at its end."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("STRATAGEM_")}
    if path is not None:
        environ["PYTHONPATH"] = str(path)
    code += "\nimport sys; names = list(sys.modules); import json; print(json.dumps(names))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 200 distributions, each with a plugin that needs this core."""
    folder = tmp_path_factory.mktemp("plugins")
    for number in range(200):
        name = f"plugin_{number}"
        (folder / f"{name}.py").write_text(
            "from stratagem.discovery import StrategySpec, hookimpl\n"
            "@hookimpl\n"
            "def stratagem_components():\n"
            f"    return [StrategySpec(name={name!r}, target='{name}:Strategy', api_version=1)]\n"
        )
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Name: {name}\nVersion: 1.0\nRequires-Dist: stratagem-core<0.2,>=0.1\n"
        )
        (info / "entry_points.txt").write_text(f"[stratagem.backends]\n{name} = {name}\n")
    return folder


def test_front_ends_import_no_further_torch_modules() -> None:
    """torch.compile's modules alone take as long as all of `import torch`."""
    brought = loaded("import torch\nfrom stratagem import Lite, Trainer") - loaded("import torch")
    assert {name for name in brought if name.startswith("torch.")} == set()


@pytest.mark.parametrize("program", PROGRAMS)
def test_import_loads_no_heavy_modules(program: str) -> None:
    assert loaded(PROGRAMS[program]).isdisjoint(HEAVY)


@pytest.mark.parametrize("program", ["import", "list"])
def test_import_loads_no_unused_modules(program: str) -> None:
    before = loaded("")  # whatever this environment loads at its start
    assert (loaded(PROGRAMS[program]) - before).isdisjoint(UNUSED)


def test_importing_the_library_discovers_nothing() -> None:
    assert "stratagem.one_device.plugin" not in loaded("import stratagem")


def test_200_plugins_load_nothing_heavy_either(plugins: Path) -> None:
    code = (
        "import stratagem\n"
        "names = stratagem.StrategyRegistry.available_strategies()\n"
        "assert sum(name.startswith('plugin_') for name in names) == 200"
    )
    modules = loaded(code, plugins)
    assert "plugin_199" in modules
    assert modules.isdisjoint(HEAVY)


def test_the_users_import_names_alone_load_nothing_heavy() -> None:
    names = ("strategies", "accelerators", "precision", "checkpoint", "environments")
    code = "\n".join(f"import stratagem.{name}; dir(stratagem.{name})" for name in names)
    assert loaded(code).isdisjoint(HEAVY)


# -- the commands that list and look, with all distributions installed

COMMAND = """
import sys
from stratagem.cli import main

def refuse(event, arguments):
    if event in {{"subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec", "os.system"}}:
        raise AssertionError(f"{{event}} {{arguments}}")

sys.addaudithook(refuse)
sys.argv = ["stratagem", {name!r}]
assert main() == 0
"""


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_lists_loads_nothing_heavy_and_starts_nothing(name: str) -> None:
    modules = loaded(COMMAND.format(name=name))
    assert modules.isdisjoint({*HEAVY, *SDKS, "pydantic", "importlib.metadata", "email"})
    unneeded = {"platform", "pathlib"} | ({"shutil", "bz2"} if name != "doctor" else set())
    assert (modules - loaded("")).isdisjoint(unneeded)
    assert {"stratagem_deepspeed.plugin", "stratagem_xla.plugin"} <= modules


@pytest.mark.parametrize(("name", "budget"), COMMANDS.items())
def test_a_command_that_lists_loads_few_modules(name: str, budget: int) -> None:
    """Their number, not the time: that one is the machine's (`benchmarks/import_cost.py`)."""
    # A build of torch for CUDA has the driver looked for, by ctypes.
    assert len(loaded(COMMAND.format(name=name)) - loaded("import ctypes")) <= budget
