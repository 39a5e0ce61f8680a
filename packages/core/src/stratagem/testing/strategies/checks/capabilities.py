"""Capabilities: what a strategy says that it cannot do is refused, with the reason."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import mse_loss

from stratagem.discovery.registry import get_registry
from stratagem.discovery.specs import StrategySpec
from stratagem.testing.strategies.check import Found, check
from stratagem.testing.strategies.judging import judge_losses
from stratagem.testing.strategies.models import OPTIMIZERS, Learner, build
from stratagem.testing.strategies.probe import Probe


def refused(what: str, capability: str, said: Any, *names: str) -> None:
    """Check one refusal.

    Raises:
        AssertionError: there was none, or it does not name what it is about.
    """
    assert said is not None, f"{capability} in the capabilities, and {what} was not refused"
    assert said["kind"] == "ConfigurationError", f"{what} ended in {said['kind']}: {said['text']}"
    assert any(name in said["text"] for name in names), (
        f"the refusal of {what} names none of {', '.join(names)}: {said['text']}"
    )


@check(
    "capabilities/refusals",
    "devices, nodes, launchers, accelerators, clipping and divergence checks that the capabilities "
    "exclude are refused before a process starts",
    lambda found: _judge_refusals(found),
)
def _refusals(probe: Probe) -> dict[str, Any]:
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


def _judge_refusals(found: Found) -> None:
    can, told = found.capabilities, found.ranks[0]
    if not can.many_devices:
        refused("devices=4", "many_devices=False", told["several devices"], "device", "strategy")
    if not can.multi_node:
        refused("num_nodes=2", "multi_node=False", told["several nodes"], "node")
    if not can.gradient_clipping:
        refused("gradient_clip_val=0.5", "gradient_clipping=False", told["clipping"], "clip")
    else:
        assert told["clipping"] is None, (
            "gradient_clipping=True in the capabilities, and gradient_clip_val was refused: "
            f"{told['clipping']['text']}"
        )
    if not can.replicated:
        refused(
            "detect_divergence",
            "replicated=False",
            told["divergence"],
            "replicated=False in its capabilities",
        )
    if can.launchers is not None:
        for name, said in told["launchers"].items():
            if name not in can.launchers and found.target.devices > 1:
                refused(f"the launcher {name!r}", "launchers", said, name, "launcher")


@check(
    "capabilities/of the spec and the class",
    "the spec and the class hold the same capabilities, and the spec's target is the class",
    lambda found: _judge_spec(found),
)
def _spec(probe: Probe) -> dict[str, Any]:
    strategy = probe.trainer().strategy
    own = type(strategy).capabilities
    if probe.target.is_place:
        return {"spec": None, "class": str(own)}
    spec = get_registry().find("strategy", probe.target.strategy).spec
    assert isinstance(spec, StrategySpec)
    return {"spec": str(spec.capabilities), "class": str(own), "summary": spec.summary}


def _judge_spec(found: Found) -> None:
    told = found.ranks[0]
    if told["spec"] is None:
        return
    assert told["spec"] == told["class"], (
        f"the spec's capabilities are {told['spec']}, and those of the class {told['class']}: let "
        "both hold one object"
    )
    assert told["summary"], "the spec has no summary, which `stratagem strategies` shows"


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


@check(
    "capabilities/backward in forward",
    "manual optimization trains as automatic does, or is refused where backward_in_forward=False",
    lambda found: _judge_manual(found),
    reference=True,
)
def _manual(probe: Probe) -> dict[str, Any]:
    told: dict[str, Any] = {}

    def train() -> None:
        learner = _Manual("dense", "momentum")
        trainer = probe.fit(learner, max_epochs=2)
        told.update(probe.told(learner, trainer))

    return {"refused": probe.said(train), **told}


def _judge_manual(found: Found) -> None:
    can = found.capabilities
    for told in found.ranks:
        said = told["refused"]
        if not (can.manual_backward and can.backward_in_forward):
            refused(
                "a Module with automatic_optimization = False",
                "backward_in_forward=False" if can.manual_backward else "manual_backward=False",
                said,
                "automatic_optimization",
            )
        else:
            assert said is None, (
                "backward_in_forward=True in the capabilities, and manual optimization ended in "
                f"{said['kind']}: {said['text']}"
            )
    if can.manual_backward and can.backward_in_forward:
        try:
            judge_losses(found)
        except AssertionError as error:
            raise AssertionError(
                "backward_in_forward=True in the capabilities, and manual optimization does not "
                f"train as automatic does\n{error}"
            ) from None


@check(
    "capabilities/rebinds optimizers",
    "Lite.setup(model, optimizer) trains with an optimizer made before, or refuses it",
    lambda found: _judge_rebinds(found),
)
def _rebinds(probe: Probe) -> dict[str, Any]:
    if not probe.target.capabilities().manual_backward:
        return {}
    lite = probe.lite()
    net = build("dense")
    told: dict[str, Any] = {"changed": None}

    def train() -> None:
        model, optimizer = lite.setup(net, OPTIMIZERS["sgd"](net.parameters()))
        losses = []
        batch = next(iter(probe.loader(8)))
        for _ in range(2):
            loss = mse_loss(model(batch[1]), batch[2])
            lite.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        told["changed"] = losses[0] != losses[1]

    return {"refused": probe.said(train), **told}


def _judge_rebinds(found: Found) -> None:
    for rank, told in enumerate(found.ranks):
        if not told:
            continue
        if not found.capabilities.rebinds_optimizers:
            refused(
                "Lite.setup(model, optimizer)",
                "rebinds_optimizers=False",
                told["refused"],
                "optimizer",
            )
            continue
        assert told["refused"] is None, (
            "rebinds_optimizers=True in the capabilities, and Lite.setup(model, optimizer) ended "
            f"in {told['refused']['kind']}: {told['refused']['text']}"
        )
        assert told["changed"], (
            f"rank {rank}: an optimizer that was made before Lite.setup(model, optimizer) does not "
            "train the model: rebind it to the parameters that the model has then"
        )
