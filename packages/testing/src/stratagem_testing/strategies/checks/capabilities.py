"""Capabilities: what a strategy says that it cannot do is refused, with the reason."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import mse_loss

from stratagem.discovery import StrategySpec, get_registry
from stratagem_testing.strategies.check import Result, check, judge_of
from stratagem_testing.strategies.judging import (
    judge_accepted,
    judge_losses,
    judge_refusal,
    judge_refused,
)
from stratagem_testing.strategies.models import OPTIMIZERS, Learner, build
from stratagem_testing.strategies.probe import Probe


@check("capabilities/refusals")
def _refusals(probe: Probe) -> dict[str, Any]:
    """What the capabilities exclude is refused before a process starts.

    Devices, nodes, launchers, clipping and divergence checks.
    """

    def made(**options: Any) -> Any:
        return probe.said(lambda: probe.trainer(**options))

    registry = get_registry()
    launchers = [
        candidate.spec.name
        for candidate in registry.candidates("launcher")
        if candidate.spec.name not in ("external",)
    ]
    return {
        "several devices": made(devices=2 * max(2, probe.target.devices)),
        "several nodes": made(num_nodes=2),
        "clipping": made(gradient_clip_val=0.5),
        "divergence": made(detect_divergence=1),
        "launchers": {name: made(plugins=["single_file", name]) for name in launchers},
    }


@judge_of(_refusals)
def _judge_refusals(found: Result) -> None:
    can, told = found.capabilities, found.ranks[0]
    if not can.many_devices:
        judge_refusal(
            "devices=4", "many_devices=False", told["several devices"], "device", "strategy"
        )
    if not can.multi_node:
        judge_refusal("num_nodes=2", "multi_node=False", told["several nodes"], "node")
    if not can.gradient_clipping:
        judge_refusal("gradient_clip_val=0.5", "gradient_clipping=False", told["clipping"], "clip")
    else:
        assert told["clipping"] is None, (
            "gradient_clipping=True in the capabilities, and gradient_clip_val was refused: "
            f"{told['clipping']['text']}"
        )
    if not can.replicated:
        judge_refusal(
            "detect_divergence",
            "replicated=False",
            told["divergence"],
            "replicated=False in its capabilities",
        )
    if can.launchers is not None:
        for name, said in told["launchers"].items():
            if name not in can.launchers and found.target.devices > 1:
                judge_refusal(f"the launcher {name!r}", "launchers", said, name, "launcher")


@check("capabilities/of the spec and the class")
def _spec(probe: Probe) -> dict[str, Any]:
    """The spec and the class hold the same capabilities, and the spec's target is the class."""
    if probe.target.is_place:
        return {}  # it is not published
    own = type(probe.trainer().strategy)
    spec = get_registry().find("strategy", probe.target.strategy).spec
    assert isinstance(spec, StrategySpec)
    return {
        "spec": str(spec.capabilities),
        "class": str(own.capabilities),
        "target": f"{spec.target}",
        "is target": own is spec.load(),
    }


@judge_of(_spec)
def _judge_spec(found: Result) -> None:
    told = found.ranks[0]
    if not told:
        return
    assert told["is target"], (
        f"the spec's target {told['target']} is not the class of the strategy that is made: name "
        "the class, and preset its arguments by init_args"
    )
    assert told["spec"] == told["class"], (
        f"the spec's capabilities are {told['spec']}, and those of the class {told['class']}: let "
        "both hold one object"
    )


class _Manual(Learner):
    """Calls backward in training_step."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        loss = mse_loss(self.net(batch[1]), batch[2])
        self.losses.append(float(loss.detach()))
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss


@check("capabilities/backward in forward", reference=True)
def _manual(probe: Probe) -> dict[str, Any]:
    """Manual optimization trains as automatic does; backward_in_forward=False refuses it."""

    def train() -> dict[str, Any]:
        learner = _Manual("dense", "momentum")
        return probe.report(learner, probe.fit(learner, max_epochs=2))

    return probe.attempt(train)


@judge_of(_manual)
def _judge_manual(found: Result) -> None:
    can = found.capabilities
    what = "a Module with automatic_optimization = False"
    if not (can.manual_backward and can.backward_in_forward):
        capability = "backward_in_forward" if can.manual_backward else "manual_backward"
        judge_refused(found, what, f"{capability}=False", "automatic_optimization")
        return
    judge_accepted(found, f"{what} (backward_in_forward=True in the capabilities)")
    try:
        judge_losses(found)
    except AssertionError as error:
        raise AssertionError(
            "backward_in_forward=True in the capabilities, and manual optimization does not "
            f"train as automatic does\n{error}"
        ) from None


@check("capabilities/rebinds optimizers")
def _rebinds(probe: Probe) -> dict[str, Any]:
    """Lite.setup(model, optimizer) trains with an optimizer made before, or refuses it."""
    if not probe.target.capabilities().manual_backward:
        return {}
    lite = probe.lite()
    net = build("dense")

    def train() -> dict[str, Any]:
        model, optimizer = lite.setup(net, OPTIMIZERS["sgd"](net.parameters()))
        losses = []
        batch = next(iter(probe.loader(8)))
        for _ in range(2):
            loss = mse_loss(model(batch[1]), batch[2])
            lite.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return {"changed": losses[0] != losses[1]}

    return probe.attempt(train)


@judge_of(_rebinds)
def _judge_rebinds(found: Result) -> None:
    can = found.capabilities
    if not can.manual_backward:
        return
    if not can.accepts_existing_optimizers:
        judge_refused(
            found, "Lite.setup(model, optimizer)", "accepts_existing_optimizers=False", "optimizer"
        )
        return
    judge_accepted(found, "Lite.setup(model, optimizer) (accepts_existing_optimizers=True)")
    for rank, told in enumerate(found.ranks):
        assert told["changed"], (
            f"rank {rank}: an optimizer that was made before Lite.setup(model, optimizer) does not "
            "train the model: rebind it to the parameters that the model has then"
        )
