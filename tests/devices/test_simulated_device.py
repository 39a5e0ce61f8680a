"""What only a device does: Lite, the Trainer and ddp on a device that is not the host."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures import run_file

from stratagem_testing.components.check import checks_of
from stratagem_testing.components.component import Component
from stratagem_testing.components.server import Server

HERE = Path(__file__).parent

pytestmark = [pytest.mark.slow]


def built() -> None:
    """Build the simulated device, or skip where there is no compiler."""
    pytest.importorskip("torch.utils.cpp_extension")
    sys.path.insert(0, str(HERE))
    from simulated.build import build, compiler

    sys.path.remove(str(HERE))
    if compiler() is None:
        pytest.skip("no C++ compiler for the simulated device; `nox -s tests` runs it with one")
    build()


def run(script: str, folder: Path, *arguments: str, fails: bool = False) -> str:
    """Run a script where the plugin of this folder is installed; return what it prints."""
    built()
    path = {"PYTHONPATH": str(HERE)}
    expect = int(fails)
    done = run_file(HERE / script, str(folder), *arguments, folder=folder, env=path, expect=expect)
    return done.stderr if fails else done.stdout


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return json.loads(run("one_process.py", tmp_path_factory.mktemp("one")))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("two")
    run("two_ranks.py", folder)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", ["fresh", "with state"])
def test_an_optimizer_from_before_trains_the_model_that_was_moved(one: Any, case: str) -> None:
    assert one[case]["trained"]
    assert one[case]["differ by"] < 1e-6  # from the CPU
    assert one[case]["device"] == "sim:2"


@pytest.mark.parametrize("case", ["fresh", "with state"])
def test_tied_weights_stay_tied_on_a_device(one: Any, case: str) -> None:
    assert one[case]["tied"]


def test_batches_come_on_the_ranks_device(one: Any) -> None:
    assert one["trainer"]["devices"] == ["sim:2"]
    assert one["trainer"]["differ by"] < 1e-6


def test_mixed_precision_autocasts_on_the_device(one: Any) -> None:
    assert one["trainer"]["dtypes"] == [["torch.float32"], ["torch.bfloat16"]]
    assert one["lite's autocast"] == "torch.bfloat16"


def test_mixed_precision_is_refused_where_the_device_has_no_autocast(one: Any) -> None:
    expected = (
        "ConfigurationError: precision='bf16-mixed': the accelerator 'sim' cannot autocast to "
        "bfloat16, so the model would compute in float32: pass precision='32-true', or "
        "'bf16-true' to keep parameters in bfloat16 too"
    )
    assert one["refused"] == one["refused object"] == expected


def test_a_run_with_dropout_resumes_bit_for_bit(one: Any) -> None:
    assert one["resumed"]


@pytest.mark.parametrize("format", ["single_file", "directory", "async"])
def test_lite_resumes_within_an_epoch_bit_for_bit(one: Any, format: str) -> None:
    assert one[f"lite resumes, {format}"]


def test_simulated_device_checkpoints_move_to_the_host_and_back(one: Any) -> None:
    assert one["on the host"] == ["cpu"]
    assert one["to the host"] == [True, "sim:2"]
    assert one["from the host"] == [True, "cpu"]


def test_rng_states_serve_any_index(one: Any) -> None:
    assert one["rng"] == [True, True]


def test_values_of_all_steps_are_logged_and_read_with_the_epochs(one: Any) -> None:
    """100 steps: more than are kept before they are reduced on the device."""
    differ_by, lines = one["logged long"]
    assert differ_by < 1e-5
    assert lines >= 300


def test_no_step_waits_for_the_device(one: Any) -> None:
    """Values are logged at each step and shown, gradients clipped, a scheduler stepped."""
    waits = one["waits"]
    # Between two epochs, of four batches each, epoch values are read.
    within = [step for index, step in enumerate(waits, start=1) if index % 4]
    assert {synchronizations for synchronizations, _, _ in within} == {0}
    # What lies in ordinary memory is copied before the step; on the copying stream, and recorded.
    assert {tuple(rest) for _, *rest in within} == {(2, 2)}
    assert len(one["logged"]) == 1 + 40 + 10


def test_an_evaluation_has_the_buffers_of_rank_0_also_one_that_is_not_contiguous(
    ranks: list[Any],
) -> None:
    assert [rank["turned"] for rank in ranks] == [[[1.0, 1.0]] * 3] * 2


def test_an_optimizer_with_state_trains_shards_in_host_memory(ranks: list[Any]) -> None:
    for rank in ranks:
        offloaded, expected = rank["with state"]
        assert offloaded == pytest.approx(expected, rel=1e-5)


def test_a_tensor_that_is_not_contiguous_is_reduced(ranks: list[Any]) -> None:
    assert [rank["reduced"] for rank in ranks] == 2 * [[[0.0, 6.0], [2.0, 8.0], [4.0, 10.0]]]


@pytest.fixture(scope="module")
def flight(tmp_path_factory: pytest.TempPathFactory) -> Any:
    printed = run("in_flight.py", tmp_path_factory.mktemp("flight"))
    return json.loads(printed.splitlines()[-1])  # after the line that the signal makes


def test_next_batch_is_copied_during_the_step(flight: Any) -> None:
    """Two epochs of six batches, each of two tensors, whose copies end when they are waited for."""
    assert flight["in flight"] == {"before": [2] * 12, "after": [0] * 12, "most": 2}
    assert flight["overlapping"] == 24
    assert flight["same losses"]


def test_memory_of_a_batch_is_not_reused_during_its_step(flight: Any) -> None:
    assert flight["unsafe frees"] == 0


def test_simulated_device_detects_unsafe_copies(flight: Any) -> None:
    found = flight["careless"]
    assert found["whole"] == {"same losses": True, "overlapping": 24, "unsafe frees": 0}
    assert not found["no wait"]["same losses"]
    assert found["no record"]["unsafe frees"] > 0
    assert found["one stream"] == {"same losses": True, "overlapping": 0, "unsafe frees": 0}


def test_a_run_stopped_with_a_batch_in_flight_resumes_exactly(flight: Any) -> None:
    assert flight["stopped"] == {
        "in flight": 2,
        "file": "interrupted-step=9.ckpt",
        "same losses": True,
        "same weights": True,
    }


def test_an_accelerator_says_when_a_process_must_not_be_forked(one: Any) -> None:
    assert one["fork before"] is None
    assert one["fork after"] == (
        "ConfigurationError: the launcher 'fork' copies this process, which has used sim devices "
        "already, and they do not work in a copy: put no tensor there before (no .to('sim'), no "
        "torch.sim.* call that needs a device); restart the notebook's kernel, or use "
        "strategy='ddp' in a script"
    )


def test_an_accelerator_reports_memory_and_waits(one: Any) -> None:
    assert one["stats"]["allocated_bytes"] >= 256 * 257 * 4
    assert one["stats"]["peak_allocated_bytes"] >= one["stats"]["allocated_bytes"]
    assert one["host"] == [False, True]
    assert one["synchronized"] == 1


def test_ddp_on_simulated_devices_equals_ddp_on_the_cpu(ranks: list[Any]) -> None:
    assert [rank["devices"] for rank in ranks] == [["sim:1"], ["sim:3"]]
    for rank in ranks:
        assert rank["group"] == "simgloo"
        assert rank["differ by"] < 1e-6


def test_sync_batchnorm_averages_over_simulated_devices(ranks: list[Any]) -> None:
    for rank in ranks:
        assert rank["synchronized differ by"] < 1e-6
        assert rank["synchronized differs from plain"] > 1e-3


def test_ddp_with_dropout_resumes_bit_for_bit(ranks: list[Any]) -> None:
    assert all(rank["resumed"] for rank in ranks)
    assert all(rank["mixed"] == ["torch.bfloat16"] for rank in ranks)


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("waiting")
    run("waiting.py", folder)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_no_step_of_several_ranks_waits_for_a_device(
    waiting: list[Any], strategy: str, accumulate: int
) -> None:
    """With all that the Trainer does beside a step: log, show, clip, schedule, look for signals."""
    for rank in waiting:
        waits = rank[f"{strategy}, {accumulate}"]
        # Between epochs, of six batches each, epoch values are read and a checkpoint is saved. In
        # the first two steps DDP arranges its buckets.
        within = [count for index, count in enumerate(waits, start=1) if index % 6 and index > 2]
        assert set(within) == {0}


def test_fsdp_on_simulated_devices_equals_ddp_on_the_cpu(waiting: list[Any]) -> None:
    for rank in waiting:
        ours, reference = rank["losses"]
        assert ours == pytest.approx(reference, abs=1e-6)


def test_out_of_memory_on_one_rank_is_explained_and_ends_all_ranks(tmp_path: Path) -> None:
    error = run("failing.py", tmp_path, "full", "1", "3", fails=True)
    assert "OutOfMemoryError: sim out of memory. Tried to allocate 67108864 bytes" in error
    script = HERE / "failing.py"
    line = script.read_text().partition("torch.empty(2**24")[0].count("\n") + 1
    assert f"rank 1 of 2 (sim:3), at {script}:{line} in training_step, is out of memory" in error
    for size, what in (("1.00", "parameters"), ("2.00", "optimizer state"), ("64.00", "more was")):
        assert f"{size} MiB  {what}" in error
    assert "what would fit" in error.lower() or "nothing that is installed here" in error


def test_failed_device_is_named_and_ends_all_ranks(tmp_path: Path) -> None:
    error = run("failing.py", tmp_path, "lost", "1", "3", fails=True)
    assert "AcceleratorError: sim error: device-side assert triggered" in error
    assert "rank 1 of 2 (sim:3), at " in error
    assert "so that a line before this one may be the cause" in error
    # The first error is the one that is shown.
    assert "During handling of the above exception" not in error


# ---------------------------------------------------------------- the kit for accelerators


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    built()
    made = Server(search_path=(str(HERE),))
    yield made
    made.close()


@pytest.mark.conformance
@pytest.mark.parametrize("check", list(checks_of("accelerator")))
def test_its_accelerator_passes_the_kit(check: str, server: Server) -> None:
    options = {"tolerance": 1e-5, "devices": 2}
    component = Component(kind="accelerator", name="sim", options=options, search_path=(str(HERE),))
    assert server.failure(component, check) == ""


def test_scale_batch_size_tries_the_predicted_size(tmp_path: Path) -> None:
    result = json.loads(run("batch_size.py", tmp_path).splitlines()[-1])
    first, predicted, *_ = result["tried"]
    assert (first, predicted) == (2, result["found"])
    assert result["given back"][-1] == len(result["tried"])  # after the last trial
