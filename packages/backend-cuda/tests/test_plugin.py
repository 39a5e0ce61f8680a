"""The plugin of stratagem-backend-cuda: light, and promising only what it has."""

import importlib
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

from stratagem import Trainer
from stratagem.discovery import AcceleratorSpec, PrecisionSpec
from stratagem.discovery.registry import Candidate
from stratagem.errors import UnknownNameError
from stratagem_extras.commands import doctor

# entry point: plugin module
PLUGINS = {"cuda": "stratagem_cuda.plugin"}


def test_the_distribution_declares_its_plugin_modules() -> None:
    declared = distribution("stratagem-backend-cuda").entry_points
    entry_points = declared.select(group="stratagem.backends")
    assert {entry.name: entry.value for entry in entry_points} == PLUGINS


@pytest.mark.parametrize("module", [*PLUGINS.values(), "stratagem_cuda.precision.objections"])
def test_importing_the_plugin_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch is imported' if 'torch' in sys.modules else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_plugin_registers_the_names_of_its_readme() -> None:
    (module,) = PLUGINS.values()
    specs = importlib.import_module(module).stratagem_components()
    assert {(spec.kind, spec.name, spec.aliases) for spec in specs} == {
        ("accelerator", "cuda", ("gpu", "rocm")),
        ("precision", "16-mixed", ("16",)),
        *(
            ("precision", name, ())
            for name in (
                *("float8", "mxfp8", "transformer-engine", "transformer-engine-float16"),
                *("nf4", "nf4-dq", "fp4", "fp4-dq", "int8", "int8-training"),
            )
        ),
    }
    assert [spec.load().name for spec in specs if spec.kind == "accelerator"] == ["cuda"]
    for spec in specs:
        if isinstance(spec, AcceleratorSpec):
            assert spec.load().data_parallel_kernels == spec.data_parallel_kernels
    precisions = {spec.name: spec.build() for spec in specs if spec.kind == "precision"}
    for spec in specs:
        if isinstance(spec, PrecisionSpec):
            assert precisions[spec.name].name == spec.name
            assert precisions[spec.name].shardable == spec.shardable
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    assert all(f"`{name}`" in readme for name in precisions)


def test_precisions_are_served_by_their_names() -> None:
    from stratagem import precision
    from stratagem_cuda import precision as ours

    for name in dir(ours):
        assert getattr(precision, name) is getattr(ours, name)
    with pytest.raises(AttributeError, match="has no attribute 'Float4'"):
        _ = ours.Float4


def test_unknown_precision_lists_the_known_ones() -> None:
    with pytest.raises(UnknownNameError) as caught:
        Trainer(accelerator="cpu", precision="float4", logger=False)
    assert "unknown precision 'float4'" in str(caught.value)
    for known in (
        "float8",
        "mxfp8",
        "nf4",
        "transformer-engine",
        "16-mixed",
        "bf16-mixed",
        "32-true",
    ):
        assert known in str(caught.value)


def test_doctor_says_of_a_precision_whether_its_library_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    versions = {"torchao": "0.18.0", "bitsandbytes": "0.40.0"}
    monkeypatch.setattr(doctor, "version_of", versions.get)
    (module,) = PLUGINS.values()
    here = {
        spec.name: doctor.listed_component(
            Candidate(spec, "stratagem-backend-cuda", "0.1.0"), {}
        ).here
        for spec in importlib.import_module(module).stratagem_components()
        if spec.kind == "precision"
    }
    assert here["16-mixed"] == ""
    assert here["float8"] == "torchao 0.18.0"
    assert here["nf4"] == "not available: needs bitsandbytes>=0.46,<1, and 0.40.0 is installed"
    assert here["transformer-engine"] == (
        "not available: needs transformer-engine>=2.9,<3, which is not installed"
    )
