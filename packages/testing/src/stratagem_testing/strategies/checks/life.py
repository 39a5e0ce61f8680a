"""A strategy's life: several runs in one process, and the end of one."""

from __future__ import annotations

import gc
import inspect
from typing import Any

from stratagem.strategies import Strategy
from stratagem_testing.strategies.check import Result, check, judge_of
from stratagem_testing.strategies.judging import close
from stratagem_testing.strategies.models import Learner
from stratagem_testing.strategies.probe import Probe
from stratagem_testing.surroundings import Surroundings

ORDER = ("setup_environment", "setup", "prepare", "train_step", "end_training")
"""Calls of which each comes after the one before it; `bind` came before, with the Trainer."""


@check("life/order")
def _order(probe: Probe) -> dict[str, Any]:
    """One strategy trains, evaluates and predicts, called as the docstring of Strategy says.

    In the order of its numbers, on as many ranks as it says.
    """
    calls: list[str] = []
    trainer = probe.trainer(max_epochs=1)
    strategy = trainer.strategy
    for name in ORDER:
        setattr(strategy, name, _noted(getattr(strategy, name), name, calls))
    learner = Learner()
    trainer.fit(learner, probe.loader(16), probe.loader(8))
    trainer.validate(learner, probe.loader(8), verbose=False)
    trainer.test(learner, probe.loader(8), verbose=False)
    predicted = trainer.predict(learner, probe.loader(8))
    for name in ORDER:
        delattr(strategy, name)
    return {
        "calls": calls,
        "predicted": len(predicted),
        "is_strategy": isinstance(strategy, Strategy),
        "ranks": [trainer.ranks.global_rank, trainer.ranks.world_size],
        "rank": [probe.rank, probe.world_size],
    }


def _noted(method: Any, name: str, calls: list[str]) -> Any:
    def noted(*arguments: Any, **options: Any) -> Any:
        if not calls or calls[-1] != name:
            calls.append(name)
        return method(*arguments, **options)

    noted.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
    return noted


@judge_of(_order)
def _judge_order(found: Result) -> None:
    for rank, told in enumerate(found.ranks):
        assert told["is_strategy"], "it is no stratagem.strategies.Strategy"
        assert told["ranks"] == told["rank"], (
            f"strategy.ranks says rank {told['ranks'][0]} of {told['ranks'][1]} on rank "
            f"{told['rank'][0]} of {told['rank'][1]}"
        )
        calls = told["calls"]
        first = [name for name in ORDER if name in calls]
        positions = [calls.index(name) for name in first]
        assert positions == sorted(positions), (
            f"rank {rank}: the strategy was called in the order {calls}, expected {first}"
        )
        missing = [name for name in ORDER if name not in calls]
        assert not missing, f"rank {rank}: {', '.join(missing)} was never called: {calls}"
        assert told["predicted"] == 1, f"rank {rank} predicted {told['predicted']} batches of 1"


@check("life/arguments")
def _arguments(probe: Probe) -> dict[str, Any]:
    """A strategy takes the arguments of its base class, and passes them on."""
    kind = type(probe.trainer().strategy)
    given = {"launcher": "script"}

    def make() -> None:
        signature = inspect.signature(kind)
        signature.bind_partial(**given)
        try:
            signature.bind(**given)
        except TypeError:
            return  # it has arguments of its own that nobody else knows
        assert kind(**given).requested.get("launcher") == "script", "its `requested` lacks launcher"

    return {"name": kind.__name__, "said": probe.said(make)}


@judge_of(_arguments)
def _judge_arguments(found: Result) -> None:
    told = found.ranks[0]
    assert told["said"] is None, (
        f"{told['name']}(launcher='script') ends in {told['said']['text']}: what a class does not "
        "take itself belongs to its base, as precision_plugin, checkpoint_io and timeout do: def "
        "__init__(self, ..., **components) and super().__init__(**components)"
    )


@check("life/twice", reference=True)
def _twice(probe: Probe) -> dict[str, Any]:
    """A model is trained twice in one process, by new strategies, as if each were the first."""
    told: dict[str, Any] = {"fits": []}
    learner = Learner("dense", "momentum")
    for number in range(3):
        learner.losses = []
        trainer = probe.fit(learner)
        told["fits"].append(learner.losses)
        if number == 0:
            # Validation prepares the model again, and so does the next fit.
            trainer.validate(learner, probe.loader(8), verbose=False)
    told["shard"] = list(trainer.ranks.data_split)
    return told


@judge_of(_twice)
def _judge_twice(found: Result) -> None:
    if not found.target.equal:
        return
    for number in range(3):
        parts = {told["shard"][0]: told["fits"][number] for told in found.ranks}
        own = [sum(values) / len(values) for values in zip(*parts.values(), strict=True)]
        expected = found.reference["fits"][number]
        assert close(own, expected, 10 * found.target.tolerance), (
            f"fit number {number + 1} of one model in one process has the losses {own}, expected "
            f"{expected}: what the strategy kept of the fit before gets in its way (see release)"
        )


@check("life/nothing left between runs")
def _left(probe: Probe) -> dict[str, Any]:
    """A run leaves no process group, thread, variable, setting or patched function behind."""
    learner = Learner()
    probe.fit(learner)
    # The first run of a process may set up what stays: modules, the group of all ranks.
    before = Surroundings.now()
    left = []
    for _ in range(2):
        trainer = probe.trainer(max_epochs=1)
        trainer.fit(learner, probe.loader(16), probe.loader(8))
        del trainer
        gc.collect()
        left.append(before.changes())
    return {"left": left}


@judge_of(_left)
def _judge_left(found: Result) -> None:
    for rank, told in enumerate(found.ranks):
        first, second = (
            [one for one in left if not one.startswith(found.target.allowed_leftovers)]
            for left in told["left"]
        )
        assert not second, (
            f"rank {rank}: a run left behind {'; '.join(second)}"
            + ("" if first == second else " (and each run more of it)")
            + ": undo it in release(prepared) or teardown()"
        )


@check("life/bound again")
def _bound_again(probe: Probe) -> dict[str, Any]:
    """A model may be released twice, and a new strategy of the class works afterwards."""
    trainer = probe.fit(Learner())
    prepared = trainer.run.require_prepared()
    trainer.strategy.release(prepared)
    trainer.strategy.release(prepared)
    learner = Learner()
    again = probe.fit(learner, 16)
    return {"losses": len(learner.losses), "steps": again.global_step}


@judge_of(_bound_again)
def _judge_bound_again(found: Result) -> None:
    for rank, told in enumerate(found.ranks):
        assert told == {"losses": 2, "steps": 2}, (
            f"rank {rank} came to {told} after the release of another model, expected 2 steps"
        )
