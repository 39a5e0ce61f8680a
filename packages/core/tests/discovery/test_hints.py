"""What is known of distributions that may not be installed is what their specs say."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from program import Program

from stratagem.discovery import distribution_of, names_by_distribution
from stratagem.discovery.hints import installation_hint, modules_of_import

SCRIPT = Path(__file__).parents[2] / "scripts/known_names.py"
EXTRAS = "stratagem-extras"


def test_known_names_file_agrees_with_the_specs() -> None:
    script = runpy.run_path(str(SCRIPT))
    written = script["as_text"](script["known_names"]())
    assert script["FILE"].read_text() == written, f"run python {SCRIPT}"


def test_hints_agree_with_one_another() -> None:
    for distribution, names in names_by_distribution().items():
        for name in names:
            assert distribution_of(name) == distribution
            assert f"pip install {distribution}" in installation_hint(name)
    assert distribution_of("nothing_known") is None
    assert installation_hint("nothing_known") == ""


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ema", "callback"),
        ("tensorboard", "logger"),
        ("simple", "profiler"),
        ("Tuner", "stratagem"),
        ("LearningRateMonitor", "stratagem.callbacks"),
        ("TensorBoardLogger", "stratagem.loggers"),
        ("TrainerCLI", "stratagem.cli"),
    ],
)
def test_a_name_of_the_extras_is_known_by_its_kind(name: str, kind: str) -> None:
    assert distribution_of(name, kind) == EXTRAS
    assert distribution_of(name, "precision") is None


def test_an_import_name_is_known_by_its_module() -> None:
    assert modules_of_import("TensorBoardLogger") == ["stratagem.loggers"]
    assert modules_of_import("Nothing") == []


# -- without stratagem-extras

NEEDS = " needs stratagem-extras, which is not installed: pip install stratagem-extras."
HINT = f"It{NEEDS}"
WITHOUT = {
    "from stratagem.callbacks import LearningRateMonitor": (
        f"ImportError: 'stratagem.callbacks' has no 'LearningRateMonitor'. {HINT}"
    ),
    "from stratagem.loggers import TensorBoardLogger": (
        f"ImportError: 'stratagem.loggers' has no 'TensorBoardLogger'. {HINT}"
    ),
    "from stratagem.cli import TrainerCLI": (
        f"ImportError: 'stratagem.cli' has no 'TrainerCLI'. {HINT}"
    ),
    "import stratagem; stratagem.Tuner": f"ImportError: 'stratagem' has no 'Tuner'. {HINT}",
    "from stratagem import LearningRateMonitor": (
        "ImportError: 'stratagem' has no 'LearningRateMonitor': import it from stratagem.callbacks"
    ),
    "from stratagem import Trainer; Trainer(logger='tensorboard')": (
        f"UnknownNameError: logger 'tensorboard'{NEEDS} Installed: csv."
    ),
    "from stratagem import Trainer; Trainer(profiler='simple')": (
        f"UnknownNameError: profiler 'simple'{NEEDS} Installed: none."
    ),
    "from stratagem import Trainer; Trainer(callbacks='ema')": (
        f"UnknownNameError: callback 'ema'{NEEDS} Installed: model_checkpoint, progress_bar."
    ),
    "from stratagem import Module; Module().to_onnx('model.onnx')": (
        f"ImportError: 'stratagem.module' has no 'to_onnx'. {HINT}"
    ),
}
# As if the distribution were not installed: neither its metadata nor its package is found.
HIDDEN = """
import stratagem.discovery.entry_points as entry_points
found = entry_points._distributions
entry_points._distributions = lambda *args, **kwargs: (
    each for each in found(*args, **kwargs) if each[0] != "stratagem-extras"
)
import sys
sys.modules["stratagem_extras"] = None
"""


def last_line(code: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": "", **variables},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 1, (done.stdout, done.stderr)
    return done.stderr.strip().splitlines()[-1].removeprefix("stratagem.errors.")


@pytest.mark.parametrize("code", WITHOUT)
def test_missing_extras_fail_in_one_line_with_the_package(code: str) -> None:
    assert last_line(HIDDEN + code) == WITHOUT[code]


@pytest.mark.parametrize("code", WITHOUT)
def test_if_the_extras_are_disabled_the_line_says_so(code: str) -> None:
    line = last_line(code, STRATAGEM_DISABLE_PLUGINS=EXTRAS)
    if "import it from" not in WITHOUT[code]:
        assert (
            f"{EXTRAS} 0.1.0 might provide it but is disabled: disabled by "
            "STRATAGEM_DISABLE_PLUGINS." in line
        )


# -- without stratagem-backend-torch

NEEDS_TORCH = (
    "It needs stratagem-backend-torch, which is not installed: pip install stratagem-backend-torch."
)

RESTARTED = """
import torch
from stratagem import Module, Trainer
from stratagem.environments import PlainEnvironment

class Cluster(PlainEnvironment):
    def run_id(self):
        return "7"

class Net(Module):
    def training_step(self, batch, batch_idx):
        raise AssertionError
    def configure_optimizers(self):
        return None

