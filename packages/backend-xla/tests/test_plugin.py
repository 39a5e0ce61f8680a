"""The plugin of stratagem-backend-xla: light, and complete in its specs."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.metadata import distribution

import pytest

from stratagem.discovery import AcceleratorSpec, StrategySpec
from stratagem.errors import ConfigurationError

# entry point: plugin module
PLUGINS = {"xla": "stratagem_xla.plugin"}
SPECS = importlib.import_module("stratagem_xla.plugin").stratagem_components()


def test_the_distribution_declares_its_plugin_modules() -> None:
    declared = distribution("stratagem-backend-xla").entry_points
    entry_points = declared.select(group="stratagem.backends")
    assert {entry.name: entry.value for entry in entry_points} == PLUGINS


@pytest.mark.parametrize("then", ["", "stratagem_doctor", "stratagem_components"])
def test_neither_torch_nor_torch_xla_is_imported(then: str) -> None:
    code = (
        "import sys, stratagem_xla.plugin as plugin\n"
        f"list(getattr(plugin, {then!r}, tuple)())\n"
        "import stratagem_xla.installation as installation\n"
        "installation.availability()\n"
        "sys.exit(str({'torch', 'torch_xla'} & set(sys.modules) or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


def test_xla_specs_agree_with_the_readme() -> None:
    accelerators = {s.name: s.aliases for s in SPECS if isinstance(s, AcceleratorSpec)}
    strategies = {s.name: (s.class_name, s.aliases) for s in SPECS if isinstance(s, StrategySpec)}
    assert accelerators == {"tpu": ("xla",)}
    assert strategies == {
        "xla": ("XLAStrategy", ("tpu_spawn",)),
        "xla_debug": ("XLAStrategy", ()),
        "xla_fsdp": ("XLAFSDPStrategy", ()),
        "single_xla": ("SingleXLAStrategy", ()),
    }


@pytest.mark.parametrize("spec", [s for s in SPECS if isinstance(s, StrategySpec)])
def test_a_class_has_the_capabilities_of_its_spec(spec: StrategySpec) -> None:
    assert spec.build().capabilities is spec.capabilities


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("accelerators", "XLAAccelerator"),
        ("strategies", "XLAStrategy"),
        ("strategies", "XLAFSDPStrategy"),
        ("strategies", "SingleXLAStrategy"),
    ],
)
def test_a_class_has_its_import_name_in_core(module: str, name: str) -> None:
    found = getattr(importlib.import_module(f"stratagem.{module}"), name)
    assert found.__module__.startswith("stratagem_xla.")


def test_activation_checkpointing_is_refused() -> None:
    from stratagem_xla.strategy import SingleXLAStrategy

    with pytest.raises(ConfigurationError, match="activation_checkpointing=True: the XLA compiler"):
        SingleXLAStrategy().check_activation_checkpointing(True)
