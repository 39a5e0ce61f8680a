"""Resolving: what a request becomes, and the text of every refusal. Nothing is started."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest

import stratagem.one_device.plugin
import stratagem_torch.plugin
from stratagem import Trainer
from stratagem.discovery import (
    AcceleratorSpec,
    Availability,
    Capabilities,
    ClusterEnvironmentSpec,
    ComponentSpec,
    LauncherSpec,
    PrecisionSpec,
    StrategySpec,
    hookimpl,
)
from stratagem.discovery.entry_points import PluginEntry
from stratagem.discovery.registry import Registry
from stratagem.errors import AmbiguousNameError, ConfigurationError, PluginError, UnknownNameError
from stratagem.plan.components import probe_accelerator
from stratagem.plan.plan import RunPlan, RunRequest
from stratagem.plan.resolution import resolve
from stratagem.strategies import (
    DataParallelStrategy,
    DDPStrategy,
    GradientClip,
    StepOptions,
)

PARALLEL = Capabilities(
    launchers=("script",), one_process=False, many_devices=True, multi_node=True
)

# What is found on the machine of these tests; another accelerator is not there.
MACHINE = {
    "cpu": Availability(8, "8 cores", auto_count=1, indexed=False),
    "gpu": Availability(4, "4 GPUs"),
}


def strategy(name: str, capabilities: Capabilities = PARALLEL, **options: Any) -> StrategySpec:
    return StrategySpec(
        name=name, target="nowhere:Nothing", api_version=1, capabilities=capabilities, **options
    )


def accelerator(name: str, **options: Any) -> AcceleratorSpec:
    options = {"probe": "nowhere:nothing", **options}
    return AcceleratorSpec(name=name, target="nowhere:Nothing", api_version=1, **options)


STRANGERS = (
    accelerator("gpu", priority=10, aliases=("cuda",)),
    accelerator("tpu", priority=20),
    strategy(
        "zero", dataclasses.replace(PARALLEL, accelerators=("gpu",), precisions=("bf16-mixed",))
    ),
    strategy("one_node", dataclasses.replace(PARALLEL, multi_node=False)),
    strategy("spmd", Capabilities(many_devices=True, multi_node=True)),
    strategy("on_tpu", Capabilities(accelerators=("tpu",))),
    strategy("by_fork", dataclasses.replace(PARALLEL, launchers=("script", "fork"))),
    LauncherSpec(name="fork", target="nowhere:Nothing", api_version=1, interactive=True),
    LauncherSpec(name="rockets", target="nowhere:Nothing", api_version=1, new_processes=True),
    LauncherSpec(
        name="everywhere",
        target="nowhere:Nothing",
        api_version=1,
        interactive=True,
        spans_nodes=True,
        devices_elsewhere=True,
        cluster_environment="moonbase",
    ),
    ClusterEnvironmentSpec(
        name="moonbase", target="nowhere:Nothing", api_version=1, variables=("MOONBASE",)
    ),
    PrecisionSpec(
        name="fp8", target="nowhere:Nothing", api_version=1, accelerators=("gpu",), aliases=("8",)
    ),
    ClusterEnvironmentSpec(
        name="moon",
        target="nowhere:Nothing",
        api_version=1,
        variables=("MOON_JOB", "MOON_RANKS"),
        priority=10,
        world_size_variable="MOON_RANKS",
        local_world_size_variable="MOON_RANKS_HERE",
        rank_variable="MOON_RANK",
        local_rank_variable="MOON_LOCAL_RANK",
    ),
)


def entry_of(plugin: object, distribution: str) -> PluginEntry:
    return PluginEntry("entry", "nowhere", distribution, "1.0", "", lambda: plugin)


def plugin_of(specs: Iterable[ComponentSpec] = (), **hooks: Callable[..., Any]) -> object:
    """A plugin module with these components and hooks."""
    module = types.ModuleType("plugin")
    hooks["stratagem_components"] = lambda: tuple(specs)
    for name, hook in hooks.items():
        setattr(module, name, hookimpl(hook))
    return module


def registry_of(*plugins: tuple[str, object]) -> Registry:
    """Core's backend, and these plugins by their distributions' names."""
    entries = [
        entry_of(stratagem.one_device.plugin, "stratagem-core"),
        entry_of(stratagem_torch.plugin, "stratagem-backend-torch"),
    ]
    entries += [entry_of(plugin, distribution) for distribution, plugin in plugins]
    registry = Registry.discover(entries, environ={})
    assert {report.status for report in registry.reports} == {"loaded"}, registry.reports
    return registry


@pytest.fixture(scope="module")
def registry() -> Registry:
    return registry_of(("strangers", plugin_of(STRANGERS)))


def probe(asked: Any) -> Availability:
    return MACHINE.get(asked.name, Availability(0, "no driver"))


Plan = Callable[..., RunPlan]


@pytest.fixture
def plan(registry: Registry) -> Plan:
    """Resolve a request in an empty environment on the machine above."""

    def make(*, environ: Mapping[str, str] | None = None, **asked: Any) -> RunPlan:
        asked = {"interactive": False, **asked}
        return resolve(RunRequest(environ=environ or {}, **asked), registry, probe=probe)

    return make


@pytest.fixture
def refused(plan: Plan) -> Callable[..., str]:
    """Resolve a request that cannot be met and return what the error says."""

    def make(error: type[ConfigurationError] = ConfigurationError, **asked: Any) -> str:
        with pytest.raises(error) as caught:
            plan(**asked)
        return str(caught.value)

    return make


# What torchrun sets for the second of four processes, two on each of two nodes.
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
}
ONE_NODE = {**TORCHRUN, "WORLD_SIZE": "2"}
MOON = {
    "MOON_JOB": "7",
    "MOON_RANKS": "2",
    "MOON_RANKS_HERE": "2",
    "MOON_RANK": "1",
    "MOON_LOCAL_RANK": "1",
}


def strategy_object(capabilities: Capabilities = PARALLEL, **requested: Any) -> Any:
    """What resolving sees of a Strategy that the user made."""
    return types.SimpleNamespace(capabilities=capabilities, requested=requested)


# -- the strategy


def test_an_empty_request_takes_the_best_accelerator_and_all_of_its_devices(plan: Plan) -> None:
    made = plan()
    assert (made.accelerator.name, made.devices) == ("gpu", (0, 1, 2, 3))
    assert made.accelerator.why == "the best that is available here (4 GPUs)"
    assert made.devices_why == "automatic for gpu: 4 GPUs"
    assert (made.strategy.name, made.world_size) == ("ddp", 4)
    assert made.strategy.why == "4 device(s) a node and no strategy named"
    assert made.precision.name == "32-true"
    assert made.cluster_environment.why == "no cluster was detected"
    assert made.launcher.name == "script"
    assert made.checkpoint_io.why == "the default"


def test_one_device_and_no_strategy_is_single_device(plan: Plan) -> None:
    made = plan(accelerator="cpu", strategy=None)
    assert (made.strategy.name, made.launcher.name) == ("single_device", "in_process")
    assert made.strategy.why == "one device and no strategy named"
    assert made.processes_per_node == made.world_size == 1


def test_plan_names_the_provider_of_a_strategy(plan: Plan) -> None:
    made = plan(strategy="one_node", devices=2)
    assert (made.strategy.provider, made.strategy.why) == ("strangers 1.0", "your argument")


def test_plan_keeps_a_strategy_object(plan: Plan) -> None:
    given = strategy_object()
    made = plan(strategy=given, devices=2)
    assert made.strategy.build() is given
    assert made.strategy.provider == "given as an object"
    assert made.strategy.spec is None
    assert made.capabilities is PARALLEL


@pytest.mark.parametrize("given", [7, object(), ["ddp"]])
def test_something_else_is_no_strategy(refused: Callable[..., str], given: object) -> None:
    text = refused(strategy=given)
    assert f"strategy={given!r}" in text
    assert "expected a name or an instance of stratagem.strategies.Strategy" in text


def test_a_strategy_class_has_to_be_called(refused: Callable[..., str]) -> None:
    class Mine:
        capabilities = PARALLEL

    text = refused(strategy=Mine)
    assert "expected a name or an instance of" in text
    assert "received a class: call it" in text


def test_a_strategy_for_other_accelerators_is_refused(refused: Callable[..., str]) -> None:
    text = refused(strategy="zero", accelerator="cpu")
    assert "the strategy 'zero' runs on 'gpu', received accelerator='cpu'" in text
    assert "change one of the two" in text


@pytest.fixture
def peculiar(registry: Registry) -> Iterator[None]:
    """An accelerator whose devices need calls that only its own strategy makes."""
    registry.add(
        accelerator(
            "npu", requires_dedicated_strategies=True, probe=lambda: Availability(2, "2 NPUs")
        )
    )
    registry.add(strategy("on_npu", dataclasses.replace(PARALLEL, accelerators=("npu",))))
    yield
    registry.remove("accelerator", "npu")
    registry.remove("strategy", "on_npu")


@pytest.mark.usefixtures("peculiar")
def test_an_accelerator_may_take_its_own_strategies_only(registry: Registry) -> None:
    def resolved(**asked: Any) -> RunPlan:
        return resolve(RunRequest(environ={}, interactive=False, **asked), registry)

    assert resolved(accelerator="npu", strategy="on_npu").devices == (0, 1)
    given = types.SimpleNamespace(
        name="npu",
        requires_dedicated_strategies=True,
        availability=lambda: Availability(2, "2 NPUs"),
    )
    for asked in ("npu", given):
        with pytest.raises(ConfigurationError) as refused:
            resolved(accelerator=asked, strategy="ddp")
        assert str(refused.value) == (
            "accelerator='npu' takes strategies that were made for it alone, 'on_npu'; received "
            "'ddp': change one of the two"
        )
    # A strategy that takes any accelerator passes it over.
    only_npu = {"npu": Availability(2, "2 NPUs")}
    request = RunRequest(environ={}, interactive=False, strategy="ddp")
    with pytest.raises(ConfigurationError, match=r"npu \(not for this strategy\)"):
        resolve(request, registry, probe=lambda a: only_npu.get(a.name, Availability(0, "none")))


def test_clipping_is_refused_where_a_strategy_cannot(refused: Callable[..., str]) -> None:
    unclipped = strategy_object(dataclasses.replace(PARALLEL, gradient_clipping=False))
    asked = StepOptions(clip=GradientClip(0.5))
    assert refused(strategy=unclipped, step_options=asked) == (
        "the strategy 'SimpleNamespace' cannot clip gradients, received gradient_clip_val=0.5: "
        "leave it out, or use another strategy"
    )


def test_an_accelerator_may_be_listed_under_an_alias(registry: Registry, plan: Plan) -> None:
    spec = strategy("by_alias", dataclasses.replace(PARALLEL, accelerators=("cuda",)))
    registry.add(spec)
    assert plan(strategy="by_alias", accelerator="gpu").strategy.name == "by_alias"
    registry.remove("strategy", "by_alias")


def test_single_device_refuses_several_devices(refused: Callable[..., str]) -> None:
    text = refused(strategy="single_device", devices=2)
    assert "'single_device' uses one device, received devices=2 (2 devices)" in text
    assert "pass devices=1, or a strategy for several devices such as 'ddp'" in text


def test_single_device_leaves_the_other_devices_alone(plan: Plan) -> None:
    made = plan(strategy="single_device")
    assert (made.accelerator.name, made.devices) == ("gpu", (0,))
    assert made.devices_why == "the strategy uses one gpu device"


def test_a_strategy_for_one_node_is_refused_on_two(refused: Callable[..., str]) -> None:
    cluster = {"MASTER_ADDR": "a", "MASTER_PORT": "1", "NODE_RANK": "0"}
    text = refused(strategy="one_node", num_nodes=2, environ=cluster)
    expected = (
        "'one_node' runs on one node, received num_nodes=2: pass num_nodes=1, or a strategy for "
        "several nodes such as 'ddp'"
    )
    assert expected in text
    # Without a cluster too: to bring one up would not help.
    assert expected in refused(strategy="one_node", num_nodes=2, environ={})


def test_one_process_may_drive_all_devices(plan: Plan) -> None:
    made = plan(strategy="spmd")
    assert (made.devices, made.processes_per_node, made.world_size) == ((0, 1, 2, 3), 1, 1)
    assert made.launcher.why == "the strategy needs one process"


# -- the accelerator


def test_accelerator_alias_selects_an_available_accelerator(plan: Plan) -> None:
    assert plan(accelerator="CUDA").accelerator.name == "gpu"
    assert plan(accelerator=None).accelerator.name == "gpu"


def test_unavailable_accelerator_is_refused_with_its_reason(
    refused: Callable[..., str],
) -> None:
    text = refused(accelerator="tpu")
    assert "accelerator='tpu' is not available on this machine: no driver" in text
    assert "pass accelerator='auto'" in text


def test_strategy_without_accelerator_lists_the_candidates(refused: Callable[..., str]) -> None:
    text = refused(strategy="on_tpu")
    assert "no accelerator is available for this request: tpu (no driver); " in text
    assert "gpu (not for this strategy); cpu (not for this strategy)" in text
    assert "Name another strategy, or run where there is one" in text


def test_the_best_accelerator_is_one_that_the_strategy_takes(registry: Registry) -> None:
    def all_of_them(asked: Any) -> Availability:
        return Availability(2, "2 of them")

    request = RunRequest(strategy="zero", precision="bf16", environ={}, interactive=False)
    assert resolve(request, registry, probe=all_of_them).accelerator.name == "gpu"


def test_an_accelerator_object_is_probed_by_itself(registry: Registry) -> None:
    given = types.SimpleNamespace(name="npu", availability=lambda: Availability(2, "2 NPUs"))
    made = resolve(RunRequest(accelerator=given, environ={}, interactive=False), registry)
    assert (made.accelerator.name, made.devices) == ("npu", (0, 1))
    assert made.accelerator.build() is given


@pytest.mark.parametrize("given", [3, object(), types.SimpleNamespace])
def test_something_else_is_no_accelerator(refused: Callable[..., str], given: object) -> None:
    text = refused(accelerator=given)
    assert f"accelerator={given!r}: expected a name or an instance of" in text
    assert "stratagem.accelerators.Accelerator" in text


@pytest.mark.parametrize("name", ["mtia", "npu"])
def test_a_device_that_torch_knows_is_had_by_an_object(
    refused: Callable[..., str], name: str
) -> None:
    text = refused(UnknownNameError, accelerator=name)
    assert text.startswith(f"unknown accelerator {name!r}.")
    assert (
        f"If torch has a device of that name, pass accelerator=DeviceAccelerator({name!r}) (from "
        "stratagem.accelerators). Installed: cpu, gpu, tpu."
    ) in text


def failing_probe() -> Availability:
    raise SystemExit("the SDK gave up")


def test_a_probe_that_fails_finds_nothing_and_says_why() -> None:
    found = probe_accelerator(accelerator("broken", probe=failing_probe))
    assert (found.count, found.reason) == (0, "its probe failed with SystemExit: the SDK gave up")
    found = probe_accelerator(accelerator("broken"))
    assert "its probe failed with PluginError" in found.reason
    assert "No module named 'nowhere'" in found.reason


def test_a_probe_has_to_return_an_availability() -> None:
    def wrong() -> Any:
        return 4

    found = probe_accelerator(accelerator("broken", probe=wrong))
    assert (found.count, found.reason) == (
        0,
        "its probe returned 4; expected stratagem.discovery.Availability",
    )


# -- what a component says of the plan that it is a part of


def too_many(plan: RunPlan) -> str:
    return f"fp9 takes one device, received {len(plan.devices)}" if len(plan.devices) > 1 else ""


@pytest.mark.parametrize("kind", ["strategy", "precision"])
@pytest.mark.parametrize("incompatible_because", [too_many, f"{__name__}:too_many"])
def test_a_component_may_object_to_the_plan(kind: str, incompatible_because: Any) -> None:
    made = StrategySpec if kind == "strategy" else PrecisionSpec
    options: dict[str, Any] = {"capabilities": PARALLEL} if kind == "strategy" else {}
    spec = made(
        name="fp9",
        target="m:C",
        api_version=1,
        incompatible_because=incompatible_because,
        **options,
    )
    registry = registry_of(("strangers", plugin_of((spec,))))

    def planned(devices: int) -> RunPlan:
        asked: dict[str, Any] = {"strategy": "ddp", "accelerator": "cpu", kind: "fp9"}
        return resolve(
            RunRequest(devices=devices, environ={}, interactive=False, **asked), registry
        )

    assert getattr(planned(1), kind).name == "fp9"
    with pytest.raises(ConfigurationError, match="fp9 takes one device, received 2"):
        planned(2)


def test_data_parallel_needs_kernels_for_several_devices(
    registry: Registry, refused: Callable[..., str]
) -> None:
    text = refused(strategy="dp", accelerator="cpu", devices=2)
    assert text == (
        "strategy='dp' splits a batch over GPUs, received 2 devices of the accelerator 'cpu': use "
        "strategy='ddp', or devices=1"
    )
    with pytest.raises(ConfigurationError) as by_trainer, pytest.warns(FutureWarning):
        Trainer(strategy=DataParallelStrategy(), accelerator="cpu", devices=2, logger=False)
    assert str(by_trainer.value) == text
    found = Availability(2, "2")
    kernels = types.SimpleNamespace(
        name="npu", availability=lambda: found, data_parallel_kernels=True
    )
    request = RunRequest(strategy="dp", accelerator=kernels, environ={}, interactive=False)
    assert resolve(request, registry).devices == (0, 1)


# -- devices


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("auto", (0, 1, 2, 3)),
        (None, (0, 1, 2, 3)),
        (2, (0, 1)),
        ("2", (0, 1)),
        (-1, (0, 1, 2, 3)),
        ("-1", (0, 1, 2, 3)),
        ([1, 3], (1, 3)),
        ((3, 1), (3, 1)),
        ([0], (0,)),
        ("1, 3", (1, 3)),
        ("3,", (3,)),
    ],
)
def test_devices_of_a_gpu(plan: Plan, asked: Any, expected: tuple[int, ...]) -> None:
    assert plan(accelerator="gpu", devices=asked).devices == expected


def test_devices_none_means_the_cpu(plan: Plan) -> None:
    made = plan(devices=None)
    assert (made.accelerator.name, made.devices) == ("cpu", (0,))
    assert made.accelerator.why == "devices=None"
    assert made.strategy.name == "single_device"


def test_cpu_devices_sets_the_number_of_ranks(plan: Plan) -> None:
    assert plan(accelerator="cpu").devices == (0,)
    assert plan(accelerator="cpu", devices=20).world_size == 20
    assert plan(accelerator="cpu", devices=-1).world_size == 8


@pytest.mark.parametrize(
    "asked", ["", " , ", [], (), -2, "-2", "0", [-1], [0, "1"], True, False, [True], 1.5, "two"]
)
def test_impossible_devices_are_refused(refused: Callable[..., str], asked: Any) -> None:
    text = refused(accelerator="gpu", devices=asked)
    assert f"devices={asked!r}: expected a number of devices, -1 for all, a list" in text
    assert "[1, 4] or '1, 4', or 'auto'" in text


def test_a_device_is_named_once(refused: Callable[..., str]) -> None:
    text = refused(accelerator="gpu", devices=[1, 1])
    assert text == "devices=[1, 1] names a device twice; name each once"


@pytest.mark.parametrize("asked", [[0, 4], 5, "0, 4"])
def test_missing_device_index_is_refused(refused: Callable[..., str], asked: Any) -> None:
    text = refused(accelerator="gpu", devices=asked)
    assert f"devices={asked!r} asks for gpu device 4, but there are 4 here (4 GPUs)" in text


@pytest.mark.parametrize("accelerator", ["gpu", "cpu", "auto"])
def test_no_devices_are_refused(refused: Callable[..., str], accelerator: str) -> None:
    assert refused(accelerator=accelerator, devices=0) == (
        "devices=0 leaves nothing to train on: pass a number of devices, -1 for all, or "
        "accelerator='cpu' to train without a GPU"
    )


TAKEN = "is in exclusive use by the process 7"


@pytest.mark.parametrize("asked", [{}, {"devices": 1}, {"strategy": "single_device"}])
def test_accelerator_with_all_devices_in_use_is_not_available(
    registry: Registry, asked: dict[str, Any]
) -> None:
    def probe(spec: Any) -> Availability:
        taken = Availability(2, "2 GPUs", problems=((0, TAKEN), (1, TAKEN)))
        return taken if spec.name == "gpu" else MACHINE.get(spec.name, Availability(0, "none"))

    def made(**asked: Any) -> RunPlan:
        request = RunRequest(environ={}, interactive=False, **asked)
        return resolve(request, registry, probe=probe)

    with pytest.raises(ConfigurationError) as refused:
        made(accelerator="gpu", **asked)
    assert str(refused.value) == (
        f"accelerator='gpu' is not available on this machine: 2 GPUs; device 0 {TAKEN}; device 1 "
        f"{TAKEN}; pass accelerator='auto' to take what there is"
    )
    assert made(accelerator="auto", **asked).accelerator.name == "cpu"


def test_devices_left_to_the_accelerator_are_free_ones(registry: Registry) -> None:
    found = Availability(3, "3 NPUs", auto_count=1, problems=((0, TAKEN),))
    given = types.SimpleNamespace(name="npu", availability=lambda: found)
    request = RunRequest(accelerator=given, environ={}, interactive=False)
    assert resolve(request, registry).devices == (1,)


def test_cores_have_no_indices(refused: Callable[..., str]) -> None:
    text = refused(accelerator="cpu", devices=[0, 2, 3])
    assert "devices=[0, 2, 3] chooses devices by index, but cpu devices have none" in text
    assert "pass a number, such as devices=3" in text


# -- nodes and clusters


def test_several_nodes_need_a_cluster(refused: Callable[..., str]) -> None:
    text = refused(num_nodes=2, environ={"MASTER_ADDR": "first-node"})
    assert "num_nodes=2 needs a cluster, and none was detected" in text
    assert "torchrun" in text
    assert "(not set: MASTER_PORT, NODE_RANK)" in text


def test_several_nodes_by_hand(plan: Plan) -> None:
    cluster = {"MASTER_ADDR": "first-node", "MASTER_PORT": "1", "NODE_RANK": "1"}
    made = plan(num_nodes=3, devices=2, environ=cluster)
    assert (made.strategy.name, made.world_size) == ("ddp", 6)
    assert made.launcher.name == "script"


@pytest.mark.parametrize("asked", [0, -1, 1.5, "2", True])
def test_impossible_nodes_are_refused(refused: Callable[..., str], asked: Any) -> None:
    text = refused(num_nodes=asked)
    assert text == f"num_nodes={asked!r}: expected a whole number of at least 1"


def test_plan_takes_the_world_size_of_torchrun(plan: Plan) -> None:
    made = plan(environ=TORCHRUN)
    assert made.cluster_environment.name == "TorchElastic"
    assert made.cluster_environment.why == "TORCHELASTIC_RUN_ID is set"
    assert (made.devices, made.num_nodes, made.world_size) == ((0, 1), 2, 4)
    assert made.devices_why == "as TorchElastic says"
    assert made.strategy.name == "ddp"
    assert (made.launcher.name, made.launcher.why) == (
        "external",
        "TorchElastic has started the processes",
    )


def test_under_torchrun_with_one_process_nothing_is_parallel(plan: Plan) -> None:
    alone = {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    assert plan(environ=alone).strategy.name == "single_device"
    assert plan(environ=alone, strategy="ddp").world_size == 1


def test_a_rank_that_a_launcher_of_ours_has_started_launches_nothing(plan: Plan) -> None:
    rank = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    made = plan(environ=rank, strategy="ddp", devices=2, accelerator="cpu")
    assert made.cluster_environment.name == "plain"
    assert made.launcher.name == "external"


def test_a_cluster_that_tells_no_local_world_size_divides_evenly(plan: Plan) -> None:
    environ = {k: v for k, v in TORCHRUN.items() if k != "LOCAL_WORLD_SIZE"}
    made = plan(environ=environ, num_nodes=2)
    assert (made.devices, made.world_size) == ((0, 1), 4)


def test_devices_have_to_agree_with_the_ranks_that_are_there(refused: Callable[..., str]) -> None:
    text = refused(environ=ONE_NODE, devices=3)
    assert "devices=3 means 3 process(es) on each node, but TorchElastic has started 2" in text
    assert "make the two agree, or leave devices='auto'" in text


@pytest.mark.parametrize("asked", ["auto", 2, [0, 1]])
def test_each_process_of_a_cluster_may_see_one_device_of_its_own(
    asked: Any, registry: Registry
) -> None:
    def probe_one(accelerator: Any) -> Availability:
        return Availability(1, "1 of 2 GPUs") if accelerator.name == "gpu" else probe(accelerator)

    def make(environ: Mapping[str, str], devices: Any) -> RunPlan:
        request = RunRequest(environ=environ, interactive=False, accelerator="gpu", devices=devices)
        return resolve(request, registry, probe=probe_one)

    assert make(ONE_NODE, asked).devices == (0, 1)
    # One index is no number of devices, and without a cluster one process sees what there is.
    for environ, devices in ((ONE_NODE, [1]), ({}, 2)):
        with pytest.raises(ConfigurationError, match=r"gpu device 1, but there are 1 here"):
            make(environ, devices)


def test_nodes_have_to_agree_with_the_ranks_that_are_there(refused: Callable[..., str]) -> None:
    text = refused(environ=TORCHRUN, devices=2, num_nodes=3)
    assert "2 device(s) on each of 3 node(s) make 6 processes" in text
    assert "TorchElastic has started 4" in text
    assert "leave devices='auto' and num_nodes=1" in text


def test_a_number_of_the_cluster_has_to_be_one(refused: Callable[..., str]) -> None:
    text = refused(environ={**TORCHRUN, "WORLD_SIZE": "four"})
    assert "'TorchElastic' expects a number in WORLD_SIZE, received WORLD_SIZE='four'" in text


@pytest.mark.parametrize("strategy", ["single_device", strategy_object(Capabilities())])
def test_one_process_on_a_further_rank_is_refused(
    refused: Callable[..., str], strategy: Any
) -> None:
    text = refused(environ=ONE_NODE, strategy=strategy, accelerator="cpu")
    assert "this process is rank 1 of 2 (TorchElastic)" in text
    assert "trains in one process: use a strategy for several processes such as 'ddp'" in text
    assert "if trainer.is_global_zero:" in text
    assert "STRATAGEM_CLUSTER=none" in text


def test_one_process_on_rank_0_is_a_script_that_evaluates_there(plan: Plan) -> None:
    made = plan(environ={**ONE_NODE, "RANK": "0"}, strategy="single_device", accelerator="cpu")
    assert (made.launcher.name, made.world_size) == ("in_process", 1)


def test_detection_can_be_switched_off(plan: Plan) -> None:
    made = plan(environ={**TORCHRUN, "STRATAGEM_CLUSTER": "None"}, strategy="single_device")
    assert made.cluster_environment.name == "plain"
    assert "switched off by STRATAGEM_CLUSTER=none" in made.cluster_environment.why
    assert made.launcher.name == "in_process"


def test_a_variable_chooses_the_cluster(plan: Plan) -> None:
    environ = {**MOON, **ONE_NODE, "STRATAGEM_CLUSTER": "Moon"}
    made = plan(environ=environ, accelerator="cpu", strategy="ddp", devices=2)
    assert made.cluster_environment.name == "moon"
    assert made.cluster_environment.why == "STRATAGEM_CLUSTER=Moon"
    assert made.launcher.name == "external"


def test_an_unknown_cluster_of_a_variable_names_the_variable(refused: Callable[..., str]) -> None:
    text = refused(UnknownNameError, environ={"STRATAGEM_CLUSTER": "slurrm"})
    assert text.startswith("STRATAGEM_CLUSTER=slurrm: unknown cluster environment 'slurrm'.")
    assert "Installed: Kubeflow, LSF, MPI, SLURM, TorchElastic, moon, moonbase, plain." in text


def test_of_several_clusters_the_one_with_the_highest_priority_is_taken(plan: Plan) -> None:
    assert plan(environ=MOON).cluster_environment.name == "moon"
    made = plan(environ={**MOON, **ONE_NODE})
    assert made.cluster_environment.name == "TorchElastic"
    (moon,) = (each for each in made.rejected_environments if each.name == "moon")
    assert moon.why == "TorchElastic goes before it"


def test_a_cluster_is_taken_when_all_its_variables_are_set(plan: Plan) -> None:
    made = plan(environ={"MOON_JOB": "7"})
    assert made.cluster_environment.name == "plain"
    (moon,) = (each for each in made.rejected_environments if each.name == "moon")
    assert moon.why == "MOON_RANKS is not set, though MOON_JOB is"
    rows = [line.split(maxsplit=5) for line in made.explain(why=True).splitlines()]
    assert ["not", "taken", "moon", "strangers", "1.0", moon.why] in rows


def test_a_named_cluster_is_not_detected_but_taken(plan: Plan) -> None:
    made = plan(cluster_environment="torchelastic", accelerator="cpu")
    assert made.cluster_environment.name == "TorchElastic"
    assert made.cluster_environment.why == "your argument"
    assert made.launcher.name == "in_process"


class Cluster:
    """What resolving sees of a ClusterEnvironment that the user made."""

    def __init__(self, *, external: bool = True, rank: int = 0) -> None:
        self.creates_processes_externally = external
        self.rank = rank

    def world_size(self) -> int:
        return 4

    def local_world_size(self) -> int:
        return 2

    def global_rank(self) -> int:
        return self.rank


def test_a_cluster_object_is_asked_itself(plan: Plan) -> None:
    given = Cluster()
    made = plan(cluster_environment=given)
    assert made.cluster_environment.build() is given
    assert made.cluster_environment.name == "Cluster"
    assert (made.devices, made.num_nodes, made.launcher.name) == ((0, 1), 2, "external")
    assert plan(cluster_environment=Cluster(external=False)).launcher.name == "script"


def test_a_cluster_objects_rank_counts_too(refused: Callable[..., str]) -> None:
    text = refused(cluster_environment=Cluster(rank=3), strategy="single_device")
    assert "this process is rank 3 of 4 (Cluster)" in text


@pytest.mark.parametrize("given", [5, Cluster])
def test_something_else_is_no_cluster(refused: Callable[..., str], given: object) -> None:
    text = refused(cluster_environment=given)
    assert f"cluster_environment={given!r}: expected a name or an instance of" in text
    assert "stratagem.environments.ClusterEnvironment" in text
    assert ("received a class: call it" in text) == isinstance(given, type)


# -- launcher


def test_strategy_object_selects_a_listed_launcher(plan: Plan) -> None:
    by_fork = dataclasses.replace(PARALLEL, launchers=("script", "fork"))
    made = plan(strategy=strategy_object(by_fork, launcher="fork"), devices=2)
    assert made.launcher.name == "fork"
    assert plan(strategy="by_fork", devices=2).launcher.name == "script"


def test_another_launcher_is_refused(refused: Callable[..., str]) -> None:
    text = refused(strategy=strategy_object(launcher="fork"), devices=2)
    assert "is started by 'script', received launcher='fork'" in text


def test_a_script_cannot_be_run_again_in_a_notebook(refused: Callable[..., str]) -> None:
    text = refused(strategy="ddp", devices=2, interactive=True)
    assert "the strategy 'ddp' starts its processes by the launcher 'script'" in text
    assert "in a notebook" in text
    assert "move the code to a script, or pass devices=1" in text
    assert text.endswith("or strategy='ddp_notebook', or start_method='fork' to the strategy")


def test_in_a_notebook_the_strategy_for_notebooks_is_taken_and_named() -> None:
    fork = LauncherSpec(name="fork", target="nowhere:Nothing", api_version=1, interactive=True)
    registry = registry_of(("notebooks", plugin_of([fork])))

    def plan(strategy: str) -> RunPlan:
        request = RunRequest(
            strategy=strategy, accelerator="cpu", devices=2, environ={}, interactive=True
        )
        return resolve(request, registry, probe=probe)

    made = plan("auto")
    assert (made.strategy.name, made.launcher.name) == ("ddp_notebook", "fork")
    assert made.strategy.why.endswith("in a notebook")
    with pytest.raises(ConfigurationError, match="or strategy='ddp_notebook'"):
        plan("ddp")


# -- precision


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (32, "32-true"),
        ("32", "32-true"),
        (64, "64-true"),
        ("bf16", "bf16-mixed"),
        ("BF16-true", "bf16-true"),
        (None, "32-true"),
    ],
)
def test_precisions_by_number_and_name(plan: Plan, asked: Any, expected: str) -> None:
    assert plan(precision=asked).precision.name == expected


def test_plan_marks_the_default_precision(plan: Plan) -> None:
    assert plan().precision.why == "the default"
    assert plan(precision=64).precision.why == "your argument"


def test_missing_precision_names_its_distribution(
    refused: Callable[..., str],
) -> None:
    text = refused(UnknownNameError, precision=16)
    assert text.startswith("precision '16' needs stratagem-backend-cuda, which is not installed")
    assert "pip install stratagem-backend-cuda" in text
    assert "32-true" in text


def test_a_precision_that_the_strategy_does_not_take_is_refused(
    refused: Callable[..., str],
) -> None:
    text = refused(strategy="zero", precision=32)
    assert "'zero' takes the precisions 'bf16-mixed', received precision=32" in text
    assert "change one of the two" in text


def test_a_precision_of_another_accelerator_is_refused(
    plan: Plan, refused: Callable[..., str]
) -> None:
    assert plan(precision="fp8").precision.name == "fp8"
    text = refused(precision=8, accelerator="cpu")
    assert "precision=8 works on 'gpu', received accelerator='cpu': change one" in text


def test_plan_keeps_a_precision_object(plan: Plan) -> None:
    given = types.SimpleNamespace(name="mine")
    made = plan(precision=given)
    assert (made.precision.name, made.precision.build()) == ("mine", given)


def test_a_precision_object_is_judged_like_one_selected_by_name(
    refused: Callable[..., str],
) -> None:
    text = refused(strategy="zero", precision=types.SimpleNamespace(name="mine"))
    assert "'zero' takes the precisions 'bf16-mixed', received precision='mine': change one" in text


def test_fsdp_refuses_a_precision_that_is_not_shardable(
    refused: Callable[..., str],
) -> None:
    given = types.SimpleNamespace(name="four-bits", shardable=False)
    text = refused(strategy="fsdp", precision=given, accelerator="cpu")
    assert text == (
        "the strategy 'fsdp' divides parameters between ranks, which those of "
        "precision='four-bits' cannot be: pass strategy='ddp', or another precision"
    )


@pytest.mark.parametrize("given", [1.5, [16], object()])
def test_something_else_is_no_precision(refused: Callable[..., str], given: object) -> None:
    text = refused(precision=given)
    assert f"precision={given!r}: expected a name, 64, 32, 16, 'bf16', or an instance of" in text
    assert "stratagem.precision.Precision" in text


# -- checkpoint IO


def test_checkpoint_io_by_name_and_object(plan: Plan) -> None:
    assert plan(checkpoint_io="single_file").checkpoint_io.why == "your argument"
    given = types.SimpleNamespace(save_checkpoint=None)
    made = plan(checkpoint_io=given)
    assert (made.checkpoint_io.build(), made.checkpoint_io.name) == (given, "SimpleNamespace")


@pytest.mark.parametrize("given", [5, Registry])
def test_something_else_is_no_checkpoint_io(refused: Callable[..., str], given: object) -> None:
    text = refused(checkpoint_io=given)
    assert f"checkpoint_io={given!r}: expected a name or an instance of" in text
    assert "stratagem.checkpoint.CheckpointIO" in text


# -- parts of the strategy


def test_parts_may_be_given_to_the_strategy(plan: Plan) -> None:
    given = strategy_object(
        accelerator="cpu",
        precision="bf16-true",
        checkpoint_io="single_file",
        cluster_environment="plain",
    )
    made = plan(strategy=given, devices=2)
    assert (made.accelerator.name, made.precision.name) == ("cpu", "bf16-true")
    assert made.checkpoint_io.why == made.cluster_environment.why == "your argument"
    assert plan(strategy=given, precision="bf16-true", accelerator="cpu") is not None


@pytest.mark.parametrize(
    ("part", "in_strategy", "in_request"),
    [
        ("accelerator", "gpu", "cpu"),
        ("precision", "64-true", "bf16-mixed"),
        ("checkpoint_io", "mine", "single_file"),
        ("cluster_environment", "SLURM", "plain"),
    ],
)
def test_a_part_given_twice_is_refused(
    refused: Callable[..., str], part: str, in_strategy: str, in_request: str
) -> None:
    given = strategy_object(PARALLEL, **{part: in_strategy})
    text = refused(strategy=given, devices=2, **{part: in_request})
    assert f"{part}={in_request!r} was passed, but the strategy was made with" in text
    assert f"{part}={in_strategy!r}: give it in one place" in text


def test_a_registered_strategys_arguments_are_its_parts(registry: Registry, plan: Plan) -> None:
    registry.add(strategy("preset", init_args={"accelerator": "cpu", "precision_plugin": "64"}))
    made = plan(strategy="preset", devices=2)
    assert (made.accelerator.name, made.precision.name) == ("cpu", "64-true")
    registry.remove("strategy", "preset")


# -- hooks


def planned_with(registry: Registry, **asked: Any) -> RunPlan:
    request = RunRequest(accelerator="cpu", environ={}, interactive=False, **asked)
    return resolve(request, registry, probe=probe)


def test_a_plugin_chooses_for_auto_and_the_plan_says_so() -> None:
    seen: dict[str, Any] = {}

    def choose(request: RunRequest, candidates: tuple[str, ...]) -> str:
        seen.update(request=request, candidates=candidates)
        return "one_node"

    chooser = plugin_of([], stratagem_choose_strategy=choose)
    registry = registry_of(("strangers", plugin_of(STRANGERS)), ("advice", chooser))
    made = planned_with(registry, devices=2)
    assert made.strategy.name == "one_node"
    assert made.strategy.why == "chosen by the plugin advice:entry"
    assert seen["request"].devices == 2
    # For two CPU devices.
    assert {"by_fork", "ddp", "one_node", "spmd"} <= {*seen["candidates"]}
    assert {"on_tpu", "single_device"}.isdisjoint(seen["candidates"])
    seen.clear()
    assert planned_with(registry, devices=2, strategy="ddp").strategy.name == "ddp"
    assert seen == {}, "the plugin was asked although a strategy was named"


def test_the_first_plugin_with_an_answer_decides() -> None:
    def nothing(candidates: tuple[str, ...]) -> None: ...

    def choose() -> str:
        return "spmd"

    registry = registry_of(
        ("strangers", plugin_of(STRANGERS)),
        ("advice", plugin_of(stratagem_choose_strategy=choose)),
        ("later", plugin_of(stratagem_choose_strategy=nothing)),
    )
    assert planned_with(registry).strategy.why == "chosen by the plugin advice:entry"


@pytest.mark.parametrize("answer", ["zero", "no_such_strategy", 3])
def test_a_choice_that_does_not_fit_names_the_plugin(answer: Any) -> None:
    chooser = plugin_of(stratagem_choose_strategy=lambda: answer)
    registry = registry_of(("strangers", plugin_of(STRANGERS)), ("advice", chooser))
    with pytest.raises(ConfigurationError) as caught:
        planned_with(registry, devices=2)
    text = str(caught.value)
    assert f"the plugin advice:entry chose the strategy {answer!r}" in text
    assert "expected one of 'by_fork' or 'ddp' or " in text
    assert "'one_node' or 'spmd'" in text
    assert "STRATAGEM_DISABLE_PLUGINS" in text


def test_a_plugin_observes_every_plan() -> None:
    seen: list[RunPlan] = []

    def watch(plan: RunPlan) -> None:
        seen.append(plan)

    registry = registry_of(("watch", plugin_of(stratagem_run_planned=watch)))
    made = planned_with(registry)
    assert seen == [made]


def test_a_plugin_may_refuse_a_plan() -> None:
    def refuse(plan: RunPlan) -> None:
        raise ConfigurationError(f"{plan.world_size} process(es) are more than the quota")

    registry = registry_of(("quota", plugin_of(stratagem_run_planned=refuse)))
    with pytest.raises(ConfigurationError, match="are more than the quota"):
        planned_with(registry)


@pytest.mark.parametrize("hook", ["stratagem_run_planned", "stratagem_choose_strategy"])
def test_failed_hook_names_its_plugin(hook: str) -> None:
    def of_plan(plan: RunPlan) -> None:
        raise KeyError("quota")

    def of_choice() -> None:
        raise KeyError("quota")

    hooks: dict[str, Any] = {hook: of_plan if hook.endswith("planned") else of_choice}
    registry = registry_of(("quota", plugin_of(**hooks)))
    with pytest.raises(PluginError, match=rf"the plugin quota:\S+ failed in {hook} with KeyErr"):
        planned_with(registry)


def test_an_objection_that_fails_is_named() -> None:
    def fails(plan: RunPlan) -> str:
        raise KeyError("quota")

    registry = registry_of(("quota", plugin_of([strategy("mine", incompatible_because=fails)])))
    with pytest.raises(
        PluginError, match="the incompatible_because of the strategy 'mine' failed with KeyE"
    ):
        planned_with(registry, strategy="mine")


# -- names


def test_an_ambiguous_name_is_refused_and_the_qualified_one_taken() -> None:
    registry = registry_of(
        ("one", plugin_of([strategy("wanted")])), ("two", plugin_of([strategy("wanted")]))
    )
    with pytest.raises(AmbiguousNameError, match="'one:wanted', 'two:wanted'"):
        planned_with(registry, strategy="wanted")
    assert planned_with(registry, strategy="two:wanted").strategy.provider == "two 1.0"


def test_an_unknown_strategy_names_the_distribution_to_install(refused: Callable[..., str]) -> None:
    text = refused(UnknownNameError, strategy="deepspeed_stage_3_offload")
    assert text.startswith("strategy 'deepspeed_stage_3_offload' needs stratagem-backend-deepsp")
    assert "pip install stratagem-backend-deepspeed" in text
    assert "Installed: by_fork, ddp, " in text


# -- the plan


def test_the_plan_explains_each_choice_in_a_line(plan: Plan) -> None:
    made = plan(accelerator="cpu", strategy="ddp", devices=2)
    rows = {row[0]: row[1:] for row in made.rows() if row[0] != "  not taken"}
    assert rows["devices"] == ("0, 1", "", "your argument")
    assert rows["world_size"] == ("2", "", "1 node(s) of 2 process(es)")
    assert rows["strategy"] == ("ddp", "stratagem-backend-torch 1.0", "your argument")
    lines = made.explain().splitlines()
    assert len(lines) == len(rows) == 8
    assert lines[0].split() == [
        "strategy",
        "ddp",
        "stratagem-backend-torch",
        "1.0",
        "your",
        "argument",
    ]


def test_explain_why_lists_rejected_environments(plan: Plan) -> None:
    made = plan(accelerator="cpu", strategy="ddp", devices=2)
    others = [line for line in made.explain(why=True).splitlines() if "not taken" in line]
    assert len(others) == len(made.rejected_environments) > 0
    assert "not taken" not in made.explain()


def test_a_plan_cannot_be_changed(plan: Plan) -> None:
    made = plan()
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.num_nodes = 2  # type: ignore[misc]


def test_resolving_reads_the_environment_from_the_request(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert plan().cluster_environment.name == "plain"
    assert RunRequest().environ["TORCHELASTIC_RUN_ID"] == "none"


# ---------------------------------------------------------------- launchers of others


@pytest.mark.parametrize("name", ["ddp", "fsdp", "ddp_sharded"])
def test_any_launcher_serves_a_strategy_that_takes_any(name: str, plan: Plan) -> None:
    chosen = plan(strategy=name, devices=2, launcher="rockets")
    assert (chosen.launcher.name, chosen.launcher.why) == ("rockets", "your argument")
    assert chosen.remote


def test_launcher_object_sets_name_and_remote_of_the_plan(plan: Plan) -> None:
    class Given:
        new_processes = True

        def launch(self) -> None: ...

    chosen = plan(strategy="ddp", devices=2, launcher=Given())
    assert (chosen.launcher.name, chosen.launcher.why) == ("Given", "you passed it")
    assert chosen.remote
    with pytest.raises(ConfigurationError, match="received a class: call it"):
        plan(strategy="ddp", devices=2, launcher=Given)
    with pytest.raises(ConfigurationError, match=r"instance of stratagem\.launch\.Launcher"):
        plan(strategy="ddp", devices=2, launcher=3)


def test_a_launcher_in_the_strategys_own_arguments_may_be_a_strangers(plan: Plan) -> None:
    assert plan(strategy=DDPStrategy(launcher="rockets"), devices=2).launcher.name == "rockets"
    with pytest.raises(ConfigurationError, match="give it in one place"):
        plan(strategy="ddp_spawn", devices=2, launcher="rockets")


def test_a_launcher_alone_asks_for_ranks_even_on_one_device(plan: Plan) -> None:
    chosen = plan(accelerator="cpu", devices=1, launcher="rockets")
    assert (chosen.strategy.name, chosen.launcher.name) == ("ddp", "rockets")


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"strategy": "ddp", "launcher": "rocket"}, r"unknown launcher 'rocket'.*'rockets'\?"),
        ({"strategy": "ddp", "launcher": "external"}, "launcher='external' starts no ranks"),
        (
            {"strategy": "single_device", "launcher": "rockets"},
            "'single_device' trains in one process, so the launcher 'rockets' has no ranks",
        ),
        (
            {"strategy": "by_fork", "launcher": "rockets"},
            "'by_fork' is started by 'script' or 'fork', received launcher='rockets'",
        ),
    ],
)
def test_a_launcher_that_does_not_fit_is_refused(
    asked: dict[str, Any], text: str, plan: Plan
) -> None:
    with pytest.raises(ConfigurationError, match=text):
        plan(accelerator="cpu", devices=1, **asked)


def test_ranks_that_are_there_already_are_not_started_again(plan: Plan) -> None:
    environ = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    chosen = plan(strategy="ddp", accelerator="cpu", launcher="rockets", environ=environ)
    assert chosen.launcher.name == "external"


def test_a_launcher_that_spans_nodes_needs_no_cluster_and_no_devices_here(plan: Plan) -> None:
    chosen = plan(strategy="ddp", accelerator="tpu", devices=4, num_nodes=3, launcher="everywhere")
    assert (chosen.world_size, chosen.num_nodes, chosen.devices) == (12, 3, (0, 1, 2, 3))
    with pytest.raises(ConfigurationError, match="num_nodes=3 needs a cluster"):
        plan(strategy="ddp", accelerator="cpu", devices=4, num_nodes=3, launcher="rockets")


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"devices": 4}, "'everywhere' starts ranks elsewhere: name the accelerator"),
        ({"accelerator": "tpu"}, "'everywhere' starts ranks elsewhere: pass the number of tpu dev"),
        ({"accelerator": "tpu", "devices": -1}, "devices=-1 counts the devices of this machine"),
    ],
)
def test_remote_launcher_needs_a_number_of_devices(asked: Any, text: str, plan: Plan) -> None:
    with pytest.raises(ConfigurationError, match=text):
        plan(strategy="ddp", launcher="everywhere", **asked)


def test_a_launcher_names_the_cluster_environment_of_its_ranks(plan: Plan) -> None:
    asked = {"strategy": "ddp", "accelerator": "tpu", "devices": 4, "launcher": "everywhere"}
    chosen = plan(**asked)
    assert chosen.cluster_environment.name == "moonbase"
    assert chosen.cluster_environment.why == "that of everywhere's ranks"
    assert "moonbase" not in {other.name for other in chosen.rejected_environments}
    # What the user has named goes before it, and so does the cluster that has started this rank.
    assert plan(**asked, cluster_environment="plain").cluster_environment.name == "plain"
    moon = {"MOON_JOB": "1", "MOON_RANKS": "4", "MOON_RANKS_HERE": "4", "MOON_LOCAL_RANK": "0"}
    started = plan(strategy="ddp", devices=4, launcher="everywhere", environ=moon)
    assert (started.cluster_environment.name, started.launcher.name) == ("moon", "external")
