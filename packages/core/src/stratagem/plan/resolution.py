"""From what the user asked for to what will run: `resolve(RunRequest, Registry) -> RunPlan`.

Pure functions over specs: nothing imports torch or starts a process, and the environment is read
from the request. Every wrong combination is refused here, before a process starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from stratagem.discovery.capabilities import Capabilities
from stratagem.discovery.registry import Registry
from stratagem.discovery.specs import Availability, PrecisionSpec, StrategySpec, asked_function
from stratagem.errors import ConfigurationError
from stratagem.plan.cluster import CLUSTER_VARIABLE, Cluster, find_cluster
from stratagem.plan.components import (
    asked_launcher,
    choose_accelerator,
    choose_checkpoint_io,
    choose_devices,
    choose_launcher,
    choose_num_nodes,
    choose_precision,
    cluster_of_ranks,
    devices_elsewhere,
    probe_accelerator,
)
from stratagem.plan.plan import (
    GIVEN,
    NAMED,
    Resolution,
    RunPlan,
    RunRequest,
    Selection,
    accepts,
    capabilities_of,
    either,
    is_compatible,
    presets,
    supports,
)
from stratagem.plan.step_options import check_compiles


def resolve(
    request: RunRequest, registry: Registry, *, probe: Callable[[Any], Availability] | None = None
) -> RunPlan:
    """Choose every component that the request leaves open and check that they fit together.

    Args:
        request: what the user asked for.
        registry: what there is.
        probe: returns what an accelerator (its spec, or an object) finds on this machine; None
            asks the accelerator itself.

    Raises:
        ConfigurationError: the request cannot be met; says what was expected, what was received
            and what to do.
    """
    # Each decision needs the earlier ones.
    resolution = Resolution(request, registry, probe or probe_accelerator)
    named = _named_strategy(resolution)
    wanted = None if named is None else capabilities_of(named)
    resolution = replace(resolution, preset=presets(named))
    cluster = find_cluster(resolution)
    launcher = asked_launcher(resolution, named, cluster)
    elsewhere = launcher if supports(launcher, "devices_elsewhere") else None
    accelerator, found = choose_accelerator(resolution, wanted, elsewhere=elsewhere)
    if elsewhere is not None:
        devices, devices_why = devices_elsewhere(resolution, accelerator, elsewhere)
    else:
        devices, devices_why = choose_devices(resolution, accelerator, found, wanted, cluster)

    strategy = named or _auto_strategy(resolution, accelerator, devices, cluster, launcher)
    capabilities = capabilities_of(strategy)
    if named is None:
        resolution = replace(resolution, preset=presets(strategy))
        launcher = asked_launcher(resolution, strategy, cluster)
    num_nodes = choose_num_nodes(resolution, len(devices), cluster, capabilities, launcher)
    _check_strategy(resolution, strategy, capabilities, accelerator, devices, num_nodes)
    _check_world(resolution, strategy, capabilities, devices, num_nodes, cluster)

    launcher = choose_launcher(resolution, strategy, capabilities, cluster, launcher)
    cluster = cluster_of_ranks(resolution, launcher, cluster)
    plan = RunPlan(
        request=request,
        accelerator=accelerator,
        devices=devices,
        devices_why=devices_why,
        strategy=strategy,
        capabilities=capabilities,
        precision=choose_precision(resolution, strategy, capabilities, accelerator),
        cluster_environment=cluster.environment,
        launcher=launcher,
        checkpoint_io=choose_checkpoint_io(resolution, capabilities),
        num_nodes=num_nodes,
        rejected_environments=cluster.rejected,
    )
    _check_compatibility(plan)
    for _ in registry.call_hook("stratagem_run_planned", plan=plan):
        pass  # a plugin observes the plan, or refuses it by an error of ours
    return plan


# -- strategy


def _named_strategy(resolution: Resolution) -> Selection | None:
    wanted = resolution.request.strategy
    if wanted is None or wanted == "auto":
        return None
    if isinstance(wanted, str):
        return resolution.find("strategy", wanted, NAMED)
    capabilities = getattr(wanted, "capabilities", None)
    if isinstance(wanted, type) or not isinstance(capabilities, Capabilities):
        raise ConfigurationError(
            f"strategy={wanted!r}: expected a name or an instance of "
            "stratagem.strategies.Strategy with the class attribute capabilities"
            + (", received a class: call it" if isinstance(wanted, type) else "")
        )
    return Selection("strategy", type(wanted).__name__, GIVEN, "you passed it", wanted)


def _auto_strategy(
    resolution: Resolution,
    accelerator: Selection,
    devices: tuple[int, ...],
    cluster: Cluster,
    launcher: Selection | None,
) -> Selection:
    several = (
        len(devices) > 1
        or resolution.request.num_nodes > 1
        or launcher is not None
        or (cluster.launched_this_process and (cluster.world_size or 1) > 1)
    )
    fitting = tuple(
        dict.fromkeys(  # a name that two distributions claim stands there once
            name
            for name, capabilities in _strategies(resolution)
            if is_compatible(capabilities, accelerator)
            and (capabilities.many_devices or not several)
        )
    )
    if (chosen := _chosen_by_plugin(resolution, fitting)) is not None:
        return chosen
    if not several:
        return resolution.find("strategy", "single_device", "one device and no strategy named")
    why = f"{len(devices)} device(s) a node and no strategy named"
    interactive = resolution.request.interactive and not cluster.launched_this_process
    if interactive and launcher is None and "ddp_notebook" in fitting:
        return resolution.find("strategy", "ddp_notebook", f"{why}, in a notebook")
    return resolution.find("strategy", "ddp", why)


def _chosen_by_plugin(resolution: Resolution, fitting: tuple[str, ...]) -> Selection | None:
    """Return the first answer of a plugin's `stratagem_choose_strategy`, if there is one."""
    arguments = {"request": resolution.request, "candidates": fitting}
    for plugin, answer in resolution.registry.call_hook("stratagem_choose_strategy", **arguments):
        if answer is None:
            continue
        if answer not in fitting:
            raise ConfigurationError(
                f"the plugin {plugin} chose the strategy {answer!r} for this request; expected "
                f"one of {either(fitting)}: name a strategy, or disable the plugin with "
                "STRATAGEM_DISABLE_PLUGINS"
            )
        return resolution.find("strategy", answer, f"chosen by the plugin {plugin}")
    return None


