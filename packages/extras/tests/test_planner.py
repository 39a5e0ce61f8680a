"""Plans of memory: predictions are what real steps hold, and bad input is refused."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Lite, Module, StrategyRegistry, plan_memory
from stratagem.discovery import Capabilities
from stratagem.errors import ConfigurationError, UnknownNameError
from stratagem.strategies import ParallelStrategy, Recompute, apply_activation_checkpointing
from stratagem_extras.planner import simulation
from stratagem_extras.planner.command import plan
from stratagem_extras.planner.decoder import PlannedDecoder
from stratagem_extras.planner.devices import find_device, parse_size
from stratagem_extras.planner.fake_mode import PlanningMode
from stratagem_extras.planner.meter import MemoryMeter
from stratagem_extras.planner.moments import by_phase, extrapolated
from stratagem_extras.planner.page import write_page
from stratagem_extras.planner.plan import MemoryPlan, PlannedStrategy, Planner
from stratagem_extras.planner.simulation import (
    PlannedMemory,
    SimulatedModel,
    Workload,
    measure_step,
)
from stratagem_extras.planner.training import default_loss

ROOT = Path(__file__).resolve().parents[3]
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("stratagem_deepspeed") is None,
    reason="DeepSpeed is not installed; `nox -s tests` has it",
)


class Net(nn.Module):
    """Layers that are equal, between two that are not."""

    def __init__(self, layers: int = 9, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(10, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )
        self.last = nn.Linear(width, 500)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.last(hidden)  # type: ignore[no-any-return]


def held(model: Any, batch: Any, precision: str = "32-true", micro_batches: int = 1) -> int:
    """Return the bytes of tensors of a real step."""
    lite = Lite(accelerator="cpu", precision=precision)
    lite.launch()
    workload = Workload(
        lambda: batch,
        default_loss,
        lambda module: torch.optim.AdamW(module.parameters()),
        micro_batches,
    )
    phases = measure_step(lite.strategy, workload, model)
    return max(memory.total for memory in phases.values())


def planned(model: Any, batch: Any, strategy: str = "single_device", **options: Any) -> Any:
    """Return the row of one strategy."""
    options = {"device_memory": "1TB", "strategies": [strategy], **options}
    (row,) = plan_memory(model, batch, **options).strategies
    return row


def test_further_micro_batches_add_only_their_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan_of(micro_batches: int) -> Any:
        return planned(
            partial(Net, 12, 256),
            lambda: torch.zeros(64, 10),
            "fsdp",
            devices=4,
            device="H100",
            accumulate_grad_batches=micro_batches,
            activation_checkpointing=True,
        ).memory

    few, many = plan_of(3), plan_of(12)
    monkeypatch.setattr(simulation, "_MICRO_BATCHES", 100)
    assert many.total == plan_of(12).total
    assert many.total - few.total == 9 * 64 * 10 * 4
    assert min(many.parameters, many.gradients, many.optimizer, many.temporary) > 0


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_memory_plan_for_one_device_equals_a_real_step(precision: str, micro_batches: int) -> None:
    batch = torch.zeros(200, 10)
    row = planned(Net, batch, precision=precision, accumulate_grad_batches=micro_batches)
    real = held(Net, batch, precision, micro_batches)
    assert row.how == "simulated"
    assert row.memory.total == pytest.approx(real, rel=0.01)


def test_plan_memory_takes_a_model_or_its_function() -> None:
    model, batch = Net(), torch.zeros(5, 10)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert planned(model, batch).memory == planned(Net, batch).memory
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert "log" not in vars(model)


def test_memory_plan_grows_linearly_with_layers() -> None:
    batch = torch.zeros(50, 10)
    rows = [planned(lambda n=n: Net(n), batch, "fsdp", devices=4) for n in (7, 8, 40)]
    seven, eight, forty = (row.memory.total for row in rows)
    assert forty == pytest.approx(seven + 33 * (eight - seven), rel=0.01)
    assert rows[2].memory.optimizer < planned(lambda: Net(40), batch).memory.optimizer / 3


@pytest.mark.parametrize(
    ("model", "strategies"),
    [
        ("tied", ["fsdp"]),
        pytest.param("tied", ["ddp", "ddp_sharded"], marks=pytest.mark.long),
        pytest.param("tied", ["fsdp_shard_grad_op", "model_parallel"], marks=pytest.mark.long),
        pytest.param("resnet", ["fsdp"], marks=pytest.mark.long),
        pytest.param(
            "tied",
            ["deepspeed_stage_1", "deepspeed_stage_3"],
            marks=[needs_deepspeed, pytest.mark.long],
        ),
        pytest.param(
            "tied",
            ["deepspeed_stage_2", "deepspeed_stage_2_offload"],
            marks=[needs_deepspeed, pytest.mark.long],
        ),
    ],
)
def test_memory_plan_for_two_ranks_equals_a_real_step(model: str, strategies: list[str]) -> None:
    script = ROOT / "benchmarks/planned_memory.py"
    options = ["--models", model, "--precisions", "32-true", "--strategies", *strategies]
    done = subprocess.run(
        [sys.executable, str(script), *options], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    rows = [line.split("|")[3:8] for line in lines if line.startswith(f"| {model}")]
    assert [name.strip() for name, *_ in rows] == strategies
    assert all(0.99 < float(ratio) < 1.01 for *_, ratio in rows), done.stdout


@pytest.mark.long
def test_memory_plans_of_random_models_equal_real_steps(tmp_path: Path) -> None:
    results = tmp_path / "cells.jsonl"
    options = ["--models", "4", "--scale", "0.2", "--strategies", "ddp", "ddp_sharded", "fsdp"]
    script = [sys.executable, str(ROOT / "benchmarks/drawn_memory.py"), "--results", str(results)]
    done = subprocess.run([*script, *options], capture_output=True, text=True, check=True)
    cells = [json.loads(line) for line in results.read_text().splitlines()]
    assert len(cells) == 12
    assert all(0.95 < cell["predicted"] / cell["tensors"] < 1.05 for cell in cells), done.stdout
    assert "tensors: 12 of 12 cells are within 10%" in done.stdout


@pytest.mark.parametrize(("foreach", "temporary"), [(False, 2 * 90_000), (True, 90_000)])
def test_the_rank_with_the_largest_parameter_is_planned(foreach: bool, temporary: int) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(10, 300), nn.Linear(300, 300))

    # Of 93,600 numbers the weight of the second layer is on one rank, and the rest on the other.
    optimizer = partial(torch.optim.AdamW, foreach=foreach)
    memory = planned(
        model, torch.zeros(1, 10), "ddp_sharded", devices=2, optimizer=optimizer
    ).memory
    assert memory.optimizer == pytest.approx(2 * 4 * 90_000, rel=0.001)
    assert memory.temporary == pytest.approx(4 * temporary, rel=0.01)


def test_measured_cells_are_merged_into_the_page(tmp_path: Path) -> None:
    cell = {"model": "lstm", "strategy": "ddp", "precision": "32-true", "checkpointing": False}
    again = {**cell, "checkpointing": True, "model": "vit"}
    page, results = tmp_path / "page.md", tmp_path / "cells.jsonl"
    page.write_text("before\n<!-- figures -->\n<!-- end of figures -->\nafter\n")
    for cells in (
        [{**cell, "predicted": 90, "measured": 100}, {**again, "predicted": 5, "measured": 4}],
        [
            {**cell, "strategy": "fsdp", "why_not": "an error"},
            {**again, "predicted": 4, "measured": 4},
        ],
    ):
        results.write_text("".join(json.dumps(one) + "\n" for one in cells))
        script = [sys.executable, str(ROOT / "benchmarks/planned_memory.py")]
        subprocess.run([*script, "--results", results, "--write", page], check=True)
    assert (
        page.read_text()
        == """before
