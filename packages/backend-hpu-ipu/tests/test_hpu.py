"""hpu_single and hpu_parallel on the simulated device, by a stub of the SDK that enforces states.

Each script runs in processes of its own: a process has one kind of device, under one name.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import run_file

from stratagem import Trainer
from stratagem.errors import ConfigurationError
from stratagem_hpu_ipu import hpu_probe
from stratagem_hpu_ipu.hpu_accelerator import HPUAccelerator
from stratagem_hpu_ipu.hpu_library import load_sdk

HERE = Path(__file__).parent
DEVICES = HERE.parents[2] / "tests" / "devices"


def run(script: str, folder: Path, mode: str) -> str:
    """Run a script with the SDK's stub and the simulated device; return what it prints."""
    _build_the_device()
    path = {"PYTHONPATH": os.pathsep.join(map(str, (HERE / "stubs", DEVICES)))}
    return run_file(HERE / "scripts" / script, str(folder), mode, folder=folder, env=path).stdout


def _build_the_device() -> None:
    spec = importlib.util.spec_from_file_location(
        "build_of_the_simulated_device", DEVICES / "simulated" / "build.py"
    )
    assert spec is not None
    assert spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    if build.compiler() is None:
        pytest.skip("no C++ compiler for the simulated device; `nox -s tests` runs it with one")
    build.build()


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return json.loads(run("hpu_one_process.py", tmp_path_factory.mktemp("one"), "lazy"))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("two")
    run("hpu_two_ranks.py", folder, "cpu")
    run("hpu_two_ranks.py", folder, "hpu")
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_hpu_losses_equal_single_device_on_the_cpu(one: Any) -> None:
    assert one["strategy"] == "hpu_single"
    assert one["devices"] == ["hpu:0"]
    assert one["losses differ by"] < 1e-6


@pytest.mark.slow
def test_graphs_end_after_backward_and_step_and_before_each_evaluation(one: Any) -> None:
    mark = ["mark_step"]
    assert one["calls of two steps"] == mark * 4
    assert one["calls of an accumulated step"] == mark * 3
    assert one["calls of three validation batches"] == mark * 3
    assert one["calls of two steps of Lite"] == mark * 4
    assert one["calls of an evaluation of Lite"] == mark


@pytest.mark.slow
def test_eager_mode_has_no_graphs_to_end(tmp_path: Path) -> None:
    out = json.loads(run("hpu_one_process.py", tmp_path, "eager"))
    assert out["calls"] == []
    assert out["losses differ by"] < 1e-6


@pytest.mark.slow
def test_checkpoints_lie_in_host_memory_and_go_to_the_cpu_and_back(one: Any) -> None:
    assert one["saved on"] == ["cpu"]
    assert one["tied"]
    assert one["resumed"]
    assert one["resumed on the CPU"] < 1e-6
    assert one["resumed from the CPU"] < 1e-6


@pytest.mark.slow
def test_hpu_accelerator_returns_the_values_of_the_sdk(one: Any) -> None:
    assert one["device"] == "hpu"
    assert one["stats"]["limit_bytes"] == 96 * 2**30
    assert 0 < one["stats"]["allocated_bytes"] <= one["stats"]["peak_allocated_bytes"]
    assert one["stats"]["allocations"] == 7
    assert one["synchronized"] == "synchronize"
    assert one["mixed"] == ["torch.bfloat16"]


@pytest.mark.slow
def test_hpu_refuses_unsupported_modes(one: Any) -> None:
    assert one["by index"] == (
        "ConfigurationError: devices=[1] chooses Gaudi devices by index, and they carry none: pass "
        "devices=1, and set HABANA_VISIBLE_MODULES=1 to choose which"
    )
    assert one["other mode"] == (
        "ConfigurationError: HPUAccelerator(lazy_mode=False), but the Gaudi SDK was imported "
        "before, in the other mode: import it later, or set PT_HPU_LAZY_MODE=0 before Python starts"
    )
    assert one["fork"].startswith("has imported the Gaudi SDK already, which does not work in")