# -- compatibility of the components


def _check_strategy(
    resolution: Resolution,
    strategy: Selection,
    capabilities: Capabilities,
    accelerator: Selection,
    devices: tuple[int, ...],
    num_nodes: int,
) -> None:
    if not accepts(capabilities.accelerators, accelerator):
        raise ConfigurationError(
            f"the strategy {strategy.name!r} runs on "
            f"{either(capabilities.accelerators)}, received accelerator={accelerator.name!r}: "
            "change one of the two"
        )
    if not is_compatible(capabilities, accelerator):
        made_for_it = tuple(
            name
            for name, theirs in _strategies(resolution)
            if theirs.accelerators is not None and accepts(theirs.accelerators, accelerator)
        )
        raise ConfigurationError(
            f"accelerator={accelerator.name!r} takes strategies that were made for it alone, "
            f"{either(made_for_it)}; received {strategy.name!r}: change one of the two"
        )
    steps = resolution.request.step_options
    if not capabilities.gradient_clipping and steps is not None and steps.clip is not None:
        raise ConfigurationError(
            f"the strategy {strategy.name!r} cannot clip gradients, received gradient_clip_val="
            f"{steps.clip.value}: leave it out, or use another strategy"
        )
    if steps is not None and steps.compilation is not None:
        check_compiles(strategy.name, capabilities, steps.compilation)
    if len(devices) > 1 and not capabilities.many_devices:
        raise ConfigurationError(
            f"the strategy {strategy.name!r} uses one device, received devices="
            f"{resolution.request.devices!r} ({len(devices)} devices): pass devices=1"
            + _or_another(resolution, accelerator, "many_devices", "several devices")
        )
    if num_nodes > 1 and not capabilities.multi_node:
        raise ConfigurationError(
            f"the strategy {strategy.name!r} runs on one node, received num_nodes={num_nodes}: "
            "pass num_nodes=1" + _or_another(resolution, accelerator, "multi_node", "several nodes")
        )


def _or_another(resolution: Resolution, accelerator: Selection, capability: str, what: str) -> str:
    """Return the advice to pass a strategy with a capability; "": none has it on these devices."""
    names = [
        name
        for name, capabilities in _strategies(resolution)
        if is_compatible(capabilities, accelerator) and getattr(capabilities, capability)
    ]
    name = "ddp" if "ddp" in names else next(iter(names), "")
    return f", or a strategy for {what} such as {name!r}" if name else ""


def _strategies(resolution: Resolution) -> Iterator[tuple[str, Capabilities]]:
    """Yield the name and the capabilities of each strategy."""
    for candidate in resolution.registry.candidates("strategy"):
        if isinstance(candidate.spec, StrategySpec):
            yield candidate.spec.name, candidate.spec.capabilities


def _check_world(
    resolution: Resolution,
    strategy: Selection,
    capabilities: Capabilities,
    devices: tuple[int, ...],
    num_nodes: int,
    cluster: Cluster,
) -> None:
    """Compare the processes of the plan with those that run already."""
    planned = len(devices) * num_nodes
    if not cluster.launched_this_process:
        if not capabilities.one_process and planned > 1 and cluster.why_not_started:
            raise ConfigurationError(
                f"the cluster environment {cluster.name!r} ({cluster.environment.why}) has not "
                f"started this process: {cluster.why_not_started}. Start one process for each of "
                f"the {planned} ranks with the cluster's launcher, or name no "
                "cluster environment, to let the strategy start them"
            )
        return
    world = cluster.world_size or 1
    if capabilities.one_process:
        rank = cluster.rank or 0
        if world > 1 and rank > 0 and not capabilities.multi_node:
            raise ConfigurationError(
                f"this process is rank {rank} of {world} ({cluster.name}), but the "
                f"strategy {strategy.name!r} trains in one process: use a strategy for several "
                "processes such as 'ddp', guard the call with `if trainer.is_global_zero:`, or "
                f"set {CLUSTER_VARIABLE}=none to let each process work for itself"
            )
        return
    if (local := cluster.local_world_size) not in (None, len(devices)):
        raise ConfigurationError(
            f"devices={resolution.request.devices!r} means {len(devices)} process(es) on each "
            f"node, but {cluster.name} has started {local} here"
            f"{cluster.said_by('local_world_size', 'world_size')}: make the two "
            "agree, or leave devices='auto'"
        )
    if world != planned:
        raise ConfigurationError(
            f"{len(devices)} device(s) on each of {num_nodes} node(s) make "
            f"{planned} processes, but {cluster.name} has started "
            f"{world}{cluster.said_by('world_size')}: make the two agree, or leave "
            "devices='auto' and num_nodes=1"
        )


def _check_compatibility(plan: RunPlan) -> None:
    """Refuse a plan that the strategy or the precision, if selected by name, objects to."""
    for selection in (plan.strategy, plan.precision):
        spec = selection.spec
        if not isinstance(spec, StrategySpec | PrecisionSpec) or spec.incompatible_because is None:
            continue
        if problem := asked_function(spec, "incompatible_because", plan):
            raise ConfigurationError(problem)