<!-- figures -->

### 32-true

1 of 1 cells are within 10%, and 1 within 20%.

| strategy | lstm |
|---|---|
| `ddp` | 0.90 |
| `fsdp` | - |

### 32-true, activation checkpointing

1 of 1 cells are within 10%, and 1 within 20%.

| strategy | vit |
|---|---|
| `ddp` | 1.00 |

<!-- end of figures -->
after
"""
    )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(64, 256, 2, batch_first=True, bidirectional=True)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs)[0]  # type: ignore[no-any-return]


@pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call]
    reason="torch was built without oneDNN; `nox -s tests` has it on x86",
)
@pytest.mark.skipif(
    torch.__version__.startswith("2.9."),
    reason="the workspace of this oneDNN is larger by a quarter; `nox -s tests` has a newer one",
)
def test_an_lstm_keeps_a_workspace_for_backward() -> None:
    batch = torch.zeros(16, 200, 64)
    real = held(Recurrent, batch)
    assert planned(Recurrent, batch).memory.total == pytest.approx(real, rel=0.05)


def test_memory_plan_counts_copies_of_gloo_on_the_host_only() -> None:
    options = {"devices": 2, "optimizer": "SGD"}
    batch = torch.zeros(2, 1000)
    on_gpu, on_host = (
        planned(partial(nn.Linear, 1000, 1000), batch, "fsdp", device_memory=size, **options)
        for size in ("1TB", None)
    )
    # A step without the copy holds most where parameters are gathered. Torch before 2.15 copies
    # the bias once more.
    assert on_host.memory.communication - 2 * on_gpu.memory.communication in (0, 4 * 1000)
    assert on_host.memory.total > on_gpu.memory.total


def test_the_script_of_the_page_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs/guides/planning.md").read_text()
    scripts = re.findall(r"^```python\n(.+?)^```$", page, re.MULTILINE | re.DOTALL)
    (script,) = (script for script in scripts if "plan_memory" in script)
    command = [sys.executable, "-W", "error::DeprecationWarning", "-c", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *rows, call = done.stdout.splitlines()
    assert any(row.startswith("ddp True") for row in rows)
    assert call == "Trainer(accelerator='auto', devices=2, strategy='ddp')"


def test_a_step_of_a_module_is_planned_without_a_trainer() -> None:
    class Logs(Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.net(batch).square().mean()
            self.log("loss", loss)
            return {"loss": loss}

        def configure_optimizers(self) -> Any:
            return {"optimizer": torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)}

    memory = planned(Logs, torch.zeros(5, 10)).memory
    assert memory.optimizer == memory.parameters
    adam = planned(Logs, torch.zeros(5, 10), optimizer="adamw").memory
    assert adam.optimizer == pytest.approx(2 * adam.parameters, rel=0.001)
    with pytest.raises(ConfigurationError, match=r"test_planner\.py:\d+: UserCodeError: .*loss="):
        planned(NeedsTrainer, torch.zeros(5, 10))
    own = planned(NeedsTrainer, torch.zeros(5, 10), loss=lambda m, batch: m.net(batch).sum())
    assert own.memory.total > memory.parameters


class NeedsTrainer(Module):
    """Asks for the epoch in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).sum() * self.trainer.current_epoch


