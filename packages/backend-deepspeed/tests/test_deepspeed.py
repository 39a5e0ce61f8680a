"""DeepSpeed's engines in real processes: the numbers of ddp, and nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fixtures import run_file

HERE = Path(__file__).parent
Ranks = list[dict[str, Any]]

pytestmark = pytest.mark.slow


def launch(name: str, folder: Path, **variables: str) -> tuple[Ranks, str]:
    """Run a script of this folder, which starts its ranks; return what each wrote, and stdout."""
    finished = run_file(HERE / name, folder=folder, env=variables, timeout=280)
    files = sorted(folder.glob("out*.json"))
    return [json.loads(file.read_text()) for file in files], finished.stdout


def difference(values: list[float], expected: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(values, expected, strict=True))


# ---------------------------------------------------------------- the numbers

STAGES = ("stage 0", "stage 1", "stage 2", "stage 3")
OFFLOADED = ("stage 1 offload", "stage 2 offload", "stage 3 offload")
WOULD_BE_DROPPED = (
    "gradients were to be dropped, by zero_grad() or by leaving a step out: a DeepSpeed engine "
    "adds them up until it steps, and has no other way. Leave a batch out before its backward, or "
    "call optimizer.step() after each"
)
RUNS = ("plain", "accumulated and clipped")


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ranks, str]:
    return launch("deepspeed_numbers.py", tmp_path_factory.mktemp("numbers"))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("way", [*STAGES, *OFFLOADED])
def test_deepspeed_losses_of_20_steps_equal_ddp(
    way: str, run: str, numbers: tuple[Ranks, str]
) -> None:
    # Two parameter groups, a scheduler, tied and frozen parameters, odd sizes.
    own, ddp = (numbers[0][0][f"{run}, {each}"] for each in (way, "ddp"))
    assert len(ddp["losses"]) == (20 if run == "plain" else 40)
    assert difference(own["losses"], ddp["losses"]) <= (1e-5 if way in OFFLOADED else 2e-6)


@pytest.mark.parametrize("way", [*STAGES, *OFFLOADED])
def test_deepspeed_evaluation_and_prediction_equal_ddp(
    way: str, numbers: tuple[Ranks, str]
) -> None:
    own, ddp = (numbers[0][0][f"plain, {each}"] for each in (way, "ddp"))
    assert own["val_loss"] == pytest.approx(ddp["val_loss"], abs=1e-6)
    assert own["again"] == pytest.approx(own["val_loss"], abs=1e-6)
    assert difference(own["predicted"], ddp["predicted"]) < 1e-5


def test_engine_restores_torch_and_the_environment(
    numbers: tuple[Ranks, str],
) -> None:
    assert [rank["left over"] for rank in numbers[0]] == [[], []]


def test_deepspeed_prints_no_line_to_stdout(numbers: tuple[Ranks, str]) -> None:
    # torch 2.9's gloo tells there whom it is connected to, in lines of several ranks at once.
    assert [line for line in numbers[1].splitlines() if "connected" not in line] == []


def test_ranks_without_a_batch_follow_the_forward_passes_of_another_rank(tmp_path: Path) -> None:
    ranks, _ = launch("deepspeed_following.py", tmp_path)
    assert len(ranks) == 3
    assert max(rank[way] for rank in ranks for way in rank) < 2e-6


# ---------------------------------------------------------------- what else it does


@pytest.fixture(scope="module")
def behaviour(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return launch("deepspeed_behaviour.py", tmp_path_factory.mktemp("behaviour"))[0]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("way", ["", ", not held", ", optimizer after", ", transposed"])
def test_deepspeed_lite_loop_equals_ddp(stage: int, way: str, behaviour: Ranks) -> None:
    # Three micro-batches a step, with and without no_backward_sync around the first ones.
    assert difference(behaviour[0][f"lite stage {stage}{way}"], behaviour[0]["lite ddp"]) <= 2e-6


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_that_no_step_has_used_are_not_dropped_in_vain(
    stage: int, behaviour: Ranks
) -> None:
    for rank in behaviour:
        assert rank[f"lite stage {stage}, dropped"] == 2 * [WOULD_BE_DROPPED]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_layer_unfrozen_after_setup_is_refused(stage: int, behaviour: Ranks) -> None:
    for rank in behaviour:
        assert rank[f"lite stage {stage}, unfrozen"] == (
            "'0.weight' was unfrozen after its DeepSpeed engine was made, which trains what had "
            "requires_grad=True then: unfreeze it before fit or setup, or take fsdp or ddp"
        )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_layer_frozen_after_setup_is_refused(stage: int, behaviour: Ranks) -> None:
    for rank in behaviour:
        assert rank[f"lite stage {stage}, frozen"] == (
            "'0.weight' was frozen after its DeepSpeed engine was made, whose optimizer would move "
            "it on (Adam's momentum, weight decay): freeze it before fit or setup, set the lr of "
            "its parameter group to 0, or take fsdp or ddp"
        )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_one_optimizer_of_two_models_is_refused(stage: int, behaviour: Ranks) -> None:
    for rank in behaviour:
        assert rank[f"lite stage {stage}, shared"] == (
            "a DeepSpeed engine steps an optimizer whose parameters are all in its model, received "
            "SGD with 2 of 4 parameters of other models: make one optimizer for each model and "
            "call lite.setup(model, optimizer) for each, or set up one module that holds all models"
        )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_that_use_different_parameters_are_refused_by_their_names(
    stage: int, behaviour: Ranks
) -> None:
    for rank in behaviour:
        assert rank[f"lite stage {stage}, routed"].startswith(
            "ranks have gradients of different parameters in one backward (rank 0: "
        )
        for expert in (0, 1):
            assert f"rank {expert}: 'experts.{expert}." in rank[f"lite stage {stage}, routed"]


def test_a_trainer_that_goes_on_with_another_model_frees_the_one_before(behaviour: Ranks) -> None:
    for rank in behaviour:
        assert rank["replaced models alive"] == [False] * 3


def test_init_module_shards_parameters_at_construction(behaviour: Ranks) -> None:
    # A parameter that replaces one of a finished layer is left to setup.
    assert behaviour[0]["whole"] == ["blocks.0.mix"]
    for rank in behaviour:
        for shape, held, elements in rank["sharded"].values():
            assert shape == [0]
            assert held == (elements + 1) // 2


def test_a_model_of_192_mib_is_never_whole_in_a_rank(behaviour: Ranks) -> None:
    for rank in behaviour:
        assert rank["MiB to build whole"] > 180
        # A half is kept; the layer that is being made is whole, and its random numbers.
        assert rank["MiB to build sharded"] < 150
        # Autograd keeps no gathered weight for backward.
        assert rank["MiB to run forward"] < 100


def test_the_optimizer_steps_float32_weights_in_place(behaviour: Ranks) -> None:
    assert all(rank["one copy of float32 weights"] for rank in behaviour)


@pytest.mark.parametrize("what", ["configure_model", "second fit"])
def test_a_model_built_in_shards_trains_as_under_ddp(what: str, behaviour: Ranks) -> None:
    # Beside a layer that was built before, with other numbers on each rank.
    own, ddp = (behaviour[0][f"{what} {name}"] for name in ("deepspeed_stage_3", "ddp"))
    assert difference(own, ddp) <= 2e-6


def test_a_model_built_in_shards_is_evaluated_without_an_optimizer(behaviour: Ranks) -> None:
    own, ddp = (behaviour[0][f"validated {name}"][0] for name in ("deepspeed_stage_3", "ddp"))
    assert own["val_loss"] == pytest.approx(ddp["val_loss"], abs=1e-6)


def test_optimizer_and_scheduler_of_the_config_take_the_place_of_the_modules(
    behaviour: Ranks,
) -> None:
    assert behaviour[0]["class of the config's optimizer"] == "AdamW"
    rates = behaviour[0]["rates"]
    assert rates[0] == 0.0
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(1e-2)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bfloat16_trains_near_float32(precision: str, stage: int, behaviour: Ranks) -> None:
    losses = behaviour[0][f"{precision} {stage}"]
    expected = behaviour[0]["checkpointed 2"]
    assert 0 < difference(losses, expected) < 0.5
    assert behaviour[0][f"{precision} {stage} dtypes"] == ["torch.bfloat16"]


def test_activation_checkpointing_changes_no_number(
    behaviour: Ranks, numbers: tuple[Ranks, str]
) -> None:
    expected = numbers[0][0]["plain, ddp"]["losses"]
    for stage in (2, 3):
        assert difference(behaviour[0][f"checkpointed {stage}"], expected) <= 2e-6


def test_trainers_in_a_row_free_their_engines_and_keep_memory_flat(behaviour: Ranks) -> None:
    for rank in behaviour:
        assert rank["engines alive"] == [False] * 9 + [True]
        assert rank["modules alive"] == [False] * 9
        # Of 6.3M parameters with Adam: an engine of stage 2 holds 75 MiB and more.
        assert max(rank["MiB"][4:]) - max(rank["MiB"][:4]) < 15


# ---------------------------------------------------------------- float16


@pytest.fixture(scope="module")
def float16(tmp_path_factory: pytest.TempPathFactory) -> Any:
    (found,), _ = launch("deepspeed_float16.py", tmp_path_factory.mktemp("float16"))
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
def test_a_step_that_overflows_in_float16_is_left_out_and_not_counted(
    precision: str, stage: int, float16: Any
) -> None:
    steps, rates, scales, weights = zip(*float16[f"{precision}, {stage}"], strict=True)
    assert steps == (1, 1, 2, 2, 3, 4)
    assert rates == (0.005, 0.005, 0.0025, 0.0025, 0.00125, 0.000625)
    assert scales == (1024.0, 512.0, 512.0, 256.0, 256.0, 256.0)
    # Both are names of the engine's float16, and all stages compute the same.
    taken = [weights[batch] for batch in (0, 2, 4, 5)]
    assert taken == [float16["16-mixed, 1"][batch][3] for batch in (0, 2, 4, 5)]


def test_a_run_in_float16_resumes_with_its_scale(float16: Any) -> None:
    assert float16["resumed"] == float16["16-mixed, 2"][3:]


# ---------------------------------------------------------------- a Module's own pieces of a step


def test_deepspeed_hooks_and_averages_equal_ddp_or_are_refused(
    tmp_path: Path,
) -> None:
    for out in launch("deepspeed_hooks.py", tmp_path)[0]:
        for way in ("deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"):
            assert out[way]["steps"] == out["ddp"]["steps"] == 20
            assert difference(out[way]["losses"], out["ddp"]["losses"]) < 1e-4
        for when in ("average", "after"):
            for name in (f"{when} state_dict", f"{when} current_model_state"):
                assert difference(out[f"deepspeed_stage_2 {name}"], out[f"ddp {name}"]) < 1e-4
            average, trained = out[f"ddp {when} state_dict"], out[f"ddp {when} current_model_state"]
            assert difference(average, trained) > 1e-3
        assert out["EMAWeightAveraging"].startswith(
            "EMAWeightAveraging reads the weights after each step, and 'deepspeed_stage_3' takes "
            "them out of the model then: 'net.shift' has no element there. Use a strategy"
        )
        for name in ("LeavesOut", "ComputesAgain"):
            assert out[name] == WOULD_BE_DROPPED
        for name, hook in (
            ("RunsBackward", "backward"),
            ("Clips", "configure_gradient_clipping"),
            ("ClearsItself", "optimizer_zero_grad"),
        ):
            assert out[name] == (
                f"{name} overrides {hook}, and the engine of the strategy 'deepspeed_stage_2' does "
                "that itself, so that it would not be called: leave out one of the two"
            )


def test_loss_weight_gives_the_mean_over_all_tokens_of_a_step(tmp_path: Path) -> None:
    tests = Path(__file__).parents[2] / "backend-torch" / "tests"
    script = tests / "scripts" / "loss_weights.py"
    run_file(script, "deepspeed_stage_2", "2", "2", folder=tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    for name in ("trainer", "step"):
        assert found[name] == pytest.approx(found["reference"], rel=0, abs=1e-6), name
