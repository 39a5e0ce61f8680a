"""From what the user asked for to what will run: `resolve(RunRequest, Registry) -> RunPlan`.

Pure functions over specs: nothing imports torch or starts a process, and the environment is read
from the request. Every wrong combination is refused here, before a process starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from stratagem.discovery.capabilities import Capabilities
from stratagem.discovery.registry import Registry
from stratagem.discovery.specs import Availability, PrecisionSpec, StrategySpec, asked_function
from stratagem.errors import ConfigurationError
from stratagem.plan import components
from stratagem.plan.cluster import CLUSTER_VARIABLE, find_cluster
from stratagem.plan.plan import (
    GIVEN,
    NAMED,
    Draft,
    RunPlan,
    RunRequest,
    Selection,
    accepts,
    either,
    is_compatible,
    presets,
)
from stratagem.plan.step_options import check_compiles


def resolve(
    request: RunRequest, registry: Registry, *, probe: Callable[[Any], Availability] | None = None
) -> RunPlan:
    """Choose every component that the request leaves open and check that they fit together.

    Args:
        request: the request of the user.
        registry: the installed components.
        probe: returns the devices that an accelerator (its spec, or an object) finds on this
            machine; None queries the accelerator itself.

    Raises:
        ConfigurationError: the request cannot be met; the message has the expected value, the
            received value and a remedy.
    """
    draft = Draft(request, registry, probe or components.probe_accelerator)
    draft.named = _named_strategy(draft)
    draft.preset = presets(draft.named)
    draft.cluster = find_cluster(draft)
    draft.requested_launcher = components.find_requested_launcher(draft, draft.named)
    draft.accelerator, draft.availability = components.choose_accelerator(draft)
    draft.devices, draft.devices_why = components.choose_devices(draft)
    draft.strategy = draft.named or _auto_strategy(draft)
    if draft.named is None:
        draft.preset = presets(draft.strategy)
        draft.requested_launcher = components.find_requested_launcher(draft, draft.strategy)
    draft.num_nodes = components.choose_num_nodes(draft)
    _check_strategy(draft)
    _check_world(draft)
    draft.launcher = components.choose_launcher(draft)
    draft.cluster = components.cluster_of_ranks(draft)
    plan = RunPlan(
        request=request,
        accelerator=draft.accelerator,
        devices=draft.devices,
        devices_why=draft.devices_why,
        strategy=draft.strategy,
        capabilities=draft.capabilities,
        precision=components.choose_precision(draft),
        cluster_environment=draft.cluster.environment,
        launcher=draft.launcher,
        checkpoint_io=components.choose_checkpoint_io(draft),
        num_nodes=draft.num_nodes,
        rejected_environments=draft.cluster.rejected,
    )
    _check_compatibility(plan)
    for _ in registry.call_hook("stratagem_run_planned", plan=plan):
        pass  # a plugin observes the plan, or refuses it by an error of ours
    return plan


# -- strategy


def _named_strategy(draft: Draft) -> Selection | None:
    wanted = draft.request.strategy
    if wanted is None or wanted == "auto":
        return None
    if isinstance(wanted, str):
        return draft.find("strategy", wanted, NAMED)
    capabilities = getattr(wanted, "capabilities", None)
    if isinstance(wanted, type) or not isinstance(capabilities, Capabilities):
        raise ConfigurationError(
            f"strategy={wanted!r}: expected a name or an instance of "
            "stratagem.strategies.Strategy with the class attribute capabilities"
            + (", received a class: call it" if isinstance(wanted, type) else "")
        )
    return Selection("strategy", type(wanted).__name__, GIVEN, "you passed it", wanted)


def _auto_strategy(draft: Draft) -> Selection:
    devices, cluster, launcher = draft.devices, draft.cluster, draft.requested_launcher
    several = (
        len(devices) > 1
        or draft.request.num_nodes > 1
        or launcher is not None
        or (cluster.launched_this_process and (cluster.world_size or 1) > 1)
    )
    fitting = tuple(
        dict.fromkeys(  # a name that two distributions claim stands there once
            name
            for name, capabilities in _strategies(draft)
            if is_compatible(capabilities, draft.accelerator)
            and (capabilities.many_devices or not several)
        )
    )
    if (chosen := _chosen_by_plugin(draft, fitting)) is not None:
        return chosen
    if not several:
        return draft.find("strategy", "single_device", "one device and no strategy named")
    why = f"{len(devices)} device(s) a node and no strategy named"
    interactive = draft.request.interactive and not cluster.launched_this_process
    if interactive and launcher is None and "ddp_notebook" in fitting:
        return draft.find("strategy", "ddp_notebook", f"{why}, in a notebook")
    return draft.find("strategy", "ddp", why)


def _chosen_by_plugin(draft: Draft, fitting: tuple[str, ...]) -> Selection | None:
    """Return the first answer of a plugin's `stratagem_choose_strategy`, if there is one."""
    arguments = {"request": draft.request, "candidates": fitting}
    for plugin, answer in draft.registry.call_hook("stratagem_choose_strategy", **arguments):
        if answer is None:
            continue
        if answer not in fitting:
            raise ConfigurationError(
                f"the plugin {plugin} chose the strategy {answer!r} for this request; expected "
                f"one of {either(fitting)}: name a strategy, or disable the plugin with "
                "STRATAGEM_DISABLE_PLUGINS"
            )
        return draft.find("strategy", answer, f"chosen by the plugin {plugin}")
    return None


