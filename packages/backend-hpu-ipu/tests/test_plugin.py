"""The plugins of stratagem-backend-hpu-ipu: light, and promising only what they have."""

import doctest
import importlib
import pkgutil
import subprocess
import sys
from importlib.metadata import distribution

import pytest

import stratagem_hpu_ipu
from stratagem.discovery import StrategySpec

# entry point: plugin module
PLUGINS = {"hpu": "stratagem_hpu_ipu.hpu_plugin", "ipu": "stratagem_hpu_ipu.ipu_plugin"}
NAMES = {
    "hpu": {("accelerator", "hpu"), ("strategy", "hpu_single"), ("strategy", "hpu_parallel")},
    "ipu": {("accelerator", "ipu"), ("strategy", "ipu_strategy")},
}


def test_the_distribution_declares_its_plugin_modules() -> None:
    declared = distribution("stratagem-backend-hpu-ipu").entry_points
    entry_points = declared.select(group="stratagem.backends")
    assert {entry.name: entry.value for entry in entry_points} == PLUGINS


@pytest.mark.parametrize("module", PLUGINS.values())
def test_importing_the_plugin_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch is imported' if 'torch' in sys.modules else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", PLUGINS)
def test_plugin_registers_the_names_of_its_readme(name: str) -> None:
    specs = importlib.import_module(PLUGINS[name]).stratagem_components()
    assert {(spec.kind, spec.name) for spec in specs} == NAMES[name]
    for spec in specs:
        found = spec.load()
        if isinstance(spec, StrategySpec):
            assert found.capabilities is spec.capabilities
        else:
            assert (found.name, found.requires_dedicated_strategies) == (
                spec.name,
                spec.requires_dedicated_strategies,
            )


@pytest.mark.parametrize("name", PLUGINS)
def test_other_devices_strategies_are_left_to_others(name: str) -> None:
    choose = importlib.import_module(PLUGINS[name]).stratagem_choose_strategy
    assert choose(candidates=("single_device", "ddp")) is None


MODULES = sorted(module.name for module in pkgutil.iter_modules(stratagem_hpu_ipu.__path__))


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples_pass(module: str) -> None:
    imported = importlib.import_module(f"stratagem_hpu_ipu.{module}")
    assert doctest.testmod(imported).failed == 0
