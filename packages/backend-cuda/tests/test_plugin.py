"""The plugin of stratagem-backend-cuda: light, and promising only what it has."""

import importlib
import subprocess
import sys
from importlib.metadata import distribution

import pytest

# entry point: plugin module
PLUGINS = {"cuda": "stratagem_cuda.plugin"}


def test_the_distribution_declares_its_plugin_modules() -> None:
    declared = distribution("stratagem-backend-cuda").entry_points
    entry_points = declared.select(group="stratagem.backends")
    assert {entry.name: entry.value for entry in entry_points} == PLUGINS


@pytest.mark.parametrize("module", PLUGINS.values())
def test_importing_the_plugin_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch is imported' if 'torch' in sys.modules else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_plugin_registers_what_the_readme_lists() -> None:
    (module,) = PLUGINS.values()
    specs = importlib.import_module(module).stratagem_components()
    assert {(spec.kind, spec.name, spec.aliases) for spec in specs} == {
        ("accelerator", "cuda", ("gpu",)),
        ("precision", "16-mixed", ("16",)),
    }
    assert [spec.load().name for spec in specs if spec.kind == "accelerator"] == ["cuda"]