# -- compatibility of the components


def _check_strategy(draft: Draft) -> None:
    strategy, capabilities, accelerator = draft.strategy, draft.capabilities, draft.accelerator
    devices, num_nodes = draft.devices, draft.num_nodes
    if not accepts(capabilities.accelerators, accelerator):
        raise ConfigurationError(
            f"the strategy {strategy.name!r} runs on "
            f"{either(capabilities.accelerators)}, received accelerator={accelerator.name!r}: "
            "change one of the two"
        )
    if not is_compatible(capabilities, accelerator):
        made_for_it = tuple(
            name
            for name, theirs in _strategies(draft)
            if theirs.accelerators is not None and accepts(theirs.accelerators, accelerator)
        )
        raise ConfigurationError(
            f"accelerator={accelerator.name!r} takes strategies that were made for it alone, "
            f"{either(made_for_it)}; received {strategy.name!r}: change one of the two"
        )
    steps = draft.request.step_options
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
            f"{draft.request.devices!r} ({len(devices)} devices): pass devices=1"
            + _or_another(draft, "many_devices", "several devices")
        )
    if num_nodes > 1 and not capabilities.multi_node:
        raise ConfigurationError(
            f"the strategy {strategy.name!r} runs on one node, received num_nodes={num_nodes}: "
            "pass num_nodes=1" + _or_another(draft, "multi_node", "several nodes")
        )


def _or_another(draft: Draft, capability: str, what: str) -> str:
    """Return the advice to pass a strategy with a capability; "": none has it on these devices."""
    names = [
        name
        for name, capabilities in _strategies(draft)
        if is_compatible(capabilities, draft.accelerator) and getattr(capabilities, capability)
    ]
    name = "ddp" if "ddp" in names else next(iter(names), "")
    return f", or a strategy for {what} such as {name!r}" if name else ""


def _strategies(draft: Draft) -> Iterator[tuple[str, Capabilities]]:
    """Yield the name and the capabilities of each strategy."""
    for candidate in draft.registry.candidates("strategy"):
        if isinstance(candidate.spec, StrategySpec):
            yield candidate.spec.name, candidate.spec.capabilities


def _check_world(draft: Draft) -> None:
    """Compare the processes of the plan with those that run already."""
    strategy, capabilities, cluster = draft.strategy, draft.capabilities, draft.cluster
    devices, num_nodes = draft.devices, draft.num_nodes
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
            f"devices={draft.request.devices!r} means {len(devices)} process(es) on each "
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
