"""DDP's options: the numbers of plain DDP where they promise them, and clear refusals."""

from __future__ import annotations

import json
import pickle
import subprocess
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import run_file
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)

from stratagem import Lite, StrategyRegistry, Trainer
from stratagem.discovery.registry import get_registry
from stratagem.errors import ConfigurationError
from stratagem.strategies import DDPShardedStrategy, DDPStrategy

SCRIPTS = Path(__file__).parents[1] / "scripts"

RunScript = Callable[..., "subprocess.CompletedProcess[str]"]

SCRIPT = (SCRIPTS / "ddp_options.py").read_text()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the two ranks of the script found; they agree."""

    folder = tmp_path_factory.mktemp("options")
    (folder / "script.py").write_text(SCRIPT)
    run_file(folder / "script.py", folder=folder)
    first, second = (json.loads((folder / f"out{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    return first  # type: ignore[no-any-return]


def test_options_of_speed_change_no_number(results: dict[str, Any]) -> None:
    for name, distance in results["equal"].items():
        assert distance < 1e-6, name
    assert len(results["equal"]) == 8


def test_without_broadcasts_each_rank_keeps_its_own_buffers(results: dict[str, Any]) -> None:
    assert results["buffers differ"] is True


def test_compressing_hooks_train_nearly_alike(results: dict[str, Any]) -> None:
    close = results["close"]
    assert 0 < close["fp16"] < 5e-3
    assert 0 < close["powerSGD"] < 0.2
    assert 0 < close["wrapped"] < 0.2
    assert close["wrapped"] != close["powerSGD"]


def test_a_hooks_state_serves_one_model(results: dict[str, Any]) -> None:
    assert results["another model"] == (
        "ConfigurationError: ddp_comm_state=PowerSGDState(...) belongs to the model that was "
        "prepared before: pass a function that makes one for each model, as in "
        "ddp_comm_state=lambda: PowerSGDState(process_group=None)"
    )
    assert results["a state for each"] == "trained"


def test_post_local_sgd_averages_the_ranks_every_few_steps(results: dict[str, Any]) -> None:
    at_4, at_5, at_6, at_9, at_10, at_13 = results["spreads"]
    # Averaged after the 5th, the 9th and the 13th step; before the 5th, gradients are.
    assert at_4 < 1e-6
    assert at_5 < 1e-6
    assert at_9 < 1e-6
    assert at_13 < 1e-6
    assert at_6 > 1e-4
    assert at_10 > 1e-4
    assert "ConfigurationError" in results["a state without period"]


def test_post_local_sgd_resumes_exactly(results: dict[str, Any]) -> None:
    assert results["resumed"] < 1e-6


def test_unused_parameters_are_named_with_a_remedy(results: dict[str, Any]) -> None:
    error = (
        "UserCodeError: the loss did not depend on every parameter, so DDP still waits for "
        "gradients: unused: spare.weight, spare.bias. Let the loss use them, "
        "freeze them with requires_grad_(False) before training begins, or pass "
        "find_unused_parameters=True, as in strategy='ddp_find_unused_parameters_true' "
        "(static_graph=True costs less, if all steps "
        "leave out the same ones)\nFor an explanation: stratagem errors unused-parameters"
    )
    assert results["unused"] == error
    assert results["lite, unused"] == error
    assert results["unused, found"] == "trained"
    assert results["unused, static"] == "trained"
    assert results["lite"] == "trained"


def test_a_static_graph_that_changes_is_named(results: dict[str, Any]) -> None:
    assert results["static graph that changes"] == (
        "UserCodeError: DDP was told static_graph=True, but this step used other parameters than "
        "the first: unused: spare.weight, spare.bias. Pass find_unused_parameters=True in its "
        "place, as in DDPStrategy(find_unused_parameters=True), or let every step use the same "
        "parameters"
    )


def test_a_gradient_that_comes_twice_is_named(results: dict[str, Any]) -> None:
    assert results["lite, twice"] == (
        "UserCodeError: layer.bias received its gradient twice in one backward: it is used in two "
        "checkpointed segments, or in several forward calls before one backward. Pass "
        "DDPStrategy(static_graph=True), use checkpoint(..., use_reentrant=False), or call forward "
        "once for each backward"
    )


# ---------------------------------------------------------------- names and refusals


@pytest.mark.parametrize(
    ("name", "launcher"),
    [
        ("ddp", "script"),
        ("ddp_spawn", "spawn"),
        ("ddp_fork", "fork"),
        ("ddp_notebook", "fork"),
        ("ddp_sharded", "script"),
        ("ddp_sharded_spawn", "spawn"),
    ],
)
@pytest.mark.parametrize("unused", [None, True, False])
def test_a_name_of_the_family_presets_launcher_and_search(
    name: str, launcher: str, unused: bool | None
) -> None:
    suffix = "" if unused is None else f"_find_unused_parameters_{unused}".lower()
    spec = get_registry().find("strategy", name + suffix).spec
    strategy = spec.build()
    assert type(strategy) is (DDPShardedStrategy if "sharded" in name else DDPStrategy)
    assert strategy.requested.get("launcher", "script") == launcher
    assert strategy.ddp_arguments["find_unused_parameters"] is bool(unused)


@pytest.mark.parametrize(
    ("method", "launcher"),
    [("popen", "script"), ("script", "script"), ("spawn", "spawn"), ("fork", "fork")],
)
def test_a_start_method_is_a_launcher(method: str, launcher: str) -> None:
    assert DDPStrategy(start_method=method).requested["launcher"] == launcher
    assert DDPStrategy(start_method=method, launcher=launcher).requested["launcher"] == launcher


def test_a_strategy_can_be_sent_to_a_spawned_process() -> None:
    strategy = DDPStrategy(
        ddp_comm_hook=post_localSGD_hook,
        ddp_comm_state=PostLocalSGDState(None, None, 4),  # type: ignore[no-untyped-call]
        ddp_comm_wrapper=default_hooks.fp16_compress_wrapper,
        model_averaging_period=4,
        start_method="spawn",
    )
    sent = pickle.loads(pickle.dumps(strategy))
    assert sent.communication_hook.hook is post_localSGD_hook
    assert sent.requested == {"launcher": "spawn"}


def test_a_backend_for_each_kind_of_device_is_one_that_is_there() -> None:
    strategy = DDPStrategy(process_group_backend="cpu:gloo,cuda:gloo")
    lite = Lite(accelerator="cpu", devices=2, strategy=strategy)
    assert lite.strategy is strategy
    strategy = DDPStrategy(process_group_backend="cpu:gloo,cuda:carrier_pigeon")
    with pytest.raises(ConfigurationError, match="is not in this build of torch"):
        Lite(accelerator="cpu", devices=2, strategy=strategy)


def test_sharded_state_and_post_local_sgd_exclude_each_other() -> None:
    with pytest.raises(ConfigurationError) as caught:
        DDPShardedStrategy(
            ddp_comm_hook=post_localSGD_hook,
            ddp_comm_state=PostLocalSGDState(None, None, 4),  # type: ignore[no-untyped-call]
            model_averaging_period=4,
        )
    assert str(caught.value) == (
        "model_averaging_period (post-local SGD) lets ranks step on gradients of their own, and "
        "strategy='ddp_sharded' steps each parameter on one rank: use strategy='ddp'"
    )


def test_a_start_method_that_is_registered_chooses_the_launcher() -> None:
    StrategyRegistry.register("ddp_popen", DDPStrategy, start_method="popen")
    try:
        lite = Lite(accelerator="cpu", devices=2, strategy="ddp_popen")
        assert lite.plan.launcher.name == "script"
    finally:
        StrategyRegistry.remove("ddp_popen")


def test_a_timeout_may_be_a_timedelta() -> None:
    assert DDPStrategy(timeout=timedelta(minutes=2)).timeout == 120.0
    assert DDPStrategy(timeout=30).timeout == 30.0


def hook(state: Any, bucket: Any) -> Any:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            {"start_method": "forkserver"},
            "start_method='forkserver': expected one of 'popen', 'script', 'spawn', 'fork'",
        ),
        (
            {"start_method": "spawn", "launcher": "script"},
            "start_method='spawn' stands for launcher='spawn', received launcher='script' as well: "
            "give one of the two",
        ),
        (
            {"timeout": timedelta(0)},
            "timeout=datetime.timedelta(0): expected seconds or a timedelta, more than 0",
        ),
        (
            {"static_graph": True, "find_unused_parameters": True},
            "static_graph=True and find_unused_parameters=True: a static graph finds its unused "
            "parameters in the first step, so leave find_unused_parameters out",
        ),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb=0: expected MiB, more than 0"),
        (
            {"ddp_comm_hook": "fp16_compress_hook"},
            "ddp_comm_hook='fp16_compress_hook': expected a function, as in "
            "torch.distributed.algorithms.ddp_comm_hooks",
        ),
        (
            {"ddp_comm_wrapper": default_hooks.fp16_compress_wrapper},
            "ddp_comm_state and ddp_comm_wrapper belong to a hook, and there is none: pass "
            "ddp_comm_hook as well",
        ),
        (
            {"ddp_comm_hook": hook, "model_averaging_period": 0},
            "model_averaging_period=0: expected a number of steps of at least 1",
        ),
        (
            {"ddp_comm_hook": hook, "model_averaging_period": 4},
            "model_averaging_period=4 belongs to post-local SGD: pass "
            "ddp_comm_hook=post_localSGD_hook and ddp_comm_state=PostLocalSGDState(...) as well, "
            "or leave it out",
        ),
        (
            {
                "ddp_comm_hook": post_localSGD_hook,
                "ddp_comm_state": PostLocalSGDState(None, None, 4),  # type: ignore[no-untyped-call]
            },
            "ddp_comm_state=PostLocalSGDState(...) lets the models of the ranks drift apart, and "
            "nothing brings them together: pass model_averaging_period",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        DDPStrategy(**arguments)
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(
    "arguments",
    [
        {"ddp_comm_hook": default_hooks.bf16_compress_hook},
        {
            "ddp_comm_hook": default_hooks.allreduce_hook,
            "ddp_comm_wrapper": default_hooks.bf16_compress_wrapper,
        },
    ],
)
def test_a_bf16_hook_is_refused_where_the_backend_cannot(arguments: dict[str, Any]) -> None:
    name = next(f.__name__ for f in arguments.values() if "bf16" in f.__name__)
    with pytest.raises(ConfigurationError) as caught:
        Trainer(accelerator="cpu", devices=2, strategy=DDPStrategy(**arguments), logger=False)
    assert str(caught.value) == (
        f"ddp_comm_hook: torch's {name} needs the process group backend 'nccl' or 'xccl', received "
        f"'gloo': take {name.replace('bf16', 'fp16')}, or an accelerator with such a backend"
    )


def test_a_backend_that_cannot_take_the_devices_tensors_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    strategy = DDPStrategy(process_group_backend="nccl")
    with pytest.raises(ConfigurationError) as caught:
        Lite(accelerator="cpu", devices=2, strategy=strategy)
    assert str(caught.value) == (
        "process_group_backend='nccl' communicates tensors on cuda, and the accelerator 'cpu' has "
        "them on cpu: leave it out to take 'gloo'"
    )


# ---------------------------------------------------------------- dp


def test_dp_on_one_device_warns_and_keeps_the_module() -> None:
    with pytest.warns(FutureWarning, match="strategy='dp' .* is deprecated.* strategy='ddp'"):
        lite = Lite(accelerator="cpu", strategy="dp", devices=1)
    lite.launch()
    net = nn.Linear(2, 1)
    prepared = lite.strategy.prepare(net)
    assert prepared.module is net
    assert lite.world_size == 1


def dp(**arguments: Any) -> Lite:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return Lite(accelerator="cpu", strategy="dp", **arguments)


def test_dp_is_refused_for_several_devices_that_are_no_gpus() -> None:
    with pytest.raises(ConfigurationError) as caught:
        dp(devices=2)
    assert str(caught.value) == (
        "strategy='dp' splits a batch over GPUs, received 2 devices of the accelerator 'cpu': use "
        "strategy='ddp', or devices=1"
    )


def test_dp_gathers_the_outputs_of_replicas() -> None:
    """Only the joining: DataParallel itself needs GPUs, and was never run here."""
    from stratagem_torch.strategies.data_parallel import _DataParallel

    joined = _DataParallel(nn.Identity()).gather(
        [
            {"loss": torch.tensor(1.0), "pair": (torch.tensor(2.0), "a"), "none": None},
            {"loss": torch.tensor(3.0), "pair": (torch.tensor(4.0), "a"), "none": None},
        ],
        torch.device("cpu"),
    )
    assert joined == {"loss": torch.tensor(2.0), "pair": (torch.tensor(3.0), "a"), "none": None}


@pytest.mark.slow
def test_powersgd_over_gloo_works_on_a_model_of_several_buckets(run_script: RunScript) -> None:
    text = """
    import torch
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powerSGD
    from stratagem import Lite
    from stratagem.strategies import DDPStrategy

    def steps(**arguments):
        strategy = DDPStrategy(
            timeout=20,
            ddp_comm_hook=powerSGD.powerSGD_hook,
            ddp_comm_state=lambda: powerSGD.PowerSGDState(None, start_powerSGD_iter=2),
            **arguments,
        )
        lite = Lite(accelerator="cpu", devices=2, strategy=strategy)
        lite.launch()
        # 8 MiB; torch's first bucket takes 1.
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
        model, optimizer = lite.setup(model, torch.optim.SGD(model.parameters(), 0.01))
        for _ in range(6):
            loss = model(torch.ones(2, 512)).square().mean()
            lite.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        lite.print("STEPPED", loss.item())

    steps()
    try:
        steps(bucket_cap_mb=2)
    except ValueError as error:
        print(error)
    """
    finished = run_script(text)
    assert "STEPPED" in finished.stdout
    assert "bucket_cap_mb=2 divides the 8.0 MiB of gradients into several" in finished.stdout
    assert "with which PowerSGD over gloo waits forever: leave bucket_cap_mb out" in finished.stdout