Trainer(accelerator="cpu", plugins=Cluster(), logger=False).fit(Net(), [1])
"""
COMPARED = """
from types import SimpleNamespace as Fake
from stratagem.trainer.checks import check_divergence_detection
check_divergence_detection(Fake(capabilities=Fake(parameters="same"), world_size=1), None, 1)
check_divergence_detection(Fake(capabilities=Fake(parameters="same"), world_size=2), None, 1)
"""
DESCRIBED = """
import tempfile
from pathlib import Path
from stratagem.checkpoint import describe_checkpoint
folder = Path(tempfile.mkdtemp())
(folder / "manifest.json").write_text("{}")
describe_checkpoint(folder)
"""


@pytest.mark.parametrize(
    ("code", "missing"),
    [
        (RESTARTED, "'stratagem.launch' has no 'Restarts'"),
        (COMPARED, "'stratagem.strategies' has no 'DivergenceCheck'"),
    ],
    ids=["restarts", "detect_divergence"],
)
def test_missing_torch_backend_fails_in_one_line_with_the_package(code: str, missing: str) -> None:
    hidden = HIDDEN.replace("stratagem-extras", "stratagem-backend-torch")
    assert last_line(hidden.replace("stratagem_extras", "stratagem_torch") + code) == (
        f"ImportError: {missing}. {NEEDS_TORCH}"
    )


def test_directory_checkpoint_without_torch_backend_names_the_package() -> None:
    hidden = HIDDEN.replace("stratagem-extras", "stratagem-backend-torch")
    line = last_line(hidden.replace("stratagem_extras", "stratagem_torch") + DESCRIBED)
    assert line.startswith("CheckpointFormatError: '")
    assert line.endswith(
        f"' is a directory: 'stratagem.checkpoint' has no 'describe_directory'. {NEEDS_TORCH}"
    )


# -- distributions that do not fit

PLUGIN = """
from stratagem.discovery import CallbackSpec, NameSpec, hookimpl

@hookimpl
def stratagem_components():
    return [
        CallbackSpec(name="mine", target="{module}:Mine", api_version=1),
        NameSpec(name="stratagem.Sweep", target="{module}:Mine", api_version=1),
    ]

from stratagem.callbacks.callback import Callback

class Mine(Callback):
    pass
"""
RANGE = "stratagem-core>=0.1,<0.2"


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path)


def error_of(program: Program, code: str) -> str:
    done = program.python("-c", code)
    assert done.returncode == 1, (done.stdout, done.stderr)
    return done.stderr.strip().splitlines()[-1].removeprefix("stratagem.errors.")


def test_two_distributions_that_give_one_name_are_both_named(program: Program) -> None:
    for name in ("first-sweep", "second-sweep"):
        module = name.replace("-", "_")
        program.install(name, PLUGIN.format(module=module), requires=RANGE)
    assert error_of(program, "from stratagem import Trainer; Trainer(callbacks=['mine'])") == (
        "AmbiguousNameError: the callback 'mine' is provided by 2 distributions; choose one by "
        "its qualified name: 'first-sweep:mine', 'second-sweep:mine'"
    )
    assert error_of(program, "from stratagem import Sweep") == (
        "ImportError: first-sweep and second-sweep both provide stratagem.Sweep: import it from "
        "one of first_sweep, second_sweep, or uninstall one of them"
    )
    chosen = program.python(
        "-c",
        "from stratagem import Trainer\n"
        "from second_sweep import Mine\n"
        "callbacks = Trainer(callbacks='second-sweep:mine', logger=False).callbacks\n"
        "assert any(type(callback) is Mine for callback in callbacks)",
    )
    assert chosen.returncode == 0, chosen.stderr


def test_plugin_for_another_core_version_names_the_upgrade(program: Program) -> None:
    program.install("next-sweep", PLUGIN.format(module="next_sweep"), requires="stratagem-core>=9")
    program.plugins.remove("stratagem-extras")  # whose callbacks would be listed
    code = "from stratagem import Trainer; Trainer(callbacks='mine')"
    assert error_of(program, code) == (
        "UnknownNameError: unknown callback 'mine'. next-sweep 1.5 is incompatible, and nothing "
        "that it provides is known: requires stratagem-core>=9, but stratagem-core 0.1.0 is "
        "installed: pip install --upgrade next-sweep stratagem-core. Installed: "
        "model_checkpoint, progress_bar."
    )


def test_plugin_with_a_missing_module_advises_a_reinstall(program: Program) -> None:
    plugin = PLUGIN.format(module="half_sweep_package.callback")
    program.install("half-sweep", plugin, requires=RANGE)
    program.folder.joinpath("half_sweep_package").mkdir()
    program.folder.joinpath("half_sweep_package/__init__.py").touch()
    remedy = "pip install --force-reinstall --no-deps half-sweep"
    for code in (
        "from stratagem import Sweep",
        "from stratagem import Trainer; Trainer(callbacks='mine')",
    ):
        line = error_of(program, code)
        assert "No module named 'half_sweep_package.callback'" in line
        assert line.endswith(f"half-sweep is only partly installed: {remedy}")