def test_seventy_billion_parameters_are_planned_in_little_memory(tmp_path: Path) -> None:
    sizes = "--parameters 70e9 --layers 80 --hidden 8192 --vocabulary 32000 --sequence 4096"
    options = f"{sizes} --devices 8 --device H100 --precision bf16-true --strategy fsdp --json"
    code = (
        "import resource, sys; from stratagem_extras.planner.command import plan\n"
        "print(plan(sys.argv[1:]), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *options.split()],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    text, _, end = done.stdout.rstrip().rpartition("\n")
    exit_code, resident = map(int, end.split())
    assert exit_code == 1  # it does not fit
    result = json.loads(text)
    assert result["parameters"] == pytest.approx(70e9, rel=0.001)
    (row,) = result["strategies"]
    # 2 bytes of each parameter, and twice 2 of AdamW, over 8 ranks.
    assert row["memory"]["optimizer"] == pytest.approx(70e9 * 4 / 8, rel=0.01)
    assert row["memory"]["parameters"] >= 70e9 * 2 / 8
    assert resident * 1024 < 2e9


@pytest.mark.parametrize(
    ("devices", "strategies"),
    [
        (1, ["single_device"]),
        (4, ["ddp", "fsdp"]),
        pytest.param(4, ["deepspeed_stage_1", "deepspeed_stage_3"], marks=needs_deepspeed),
    ],
)
def test_extrapolated_layers_equal_simulated_layers(
    devices: int, strategies: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan() -> list[Any]:
        # An engine has buckets of 1e7 numbers on the host, and 5 layers as many.
        options = {"devices": devices, "precision": "bf16-mixed"}
        rows = plan_memory(
            lambda: Net(30, 512), torch.zeros(50, 10), **options, strategies=strategies
        )
        assert {row.how for row in rows.strategies if row.name[:3] != "ddp"} <= {"simulated"}
        return [row.memory for row in rows.strategies]

    monkeypatch.setattr(simulation, "_BEYOND_BUCKETS", 1)
    some = plan()
    monkeypatch.setattr(SimulatedModel, "_few", lambda model, stack, layers, limits: layers)
    for memory, whole in zip(some, plan(), strict=True):
        assert memory.total == pytest.approx(whole.total, rel=1e-3)
        assert memory.optimizer == pytest.approx(whole.optimizer, rel=1e-3)
        assert (memory.sent, memory.flops) == (whole.sent, whole.flops)


@needs_deepspeed
def test_a_plan_leaves_no_group_to_an_engine_that_runs_afterwards() -> None:
    from stratagem_deepspeed.strategy import DeepSpeedStrategy

    first, second = (
        planned(Net, torch.zeros(5, 10), "deepspeed_stage_1", devices=2) for _ in range(2)
    )
    assert (first.how, second.memory) == ("simulated", first.memory)
    assert DeepSpeedStrategy._group is None


@needs_deepspeed
def test_an_optimizer_that_begins_with_a_state_is_planned_under_an_engine() -> None:
    options: dict[str, Any] = {"devices": 2, "optimizer": torch.optim.Adagrad}
    assert planned(Net, torch.zeros(5, 10), "deepspeed_stage_1", **options).how == "simulated"


@needs_deepspeed
@pytest.mark.parametrize(("parameters", "layers"), [(5e8, 24), (2.4e9, 24)])
def test_an_engine_on_a_gpu_has_the_buckets_of_a_gpu(parameters: float, layers: int) -> None:
    decoder = partial(PlannedDecoder, parameters, layers=layers, hidden=1024, vocabulary=1000)
    tokens = torch.zeros(1, 64, dtype=torch.long)
    options = {"devices": 8, "precision": "bf16-mixed"}
    on_gpu = planned(decoder, tokens, "deepspeed_stage_3", device="A10", **options).memory
    on_cpu = planned(decoder, tokens, "deepspeed_stage_3", device_memory=None, **options).memory
    assert on_cpu.total - on_cpu.optimizer < 0.7e9
    # Up to 1e9 parameters stay gathered on a GPU, and up to 1e7 on the host.
    assert on_gpu.total - on_gpu.optimizer > 2 * min(parameters, 1e9)


def test_an_optimizer_on_a_gpu_steps_all_parameters_at_once() -> None:
    options: dict[str, Any] = {"strategies": ["single_device"]}
    for optimizer, more in (("AdamW", 1), ("SGD", 0), (partial(torch.optim.AdamW, fused=True), 0)):
        options["optimizer"] = optimizer
        on_cpu, on_gpu = (
            one(plan_memory(Net, torch.zeros(5, 10), **options, **where), "single_device")
            for where in ({}, {"device": "A10"})
        )
        assert on_cpu.memory is not None
        assert on_gpu.memory is not None
        # A result for all parameters, where on a processor it is one for the largest.
        whole = more * on_gpu.memory.parameters
        grown = on_gpu.memory.working - on_cpu.memory.working
        assert 0.5 * whole <= grown <= whole


def test_planned_gradients_are_at_most_the_parameters() -> None:
    # Three layers hold most at the beginning of backward, and four at its end.
    decoder = partial(PlannedDecoder, 1e9, layers=24, hidden=1536, vocabulary=32_000)
    tokens = torch.zeros(1, 2048, dtype=torch.long)
    options = {"precision": "bf16-mixed", "activation_checkpointing": True}
    memory = planned(decoder, tokens, "ddp", devices=2, **options).memory
    assert memory.gradients <= memory.parameters
    # Six times 4 bytes of each parameter: one is what AdamW computes all at once on a GPU.
    assert memory.total == pytest.approx(24.0e9, rel=0.01)
    # Autocast's copies of parameters are freed with the gathered parameters.
    assert planned(decoder, tokens, "fsdp", devices=8, **options).memory.working < 1.5e9


class Odd(nn.Module):
    """Needs values in forward."""

    def __init__(self, needs: str) -> None:
        super().__init__()
        self.layer, self.needs = nn.Linear(10, 10), needs

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        if self.needs == "mask":
            return outputs[outputs > 0]
        if self.needs == "equal":
            return outputs if torch.equal(outputs, inputs) else outputs[outputs > 0]
        return outputs[:, : int(outputs.sum().item())]


def test_a_model_that_needs_values_is_planned_without_them_and_the_plan_says_so() -> None:
    options = {"devices": 2, "device": "A10", "strategies": ["fsdp"]}
    masked = plan_memory(lambda: Odd("mask"), torch.zeros(4, 10), **options)
    assert masked.strategies[0].how == "computed"
    assert masked.strategies[0].on_device == 4 * 110 * 4 // 2 + 4  # and Adam's count of steps
    assert re.search(r"not counted, since values are needed: .*:\d+: Dyn", masked.notes[0])
    reads = plan_memory(lambda: Odd("item"), torch.zeros(4, 10), **options)
    assert reads.strategies[0].how == "simulated"
    assert re.search(r"test_planner\.py:\d+ reads a value of a tensor: 1 here", reads.notes[0])
    compares = plan_memory(lambda: Odd("equal"), torch.zeros(4, 10), **options)
    assert re.search(r"test_planner\.py:\d+ reads a value", compares.notes[0])
    with pytest.raises(ConfigurationError, match='missing the required "forward" function'):
        plan_memory(lambda: nn.ModuleList([nn.Linear(10, 10)]), torch.zeros(4, 10))
    with pytest.raises(ConfigurationError, match="no parameter with requires_grad=True"):
        plan_memory(lambda: Odd("mask").requires_grad_(False), torch.zeros(4, 10))


class ByNumpy(torch.optim.Optimizer):
    """Keeps three numbers for each weight, which it gets from NumPy."""

    def __init__(self, params: Any, rate: float = 0.1) -> None:
        super().__init__(params, {"rate": rate})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # takes no loss
        for weight in self.param_groups[0]["params"]:
            if weight.grad is not None:
                gradient = torch.from_numpy(weight.grad.numpy().copy())
                self.state[weight] = {"three": gradient.repeat(3, *([1] * gradient.dim()))}


@torch.library.custom_op("test_planner::twice", mutates_args=())
def twice(values: Tensor) -> Tensor:
    return torch.from_numpy(values.detach().numpy() * 2)


class WithKernel(Net):
    """Runs an operation that is not known for fake tensors."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(twice(inputs))


def test_memory_plan_notes_parts_that_need_real_values() -> None:
    options: dict[str, Any] = {"devices": 2, "device": "A10", "strategies": ["fsdp", "ddp"]}
    plan = plan_memory(Net, torch.zeros(4, 10), **options, optimizer=ByNumpy)
    rows = {row.name: row for row in plan.strategies}
    assert rows["fsdp"].how == "simulated"
    weights = sum(p.numel() for p in Net().parameters())
    assert rows["ddp"].memory.optimizer == 3 * 4 * weights
    assert rows["fsdp"].memory.optimizer == pytest.approx(3 * 4 * weights / 2, rel=0.01)
    assert re.match(r"the state of the optimizer was measured .*:\d+: RuntimeError", plan.notes[0])
    kernel = plan_memory(WithKernel, torch.zeros(4, 10), **options)
    assert {row.how for row in kernel.strategies} == {"computed"}
    assert re.search(r"not counted, .*\n?.*register_fake", kernel.notes[0])
    both = plan_memory(WithKernel, torch.zeros(4, 10), **options, optimizer=ByNumpy)
    assert len(both.notes) == 2
    assert both.strategies[0].memory.optimizer > 0


def test_gathered_parameters_of_an_offloaded_model_are_on_the_device() -> None:
    options = {"devices": 2, "device": "A10"}
    whole = planned(Net, torch.zeros(5, 10), "fsdp", **options)
    offloaded = planned(Net, torch.zeros(5, 10), "fsdp_cpu_offload", **options)
    gathered = whole.memory.parameters - whole.memory.optimizer // 2
    assert offloaded.on_device >= gathered > 0
    assert offloaded.on_host == pytest.approx(4 * whole.memory.optimizer // 2, rel=0.1)
    # A CPU offloads to itself.
    same = planned(Net, torch.zeros(5, 10), "fsdp_cpu_offload", devices=2, device_memory=None)
    assert (same.on_host, same.on_device) == (0, same.memory.total)


def test_memory_plan_prints_the_trainer_call() -> None:
    batch = torch.zeros(5, 10)
    one = 4 * sum(p.numel() for p in Net().parameters())
    whole = plan_memory(Net, batch, devices=4, device="A100-80GB", accumulate_grad_batches=2)
    assert whole.best is not None
    assert whole.best.name == "ddp"
    assert "ddp_spawn" in whole.best.alike
    assert whole.call == (
        "Trainer(accelerator='cuda', devices=4, strategy='ddp', accumulate_grad_batches=2)"
    )
    less = plan_memory(Net, batch, devices=4, device_memory=4 * one, strategies=["ddp", "fsdp"])
    assert less.best is not None
    assert less.best.name == "fsdp"
    assert less.best_doubled is None
    more = plan_memory(Net, batch, devices=4, device_memory=8 * one, strategies=["ddp", "fsdp"])
    assert more.best is not None
    assert more.best_doubled is not None
    assert (more.best.name, more.best_doubled.name) == ("ddp", "fsdp")
    nothing = plan_memory(Net, batch, device_memory=one, strategies=["single_device"])
    assert nothing.best is None
    assert nothing.call == ""


def test_a_plan_leaves_no_hook_and_prints_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    hook = sys.excepthook
    planned(Net, torch.zeros(5, 10), "fsdp", devices=2)
    assert sys.excepthook is hook
    with pytest.raises(ConfigurationError, match="Check that the batch fits"):
        planned(Net, torch.zeros(5, 11))
    assert not caplog.records


def test_a_strategy_that_cannot_be_planned_is_listed_with_its_reason() -> None:
    rows = {
        row.name: row
        for row in plan_memory(Net, torch.zeros(5, 10), devices=2, device_memory="1GB").strategies
    }
    assert rows["model_parallel"].why_not.startswith("tensor_parallel_size=2, but no layer is div")
    assert rows["dp"].why_not == "one process drives all devices, which cannot be simulated"
    tpu = planned(Net, torch.zeros(5, 10), "ddp", devices=2, device="TPU v5e")
    assert tpu.why_not == "a tpu takes strategies that were made for it alone"
    xla = planned(Net, torch.zeros(5, 10), "xla", devices=2, device="A10")
    assert xla.why_not == "runs on tpu, not on cuda"


class Indices(Net):
    """Returns the classes that it has chosen."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs).argmax(-1)


class Reads(nn.Module):
    """Cannot be built without values."""

    def __init__(self) -> None:
        super().__init__()
        self.table = json.loads(Path("nowhere.json").read_text())


def test_plan_memory_refuses_bad_input_with_a_remedy(tmp_path: Path) -> None:
    batch = torch.zeros(5, 10)
    for options, message in (
        ({"devices": 0}, "devices=0: expected a whole number of at least 1"),
        ({"device": "A100"}, "device='A100' is not in the table.*mean A100-40GB or A100-80GB"),
        ({"device_memory": "80 parsec"}, "'80 parsec' is not a size of memory: expected bytes, or"),
        ({"device_memory": -1}, "-1 is not a size"),
        ({"optimizer": "AdamV"}, "optimizer='AdamV': expected a class of torch.optim.*'AdamW'"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            plan_memory(Net, batch, **options)
    with pytest.raises(
        ConfigurationError, match=r"without memory: .*test_planner\.py:\d+: FileNot"
    ):
        plan_memory(Reads, batch)
    with pytest.raises(
        ConfigurationError, match=r"without values: .*test_planner\.py:\d+: .*Check"
    ):
        plan_memory(Net, torch.zeros(5, 11))
    with pytest.raises(ConfigurationError, match=r"returned int with no tensor, .*pass loss="):
        default_loss(nn.Identity(), {"input": 3})
    with pytest.raises(ConfigurationError, match=r"from which gradients flow back, only .*int64"):
        plan_memory(Indices, batch)
    with pytest.raises(ConfigurationError, match=r"LBFGS runs the .*'SGD', and .* 200 times the"):
        plan_memory(Net, batch, optimizer="LBFGS")
    with pytest.raises(ConfigurationError, match=r"batch=DataLoader: expected a loader with a"):
        plan_memory(Net, DataLoader(TensorDataset(torch.zeros(0, 10))))
    with pytest.raises(UnknownNameError, match="fsdb"):
        plan_memory(Net, batch, strategies=["fsdb"])


def test_the_first_batch_of_a_loader_is_planned() -> None:
    loader = DataLoader(TensorDataset(torch.zeros(60, 10)), batch_size=50)
    assert planned(Net, loader).memory == planned(Net, [torch.zeros(50, 10)]).memory


def test_working_memory_has_its_parts() -> None:
    batch = torch.zeros(500, 10)
    alone = planned(Net, batch).memory
    assert alone.communication == 0
    assert alone.working == alone.activations + alone.temporary
    assert alone.activations > 9 * 500 * 4 * (64 + 2 * 4 * 64)  # what each layer keeps
    ddp = planned(Net, batch, "ddp", devices=2).memory
    assert ddp.communication == ddp.parameters  # buckets
    fsdp = planned(Net, batch, "fsdp", devices=2).memory
    assert 0 < fsdp.communication < fsdp.working - fsdp.activations + 1
    assert fsdp.activations == pytest.approx(alone.activations, rel=0.1)


@needs_deepspeed
def test_memory_plan_counts_nvme_offload_on_disk_only() -> None:
    names = ["deepspeed_stage_3_offload", "deepspeed_stage_3_offload_nvme"]
    options = {"devices": 2, "device": "A10", "precision": "bf16-mixed", "strategies": names}
    batch = torch.zeros(5, 10)
    plan = plan_memory(Net, batch, **options)
    host, disk = sorted(plan.strategies, key=lambda row: row.on_disk)
    assert (host.name, disk.name) == tuple(names)
    assert (host.fits, disk.fits) == (True, True)
    assert host.on_disk == 0
    assert disk.on_disk == host.on_host
    assert disk.on_device == host.on_device
    assert host.device is not None
    assert host.device.optimizer == 2e8 * 2  # a bucket of gradients
    (second,) = plan_memory(
        Net, batch, **{**options, "strategies": ["deepspeed_stage_2_offload"]}
    ).strategies
    assert second.device is not None
    assert second.device.optimizer == 500 * 64 * 2  # the gradient of the largest parameter
    # Five buffers of 1e8 numbers, through which parameters are moved, and four for the optimizer.
    assert disk.on_host == pytest.approx(5 * 1e8 * 2 + 4 * disk.on_disk / 3, rel=0.05)
    assert plan.strategies[0] is host  # a disk is slower
    less = plan_memory(Net, batch, **options, disk_memory="1MB")
    assert [row.name for row in less.strategies if row.fits] == names[:1]


@needs_deepspeed
def test_a_step_is_simulated_once_for_strategies_that_keep_states_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulate, names = SimulatedModel.simulate_step, []

    def noted(model: SimulatedModel, strategy: Any, *arguments: Any) -> Any:
        names.append(type(strategy).__name__)
        return simulate(model, strategy, *arguments)

    monkeypatch.setattr(SimulatedModel, "simulate_step", noted)
    planner = Planner(Net, torch.zeros(5, 10), precision="bf16-mixed")
    options: dict[str, Any] = {"devices": 2, "device": "A10"}
    plan = planner.plan(**options, strategies=["fsdp", "fsdp_cpu_offload", "fsdp_shard_grad_op"])
    # Of an offloaded optimizer, each parameter is stepped by itself, on the host.
    assert names == ["SingleDeviceStrategy", *3 * ["FSDPStrategy"]]
    whole, offloaded = (one(plan, name) for name in ("fsdp", "fsdp_cpu_offload"))
    assert offloaded.on_host > 0 == whole.on_host
    engine = ["deepspeed_stage_3_offload", "deepspeed_stage_3_offload_nvme"]
    assert all(row.memory for row in planner.plan(devices=2, strategies=engine).strategies)
    assert names[4:] == ["SingleDeviceStrategy", "DeepSpeedStrategy"]  # of this machine's CPU
    planner.plan(devices=4, strategies=engine[:1])
    assert names[6:] == ["DeepSpeedStrategy"]


def one(plan: MemoryPlan, name: str) -> PlannedStrategy:
    """Return the row of a strategy."""
    (row,) = (row for row in plan.strategies if row.name == name)
    return row


def test_a_planner_plans_one_machine_after_the_other() -> None:
    planner = Planner(Net, torch.zeros(5, 10))
    for devices in (2, 4):
        options: dict[str, Any] = {"devices": devices, "device": "A10"}
        options["strategies"] = ["ddp", "fsdp"]
        assert planner.plan(**options) == plan_memory(Net, torch.zeros(5, 10), **options)


def test_an_operation_on_equal_shapes_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[Any] = []
    by_base = PlanningMode._by_base

    def noted(mode: PlanningMode, func: Any, *arguments: Any) -> Any:
        run.append(func)
        return by_base(mode, func, *arguments)

    monkeypatch.setattr(PlanningMode, "_by_base", noted)

    def step() -> list[Tensor]:
        flat = torch.zeros(10_007)
        parts = flat[:5003], flat[5003:10_006]
        sums = [part.view(5003, 1) + 1 for part in parts]
        normed = torch.native_layer_norm(sums[0], (1,), None, None, 1e-5)
        return [*sums, *normed, torch.tensor(0.0) + 1]

    with PlanningMode():
        first = step()
        known = len(run)
        second = step()
    assert run[known:] == []
    for one_result, other in zip(first, second, strict=True):
        assert one_result.shape == other.shape
        assert one_result.untyped_storage().nbytes() == other.untyped_storage().nbytes()


def test_a_process_that_has_joined_others_is_refused(tmp_path: Path) -> None:
    file = (tmp_path / "store").as_uri()
    torch.distributed.init_process_group("gloo", init_method=file, rank=0, world_size=1)
    try:
        with pytest.raises(ConfigurationError, match=r"^plan_memory simulates a process"):
            plan_memory(Net, torch.zeros(5, 10))
    finally:
        torch.distributed.destroy_process_group()


FORKS = """
import os, pathlib, sys, time
from stratagem_extras.planner import forks

forks._LONGEST_WAIT = 5.0
os.sched_getaffinity = lambda pid: {0, 1}  # also where there is one processor
first, how = os.getpid(), sys.argv[1]

def piece(number):
    # The first process does nothing before its fork has a piece.
    pathlib.Path(f"{os.getpid()}.taken").touch()
    while os.getpid() == first and len(list(pathlib.Path().glob("*.taken"))) < 2:
        time.sleep(0.01)
    if os.getpid() != first:
        {"works": list, "fails": lambda: os._exit(1), "hangs": lambda: time.sleep(600)}[how]()
    return number, os.getpid() == first

pieces = forks.in_forks(5, piece)
assert [number for number, _ in pieces] == [0, 1, 2, 3, 4], pieces
assert all(here for _, here in pieces) == (how != "works"), pieces
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("no fork is left")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks are for Linux")
@pytest.mark.parametrize("how", ["works", "fails", "hangs"])
def test_forks_redo_the_work_of_a_failed_fork(how: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORKS, how]
    done = subprocess.run(command, cwd=tmp_path, timeout=120, capture_output=True, text=True)
    assert done.stdout == "no fork is left\n", done.stderr


def test_the_command_simulates_each_strategy_and_ends_quietly(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("from torch import nn\ndef Net(): return nn.Linear(9, 9)\n")
    names = ("fsdp", "fsdp_no_shard", "fsdp_hybrid_shard")
    options = [text for name in names for text in ("--strategy", name)]
    command = [sys.executable, "-m", "stratagem", "plan", "own:Net", "--batch", "2x9", "--json"]
    done = subprocess.run(
        [*command, "--devices", "2", *options], cwd=tmp_path, capture_output=True, text=True
    )
    # In builds of torch for CUDA, autograd refuses to run in forks, and triton checks its end.
    rows = json.loads(done.stdout)["strategies"]
    assert {row["name"]: row["how"] for row in rows} == dict.fromkeys(names, "simulated")
    assert done.stderr == ""


def test_plan_command_refuses_missing_and_conflicting_arguments(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for arguments, message in (
        ("", "expected a MODEL, such as my_module:Net, or the sizes"),
        ("a:B", "expected --batch"),
        ("no_such_module:B --batch 3", "the model 'no_such_module:B' cannot be imported: Module"),
        ("torch.nn:Idem --batch 3", "has no attribute 'Idem'. Expected module:Class"),
        ("math:pi --batch 3", "the model 'math:pi' is a float: expected a class"),
        ("a:B --layers 3 --batch 3", "received MODEL and --layers"),
        ("torch.nn:Identity --batch 3xx", "expected sizes and a dtype of torch"),
        ("torch.nn:Identity --batch 3:lng", "expected sizes and a dtype of torch"),
        ("torch.nn:Identity --batch torch:nothing", "the batch 'torch:nothing' cannot be imported"),
        ("torch.nn:Identity --batch math:sqrt", "--batch math:sqrt failed: TypeError"),
        (
            "--parameters 1e9 --layers 2 --hidden 4097 --vocabulary 10 --sequence 8",
            "hidden=4097: expected an even number, and a multiple of 128",
        ),
        (
            "--parameters 10 --layers 2 --hidden 64 --vocabulary 10 --sequence 8",
            "pass smaller sizes or more parameters",
        ),
    ):
        assert plan(arguments.split()) == 2
        assert message in capsys.readouterr().err


def test_the_command_prints_rows_and_the_line_to_write(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "a_users_module", sys.modules[__name__])
    wanted = "a_users_module:Net --batch 5x10 --devices 2 --device L4 --strategy"
    assert plan([*wanted.split(), "fsdp", "--strategy", "dp"]) == 0
    shown = capsys.readouterr().out
    assert "fsdp      yes" in shown
    assert max(map(len, shown.splitlines()[1:])) <= 100
    header, row = shown.splitlines()[1:3]
    assert "host" not in header.split()  # nothing is offloaded
    assert header.split()[-2:] == ["step", "how"]
    assert row[header.index("step") :].split()[1] == "us"
    assert "dp: one process drives all devices" in shown
    call = "Trainer(accelerator='cuda', devices=2, strategy='fsdp')"
    why = "fsdp is the only strategy that fits\ntwice the size: fsdp would fit"
    assert shown.endswith(f"{call}\n{why}\n")
    assert plan([*wanted.split(), "dp"]) == 1
    assert "no strategy could be planned" in capsys.readouterr().out
    assert plan([*wanted.split(), "fsdp", "--html", "no/such/folder.html"]) == 2
    assert "expected a file in a folder that exists" in capsys.readouterr().err
    assert plan([*wanted.split(), "fsdp", "--device-memory", "1KB"]) == 1
    assert "nothing fits; the nearest is fsdp" in capsys.readouterr().out


def test_the_page_has_a_bar_for_each_strategy_and_loads_nothing(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    sizes = "--parameters 3e6 --layers 8 --hidden 128 --vocabulary 1000 --sequence 64"
    options = f"{sizes} --devices 2 --device-memory 100MB --html {page}"
    assert plan([*options.split(), "--strategy", "ddp", "--strategy", "fsdp"]) == 0
    text = page.read_text()
    assert text.count("<h2>Memory of a device by") == 4
    assert text.count("<rect") == 2 * 6
    assert "the device has 95.37 MiB" in text
    assert not re.search(r"(src|href)=|https?:|@import", text)


def test_the_longest_names_and_bars_are_in_the_picture() -> None:
    memory = PlannedMemory(2**39, 2**39, 2**39, 0, 2**39)
    name = "deepspeed_stage_3_offload_nvme"
    row = PlannedStrategy(name, memory=memory, device=memory, on_host=2**38, on_disk=2**38)
    plan = MemoryPlan((row,), 1, 8, 1, 2**36, None, None, "32-true", 1, "cuda")
    text = write_page(plan, {})
    (left,) = re.findall(rf'<text x="(\d+)" y="\d+" text-anchor="end">{name}', text)
    assert int(left) >= 6.6 * len(name)
    ((right, label),) = re.findall(r'<text x="([\d.]+)" y="\d+">([^<]+)', text)
    assert float(right) + 6.6 * len(label) < 1000
    assert text.index("<line") > text.rindex("<rect")  # the device's memory, over the bars


def test_real_steps_are_measured_beside_the_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("measured_net.py").write_text(
        "from torch import nn\n"
        "def build():\n"
        "    return nn.Sequential(nn.Linear(100, 1000), nn.Linear(1000, 100))\n"
    )
    arguments = ["measured_net:build", "--batch", "8x100", "--devices", "2", "--measure"]
    assert plan([*arguments, "--strategy", "ddp", "--strategy", "fsdp"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = {line[0]: float(line[-1]) for line in lines if line and line[0] in ("ddp", "fsdp")}
    # gloo's threads let go of what they have sent at a time of their own.
    assert rows == {"ddp": pytest.approx(1, abs=0.02), "fsdp": pytest.approx(0.9, abs=0.3)}


def test_a_measurement_is_compared_with_the_plan_for_this_machine(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # By default AdamW holds two temporary tensors of the largest weight on a processor. On a GPU it
    # holds one of all weights.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("wide_net.py").write_text(
        "from torch import nn\n"
        "def build():\n"
        "    return nn.Sequential(nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 1024))\n"
    )
    arguments = ["wide_net:build", "--batch", "4x128", "--strategy", "single_device"]
    # A device of which only the memory is known is planned as a GPU.
    assert plan([*arguments, "--device-memory", "1TB", "--measure", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["strategies"]
    real = row["measured"]
    assert (real["why_not"], real["ratio"]) == ("", pytest.approx(1, abs=0.01))
    assert real["ratio"] == real["predicted"] / real["measured"]
    if not torch.cuda.is_available():
        assert real["accelerator"] == "cpu"
        assert real["predicted"] > row["on_device"]


def test_a_strategy_that_is_not_measured_says_why(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = "--parameters 4e10 --layers 40 --hidden 8192 --vocabulary 32000 --sequence 64"
    arguments = [*sizes.split(), "--device", "H100", "--strategy", "single_device", "--measure"]
    why = "it would fill more than half of this machine's memory"
    assert plan([*arguments, "--host-memory", "2TB"]) == 1
    assert f"single_device was not measured: {why}" in capsys.readouterr().out
    plan([*arguments, "--num-nodes", "2", "--strategy", "fsdp", "--json"])
    rows = json.loads(capsys.readouterr().out)["strategies"]
    real = next(row["measured"] for row in rows if row["name"] == "fsdp")
    assert real["why_not"] == "it takes several nodes"
    assert (real["ratio"], real["measured"]) == (None, 0)


def test_activations_that_are_computed_again_are_not_kept() -> None:
    batch = torch.zeros(500, 10)
    kept = planned(lambda: Net(20), batch, "fsdp", devices=2)
    again = planned(lambda: Net(20), batch, "fsdp", devices=2, activation_checkpointing=True)
    assert again.memory.working < kept.memory.working / 2
    alone = planned(lambda: Net(20), batch, activation_checkpointing=True, device_memory=None)
    assert alone.memory.total == held(checkpointed, batch)
    with pytest.raises(ConfigurationError, match="activation_checkpointing=3: expected True"):
        planned(Net, batch, activation_checkpointing=3)


@pytest.mark.parametrize(
    "choice", [Recompute(keep="matmul"), Recompute(share=0.5), Recompute(offload=True)]
)
def test_selective_checkpointing_is_planned_to_the_byte(choice: Recompute) -> None:
    def model() -> nn.Module:
        net = nn.Sequential(*(block() for _ in range(6)))
        apply_activation_checkpointing(net, choice)
        return net

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Tanh())

    batch = torch.zeros(500, 32)
    real = held(model, batch)
    options: dict[str, Any] = {"activation_checkpointing": choice, "device_memory": None}
    kept, part, none = (
        planned(lambda: nn.Sequential(*(block() for _ in range(6))), batch, **given).memory
        for given in (
            {"device_memory": None},
            options,
            {**options, "activation_checkpointing": True},
        )
    )
    assert part.total == pytest.approx(real, rel=0.01)
    assert none.activations <= part.activations < kept.activations


def test_layers_of_a_model_that_is_a_list_itself_are_computed_again() -> None:
    def layers() -> list[nn.Module]:
        return [nn.TransformerEncoderLayer(32, 2, 128, batch_first=True) for _ in range(12)]

    batch = torch.zeros(8, 100, 32)
    options: dict[str, Any] = {"activation_checkpointing": True}
    kept = planned(lambda: nn.Sequential(*layers()), batch)
    again = planned(lambda: nn.Sequential(*layers()), batch, **options)
    assert again.memory.activations < kept.memory.activations / 5
    # A stage of layers is no layer.
    inner = planned(
        lambda: nn.Sequential(nn.Linear(32, 32), nn.Sequential(*layers())), batch, **options
    )
    assert inner.memory.activations < again.memory.activations * 1.2


def checkpointed() -> nn.Module:
    net = Net(20)
    apply_activation_checkpointing(net, True)
    return net


class Sparse(ParallelStrategy):
    """Cannot be simulated, and knows that a tenth of the gradients is sent."""

    capabilities = Capabilities.parallel()

    def setup_environment(self) -> None:
        raise RuntimeError("needs its server")

    def estimate_memory(self, phases: Any, shards: Any) -> Any:
        estimated = super().estimate_memory(phases, shards)
        return {name: replace(memory, sent=memory.sent // 10) for name, memory in estimated.items()}


def test_memory_plan_uses_the_estimate_of_a_custom_strategy() -> None:
    StrategyRegistry.register("sparse", Sparse, description="sends little")
    try:
        sparse = planned(Net, torch.zeros(8, 10), "sparse", devices=2)
        ddp = planned(Net, torch.zeros(8, 10), "ddp", devices=2)
    finally:
        StrategyRegistry.remove("sparse")
    assert (sparse.how, ddp.how) == ("computed", "computed")
    assert sparse.memory.sent == ddp.memory.sent // 10
    buckets = ddp.memory.gradients
    # Scalars of the optimizer's step may be there a moment longer.
    assert sparse.memory.total == pytest.approx(ddp.memory.total - buckets, abs=1000)


def test_strategies_of_others_are_planned_without_a_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page = (ROOT / "docs/extend/write-a-strategy.md").read_text()
    scripts = re.findall(r"^```python\n(.+?)^```$", page, re.MULTILINE | re.DOTALL)
    (script,) = (script for script in scripts if "class SignVoteStrategy" in script)
    plugin = ModuleType("stratagem_sign_vote.plugin")
    vars(plugin)["CAPABILITIES"] = Capabilities.parallel()
    monkeypatch.setitem(sys.modules, plugin.__name__, plugin)
    monkeypatch.setitem(sys.modules, "stratagem_sign_vote", ModuleType("stratagem_sign_vote"))
    own: dict[str, Any] = {"__name__": "sign_vote"}
    exec(script, own)
    monkeypatch.syspath_prepend(ROOT / "examples/plugins/stratagem-onebit/src")
    one_bit = importlib.import_module("stratagem_onebit.strategy").OneBitStrategy
    try:
        StrategyRegistry.register("sign_vote", own["SignVoteStrategy"], description="votes")
        StrategyRegistry.register("one_bit", one_bit, description="sends one bit an element")
        on_cpu: dict[str, Any] = {"device_memory": None}
        vote = planned(Net, torch.zeros(50, 10), "sign_vote", devices=2, **on_cpu)
        bit = planned(Net, torch.zeros(50, 10), "one_bit", devices=2, **on_cpu)
    finally:
        StrategyRegistry.remove("sign_vote")
        StrategyRegistry.remove("one_bit")
    alone = planned(Net, torch.zeros(50, 10), **on_cpu).memory
    assert (vote.how, bit.how) == ("simulated", "computed")  # the latter's sizes depend on values
    assert vote.memory.optimizer == alone.optimizer
    assert bit.memory.optimizer == alone.optimizer + alone.parameters  # what it has not sent yet
    # A vote has the signs of a parameter, and their sum.
    assert alone.total < vote.memory.total < 1.1 * alone.total
    held_with_gradients = bit.memory.optimizer + 2 * alone.parameters
    assert bit.memory.total == pytest.approx(held_with_gradients + 6.6 * alone.parameters, rel=0.01)


def test_memory_that_is_freed_or_shared_is_not_counted_twice() -> None:
    with MemoryMeter() as meter:
        whole = torch.zeros(1000)
        part = whole[10:]
        assert meter.live == 4000
        del whole
        assert meter.live == 4000
        part.untyped_storage().resize_(0)
        assert meter.live == 0
        meter.start()
        other = torch.zeros(10)
    assert (meter.live, meter.peak) == (40, 40)
    assert other.shape == (10,)


def test_a_meter_counts_fake_tensors_as_real_ones_without_a_second_dispatch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def counts() -> tuple[int, ...]:
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        with MemoryMeter() as meter:
            loss = layer(torch.ones(3, 5, 16)).var()
            live = meter.live
            meter.start()
            loss.backward()
        return live, meter.live, meter.peak, meter.flops

    real = counts()
    assert min(real) > 0
    monkeypatch.delattr(MemoryMeter, "__torch_dispatch__")
    with PlanningMode():
        assert counts() == real


@needs_deepspeed
def test_stage_3_is_simulated_in_less_time_and_holds_and_sends_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coordinator = importlib.import_module("deepspeed.runtime.zero.partitioned_param_coordinator")
    parameters, looked_up = coordinator.iter_params, []

    def noted(*arguments: Any, **options: Any) -> Any:
        looked_up.append(arguments)
        return parameters(*arguments, **options)

    monkeypatch.setattr(coordinator, "iter_params", noted)

    def memory() -> PlannedMemory:
        looked_up.clear()
        planned_memory = planned(Net, torch.zeros(5, 10), "deepspeed_stage_3", devices=2).memory
        assert isinstance(planned_memory, PlannedMemory)
        return planned_memory

    fast, times = memory(), len(looked_up)
    monkeypatch.setattr(
        "stratagem_deepspeed.strategy.simulated_sharding", lambda **_: nullcontext()
    )
    assert memory() == fast
    assert len(looked_up) > 10 * times
    assert coordinator.iter_params is noted


def test_sizes_and_devices_are_read_as_people_write_them() -> None:
    assert find_device("h100").name == "H100"
    assert find_device("TPU v5e").accelerator == "tpu"
    assert parse_size("80GiB") == 80 * 2**30
    assert parse_size("8e10") == parse_size("80 gb") == 80 * 10**9


def test_the_network_of_a_device_is_shared_by_the_ranks_of_its_node() -> None:
    h100 = find_device("H100")
    assert h100.between(8, 1) == 450e9
    assert h100.between(8, 2) == 8 * h100.network == 400e9
    assert h100.between(1, 2) == h100.network == 50e9
    # 8 ranks of a node enter the network by 8 cards: between nodes a step takes about as long.
    seconds = [
        plan_memory(
            lambda: Net(4, 512),
            torch.zeros(1, 10),
            devices=8,
            num_nodes=nodes,
            device="H100",
            strategies=["fsdp"],
        )
        .strategies[0]
        .seconds
        for nodes in (1, 2)
    ]
    assert seconds[1] < 1.3 * seconds[0]


def test_other_figures_of_a_device_are_taken_or_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "a_users_module", sys.modules[__name__])
    wanted = "a_users_module:Net --batch 5x10 --devices 2 --num-nodes 2 --device L4 --json"
    rows = []
    for figure in ("network=25e9", "network=1e9"):
        assert plan([*wanted.split(), "--strategy", "fsdp", "--figure", figure]) == 0
        rows.append(json.loads(capsys.readouterr().out)["strategies"][0])
    # Two ranks of a node share two cards, or the slower PCI Express.
    assert rows[1]["seconds"] == pytest.approx(16 * rows[0]["seconds"])
    for figure, message in (
        ("network", "--figure network: expected a name and a number, such as network=50e9"),
        ("speed=3", "figures has 'speed': expected 'flops', 'link' or 'network'\n"),
        ("netwrk=5e9", "figures has 'netwrk': expected 'flops', 'link' or 'network'; did you mean"),
        ("link=-1", "figures has 'link': -1.0: expected a number above 0"),
    ):
        assert plan([*wanted.split(), "--figure", figure]) == 2
        assert message in capsys.readouterr().err


def test_a_product_of_groups_counts_its_operations() -> None:
    rows, weights = torch.ones(12, 8, dtype=torch.bfloat16), torch.ones(3, 8, 16).bfloat16()
    ends = torch.tensor([4, 8, 12], dtype=torch.int32)
    with PlanningMode() as mode, MemoryMeter(lambda: {}) as meter:
        del mode
        torch._grouped_mm(rows, weights, offs=ends)
    assert meter.flops == 2 * 12 * 8 * 16


def test_more_layers_hold_most_at_another_moment() -> None:
    def held(logits: int, gradients: int) -> dict[str, PlannedMemory]:
        begins, ends = (PlannedMemory(0, n, 0, 0, m) for n, m in ((0, logits), (gradients, 0)))
        return {"backward|layers -1": begins, "backward|layers 0": ends}

    few, more = held(100, 30), held(100, 40)
    assert by_phase(few)["backward"].total == 100
    assert by_phase(extrapolated(few, few, more, further=20))["backward"].total == 230
