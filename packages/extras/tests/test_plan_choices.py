"""Plans of a strategy's sizes, and of the parts of a model."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stratagem import StrategyRegistry, Trainer, plan_memory
from stratagem.discovery import get_registry
from stratagem.errors import ConfigurationError, UnknownNameError
from stratagem.strategies import FSDPStrategy
from stratagem_extras.planner import plan as planning
from stratagem_extras.planner.choices import Choice, parse_strategy
from stratagem_extras.planner.command import plan
from stratagem_extras.planner.modules import parts_of
from stratagem_extras.planner.page import write_page
from stratagem_extras.planner.plan import MemoryPlan, Planner
from stratagem_extras.planner.simulation import Workload, example_of
from stratagem_extras.planner.training import default_loss, optimizer_maker


class Sized(FSDPStrategy):
    """Has sizes, of which one is too large for any model."""

    def __init__(self, size: int = 1, example_input: Any = None, **options: Any) -> None:
        super().__init__(**options)
        self.size, self.example_input = size, example_input

    @classmethod
    def candidates(cls, devices: int, num_nodes: int) -> Sequence[Mapping[str, Any]]:
        return [{}, {"size": devices}, {"size": 98}, {"size": 99}]

    def shard(self, module: nn.Module) -> None:
        if self.size > 90:
            raise ConfigurationError(f"size={self.size}: too large")
        super().shard(module)


class Net(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(10, 16)
        self.body = nn.Module()
        self.body.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(layers)
        )
        self.last = nn.Linear(16, 50)
        self.scale = nn.Parameter(torch.ones(50))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for layer in self.body.layers:  # type: ignore[union-attr]
            hidden = hidden + layer(hidden)
        return (self.last(hidden) * self.scale).exp()  # type: ignore[no-any-return]


BATCH = torch.zeros(6, 10)
MACHINE: dict[str, Any] = {"devices": 2, "device_memory": "1GB"}


@pytest.fixture
def sized() -> Iterator[None]:
    StrategyRegistry.register("sized", Sized, description="has sizes")
    yield
    StrategyRegistry.remove("sized")


def names(found: MemoryPlan) -> list[str]:
    return [row.name for row in found.strategies]


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ("fsdp", "fsdp", None),
        ("fsdp()", "fsdp", {}),
        (" mesh ( tensor = 2 , context=4 )", "mesh", {"tensor": 2, "context": 4}),
        ("mesh(context_modules=['layers.*'])", "mesh", {"context_modules": ["layers.*"]}),
        ("my-own.name(rate=-0.5, kind='(')", "my-own.name", {"rate": -0.5, "kind": "("}),
    ],
)
def test_a_strategy_is_parsed_with_its_arguments(text: str, name: str, arguments: Any) -> None:
    assert parse_strategy(text) == (name, arguments)


@pytest.mark.parametrize(
    "text",
    [
        "mesh(2)",
        "mesh(tensor=size)",
        "mesh(tensor=__import__('os').getpid())",
        "mesh(**{'tensor': 2})",
        "mesh(tensor=2)(context=2)",
        "mesh(tensor=2",
        "mesh(tensor=2) or print()",
        "(tensor=2)",
    ],
)
def test_arguments_that_are_not_literals_by_keyword_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        parse_strategy(text)
    assert str(raised.value) == (
        f"strategy {text!r}: expected a name, or a name with literals by keyword, such as "
        "'mesh(tensor=2, context=2)'. For other arguments, register a name: "
        "StrategyRegistry.register('mine', MeshStrategy, description='...', tensor=2)"
    )


def test_a_named_strategy_is_planned_with_its_candidates(sized: None) -> None:
    found = plan_memory(Net, BATCH, strategies=["sized", "fsdp"], **MACHINE)
    assert sorted(names(found)) == ["fsdp", "sized", "sized(size=2)", "sized(size=98)"]
    refused = found.strategies[-1]
    assert (refused.why_not, refused.alike) == ("size=98: too large", ("sized(size=99)",))


def test_a_name_with_arguments_has_no_candidates(sized: None) -> None:
    for text in ("sized()", "SIZED( size = 2 )", "sized(size=99)"):
        (row,) = plan_memory(Net, BATCH, strategies=[text], **MACHINE).strategies
        assert row.name == ("sized" if text == "sized()" else text.lower().replace(" ", ""))
    assert row.why_not == "size=99: too large"
    with pytest.raises(UnknownNameError, match="mash"):
        plan_memory(Net, BATCH, strategies=["mash(tensor=2)"], **MACHINE)


def test_a_name_that_presets_a_size_has_no_candidates() -> None:
    StrategyRegistry.register("sized_2", Sized, description="has a size", size=2)
    try:
        assert names(plan_memory(Net, BATCH, strategies=["sized_2"], **MACHINE)) == ["sized_2"]
    finally:
        StrategyRegistry.remove("sized_2")


def test_candidates_are_planned_where_no_strategy_fits_on_the_devices(
    sized: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: Any = [get_registry().find("strategy", name).spec for name in ("fsdp", "sized")]
    monkeypatch.setattr(planning, "_groups", lambda: [[spec] for spec in found])
    planner = Planner(Net, BATCH)
    assert sorted(names(planner.plan(**MACHINE))) == ["fsdp", "sized"]
    small = planner.plan(devices=2, device_memory=1000)
    assert "sized(size=2)" in names(small)
    assert "sized(size=2)" not in names(planner.plan(devices=2, device_memory=1, expand=False))


def test_the_call_of_a_strategy_with_arguments_can_be_pasted() -> None:
    text = "fsdp_cpu_offload(reshard_after_forward=False)"
    found = plan_memory(Net, BATCH, devices=2, device_memory=None, strategies=[text])
    assert found.call == (
        "from stratagem.strategies import FSDPStrategy\n\n"
        "Trainer(accelerator='cpu', devices=2, "
        "strategy=FSDPStrategy(cpu_offload=True, reshard_after_forward=False))"
    )
    line, _, call = found.call.partition("\n\n")
    space: dict[str, Any] = {"Trainer": partial(Trainer, logger=False)}
    exec(line, space)
    strategy = eval(call, space).strategy
    assert (strategy.cpu_offload, strategy.reshard_after_forward) == (True, False)


def test_a_class_of_a_script_needs_no_import(monkeypatch: pytest.MonkeyPatch) -> None:
    spec: Any = get_registry().find("strategy", "fsdp").spec
    StrategyRegistry.register("sized", Sized, description="has sizes")
    try:
        spec = get_registry().find("strategy", "sized").spec
        monkeypatch.setattr(Sized, "__module__", "__main__")
        monkeypatch.setattr(sys.modules["__main__"], "Sized", Sized, raising=False)
        assert Choice(spec, {"size": 2}).in_python()[0] == ""
        assert Choice(spec).in_python() == ("", "")
    finally:
        StrategyRegistry.remove("sized")


def test_sizes_are_simulated_and_never_estimated(
    sized: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(strategy: Any, module: nn.Module) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(Sized, "shard", fail)
    found = plan_memory(Net, BATCH, strategies=["sized()", "sized(size=2)"], **MACHINE)
    rows = {row.name: row for row in found.strategies}
    assert rows["sized"].how == "computed"
    assert rows["sized(size=2)"].why_not == "RuntimeError: no kernel"


class Valued(Net):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * float(inputs.detach().numpy().sum())


def test_sizes_of_a_model_that_needs_values_are_not_planned(sized: None) -> None:
    found = plan_memory(Valued, BATCH, strategies=["sized(size=2)"], **MACHINE)
    (row,) = found.strategies
    assert row.why_not == "the sizes are planned by a step, and a step of the model needs values"
    assert found.modules == ()


class Keywords(nn.Linear):
    def __init__(self) -> None:
        super().__init__(10, 3)

    def forward(self, inputs: Tensor, *, factor: float = 1.0) -> Tensor:
        return super().forward(inputs) * factor


def test_a_strategy_gets_the_arguments_of_the_first_call(
    sized: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    shard = Sized.shard

    def watched(strategy: Any, module: nn.Module) -> None:
        seen.append(strategy.example_input)
        shard(strategy, module)

    monkeypatch.setattr(Sized, "shard", watched)
    plan_memory(Net, BATCH, strategies=["sized()"], **MACHINE)
    ((example,),) = seen
    assert example.shape == (6, 10)

    class WithExample(Net):
        example_input_array = BATCH

    plan_memory(WithExample, BATCH, strategies=["sized()"], **MACHINE)
    assert seen[1:] == [None]  # the model's own is read by the strategy


def test_the_example_of_an_input_is_a_tuple_or_a_dict() -> None:
    def example(loss: Any) -> Any:
        return example_of(Workload(lambda: BATCH, loss, optimizer_maker(None)), Keywords())

    assert example(default_loss) == (BATCH,)
    named = example(lambda model, batch: model(batch, factor=2.0).sum())
    assert named == {"inputs": BATCH, "factor": 2.0}
    assert example(lambda model, batch: model.weight.sum()) is None


def test_planning_prints_no_messages_of_strategies(
    sized: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from stratagem.launch import rank_zero_info

    shard = Sized.shard

    def told(strategy: Any, module: nn.Module) -> None:
        rank_zero_info("divided")
        shard(strategy, module)

    monkeypatch.setattr(Sized, "shard", told)
    plan_memory(Net, BATCH, strategies=["sized()"], **MACHINE)
    assert "divided" not in capsys.readouterr().err
    assert not logging.getLogger("stratagem").disabled


@pytest.mark.parametrize("layers", [2, 40])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_the_sum_over_modules_is_that_of_the_step(layers: int, precision: str) -> None:
    planner = Planner(lambda: Net(layers), BATCH, precision=precision)
    modules = planner.plan(device_memory="1GB", strategies=["single_device"]).modules
    inner = [f"body.layers.{number}" for number in range(layers)]
    assert [row.name for row in modules] == ["first", *inner, "last", ""]
    phases = planner._alone(True)
    assert sum(row.parameters for row in modules) == phases["step"].parameters
    kept = sum(row.activations for row in modules)
    # A scalar of the loss may be there a moment longer.
    assert kept == pytest.approx(phases["forward"].activations, abs=16)
    one = modules[1]
    bytes_of_one = 4 if precision == "32-true" else 2
    # GELU reads what the first layer makes; the sum with the input is made outside of the layer.
    assert one.activations >= 2 * 6 * 32 * bytes_of_one
    assert one.parameters == (16 * 32 + 32 + 32 * 16 + 16) * bytes_of_one
    assert one.flops == 2 * 2 * 6 * 16 * 32
    assert len({row.flops for row in modules[1 : layers + 1]}) == 1


def test_modules_have_the_memory_of_a_model_with_all_layers() -> None:
    def build(layers: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(10, 16), nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)))
        )

    few, many = (
        plan_memory(lambda n=n: build(n), BATCH, device_memory="1GB").modules for n in (20, 60)
    )
    assert [row.name for row in many] == ["0", *(f"1.{number}" for number in range(60)), ""]
    assert many[1:20] == few[1:20]
    assert (many[60].activations, many[60].parameters) == (
        few[20].activations,
        few[20].parameters,
    )


def test_parts_are_elements_of_lists_and_outermost_modules() -> None:
    assert list(parts_of(Net())) == ["first", "body.layers.0", "body.layers.1", "last"]
    assert list(parts_of(nn.Sequential(nn.ReLU(), nn.Sequential(nn.ReLU())))) == ["0", "1"]
    assert list(parts_of(nn.Linear(1, 1))) == []


def test_a_shared_parameter_counts_once() -> None:
    def build() -> nn.Module:
        model = Net()
        model.last.weight = nn.Parameter(torch.zeros(50, 16))
        model.tied = nn.Linear(16, 50)
        model.tied.weight = model.last.weight
        return model

    modules = plan_memory(build, BATCH, device_memory="1GB", strategies=["single_device"]).modules
    sizes = {row.name: row.parameters for row in modules}
    assert (sizes["last"], sizes["tied"]) == (4 * (50 * 16 + 50), 4 * 50)


def test_the_command_prints_equal_modules_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "a_users_module", sys.modules[__name__])
    wanted = "a_users_module:Net --batch 6x10 --device L4 --strategy single_device"
    assert plan([*wanted.split(), "--modules"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("module "))
    cells = [re.split(r"\s{2,}", line) for line in lines[start : start + 5]]
    assert cells[0] == ["module", "parameters", "activations", "operations"]
    shown = [row[0] for row in cells[1:]]
    assert shown == ["first", "body.layers.0 ... body.layers.1 (2)", "last", "(the rest)"]


def test_the_command_takes_a_strategy_with_arguments(
    sized: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "a_users_module", sys.modules[__name__])
    options = "a_users_module:Net --batch 6x10 --devices 2 --device L4 --json --strategy"
    wanted = options.split()
    assert plan([*wanted, "sized(size=2)"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in shown["strategies"]] == ["sized(size=2)"]
    assert shown["best"] == "sized(size=2)"
    assert shown["strategies"][0]["expression"] == "Sized(size=2)"
    assert shown["modules"][0]["name"] == "first"
    assert plan([*wanted, "sized(2)"]) == 2
    assert "expected a name, or a name with literals by keyword" in capsys.readouterr().err
    wanted.remove("--json")
    assert plan([*wanted, "sized"]) == 0
    shown = capsys.readouterr().out
    assert "sized(size=98), sized(size=99): size=98: too large" in shown
    assert "sized(size=2)  yes" in shown


def test_long_names_are_in_the_picture(sized: None) -> None:
    name = "sized(size=2, activation_checkpointing=True, reshard_after_forward=True)"
    page = write_page(plan_memory(Net, BATCH, strategies=[name], **MACHINE), {})
    ((left, shown),) = re.findall(r'<text x="(\d+)" y="\d+" text-anchor="end">([^<]+)', page)[:1]
    assert int(left) >= 6.6 * len(shown)
    assert page.count("Sized(size=2") == 1