@pytest.mark.slow
def test_the_sdk_is_imported_when_the_accelerator_is_set_up(one: Any) -> None:
    assert not one["imported"]


@pytest.mark.slow
def test_two_hccl_ranks_equal_ddp(ranks: list[Any]) -> None:
    for rank in ranks:
        assert (rank["strategy"], rank["group"]) == ("hpu_parallel", "hccl")
        assert rank["losses differ by"] < 1e-6
        assert rank["weights differ by"] < 1e-6
        assert rank["resumed"]


@pytest.mark.slow
def test_the_sdk_knows_the_rank_before_the_process_group_is_made(ranks: list[Any]) -> None:
    for number, rank in enumerate(ranks):
        first, second = rank["first calls"]
        assert first == ["initialize_distributed_hpu", [2, number, number]]
        assert second[0] == "init_process_group"


@pytest.mark.slow
def test_a_step_reduces_gradients_then_ends_its_graphs(ranks: list[Any]) -> None:
    for rank in ranks:
        assert rank["calls of a step"] == ["allreduce", "mark_step", "mark_step"]


@pytest.mark.slow
def test_safe_data_is_sent_with_sizes_of_32_bits(ranks: list[Any]) -> None:
    for rank in ranks:
        assert rank["sizes"] == [["torch.int32", 0]]
        assert rank["gathered"] == [0, 1]


# -- without the SDK, as it is here


@pytest.mark.parametrize("accelerator", ["hpu", HPUAccelerator()], ids=["name", "object"])
@pytest.mark.parametrize("strategy", ["auto", "hpu_parallel"])
def test_without_the_sdk_the_request_is_refused(accelerator: Any, strategy: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        Trainer(accelerator=accelerator, strategy=strategy, devices=2, logger=False)
    assert str(refused.value) == (
        "accelerator='hpu' is not available on this machine: the Gaudi SDK is not installed (no "
        "package habana_frameworks.torch; it comes with its build of torch, see "
        "https://docs.habana.ai); pass accelerator='auto' to take what there is"
    )


def test_missing_gaudi_sdk_is_refused() -> None:
    expected = (
        r"accelerator='hpu' needs the Gaudi SDK, which cannot be imported \(ModuleNotFoundError: "
        r".*\): install the one for this driver"
    )
    with pytest.raises(ConfigurationError, match=expected):
        load_sdk()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"strategy": "fsdp", "devices": 2},
            "accelerator='hpu' takes strategies that were made for it alone, 'hpu_parallel' or "
            "'hpu_single'; received 'fsdp': change one of the two",
        ),
        (
            {"devices": 3},
            "devices=3 asks for hpu device 2, but there are 2 here (2 Gaudi device(s)), counted "
            "from 0: name those, or pass devices=-1 for all",
        ),
        (
            {"strategy": "hpu_single", "devices": 2},
            "the strategy 'hpu_single' uses one device, received devices=2 (2 devices): pass "
            "devices=1, or a strategy for several devices such as 'hpu_parallel'",
        ),
        (
            {"strategy": "hpu_single", "num_nodes": 2},
            "the strategy 'hpu_single' runs on one node, received num_nodes=2: pass num_nodes=1, "
            "or a strategy for several nodes such as 'hpu_parallel'",
        ),
        (
            {"strategy": "hpu_parallel", "accelerator": "cpu", "devices": 2},
            "the strategy 'hpu_parallel' runs on 'hpu', received accelerator='cpu': change one of "
            "the two",
        ),
    ],
)
def test_hpu_refuses_bad_trainer_options(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], expected: str
) -> None:
    monkeypatch.setattr(hpu_probe, "has_sdk", lambda: True)
    monkeypatch.setattr(hpu_probe, "count_devices", lambda *_: 2)
    with pytest.raises(ConfigurationError) as refused:
        Trainer(**{"accelerator": "hpu", **options}, logger=False)
    assert str(refused.value) == expected


def test_a_device_of_another_type_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="expected the device hpu, received cpu"):
        HPUAccelerator().setup_device(torch.device("cpu"))
