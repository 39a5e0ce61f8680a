"""The plugin of stratagem-backend-deepspeed: light, and what it registers."""

import importlib
import subprocess
import sys
from importlib.metadata import distribution

import pytest

# entry point: plugin module
PLUGINS = {"deepspeed": "stratagem_deepspeed.plugin"}
NAMES = {
    "deepspeed",
    "deepspeed_stage_1",
    "deepspeed_stage_2",
    "deepspeed_stage_3",
    "deepspeed_stage_1_offload",
    "deepspeed_stage_2_offload",
    "deepspeed_stage_3_offload",
    "deepspeed_stage_3_offload_nvme",
}


def output_of(code: str) -> list[str]:
    """Return the words that a program of its own prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split()


def test_the_distribution_declares_its_plugin_modules() -> None:
    declared = distribution("stratagem-backend-deepspeed").entry_points
    entry_points = declared.select(group="stratagem.backends")
    assert {entry.name: entry.value for entry in entry_points} == PLUGINS


@pytest.mark.parametrize("module", PLUGINS.values())
def test_importing_the_plugin_does_not_import_torch(module: str) -> None:
    assert output_of(f"import sys, {module}; print('torch' in sys.modules)") == ["False"]


def test_each_name_is_a_spec_of_the_strategy() -> None:
    plugin = importlib.import_module("stratagem_deepspeed.plugin")
    specs = [spec for spec in plugin.stratagem_components() if spec.kind == "strategy"]
    assert {spec.name for spec in specs} == NAMES
    assert {spec.class_name for spec in specs} == {"DeepSpeedStrategy"}


def test_deepspeed_is_not_imported_until_ranks_are_there() -> None:
    imported = output_of(
        "import sys\n"
        "from stratagem import Trainer\n"
        "Trainer(accelerator='cpu', strategy='deepspeed_stage_3', devices=2, logger=False)\n"
        "print('deepspeed' in sys.modules)\n"
    )
    assert imported == ["False"]


def test_engine_compiles_no_kernel_of_unused_optimizers() -> None:
    compiled = output_of(
        "import sys, torch\n"
        "from stratagem_deepspeed.library import import_deepspeed\n"
        "compile = torch.compile\n"
        "import_deepspeed('cpu')\n"
        "from deepspeed.runtime.zero.muon import muon_optimizer, original_muon\n"
        "print('torch._inductor.compile_fx' in sys.modules)\n"
        "print(torch.compile is compile)\n"
        "torch.compiler.set_stance('force_eager')  # without a C++ compiler\n"
        "update = original_muon.zeropower_via_newtonschulz5(torch.ones(2, 3), 3)\n"
        "print(*update.shape)\n"
        "print('torch._inductor.compile_fx' in sys.modules)  # by torch.compile\n"
    )
    assert compiled == ["False", "True", "2", "3", "True"]
