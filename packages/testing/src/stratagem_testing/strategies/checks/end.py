"""The end of ranks: in order, and by a failure."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from stratagem_testing.strategies.check import Result, check, judge_of
from stratagem_testing.strategies.checks.data import Parameters
from stratagem_testing.strategies.judging import close, shown
from stratagem_testing.strategies.models import Learner
from stratagem_testing.strategies.probe import Probe

PLANTED = "planted by the conformance kit"


@check("end/nothing left")
def _end(probe: Probe) -> dict[str, Any]:
    """Every rank ends with exit code 0, and the strategy leaves nothing behind.

    This includes processes, threads, environment variables, process groups and patched functions.
    `teardown` tears down the checkpoint format, the cluster environment and the accelerator.
    """
    learner = Learner()
    trainer = probe.trainer(max_epochs=1)
    trainer.fit(learner, probe.loader(16), probe.loader(8))
    return {"steps": trainer.global_step}


@judge_of(_end)
def _judge_end(found: Result) -> None:
    ended = found.ended
    assert ended.exit_code is not None, (
        f"the ranks did not end within {ended.seconds:.0f} s after training:\n"
        f"{ended.stderr[-3000:]}"
    )
    assert ended.exit_code == 0, (
        f"the ranks ended with exit code {ended.exit_code}:\n{ended.stderr[-3000:]}"
    )
    assert [told["steps"] for told in found.ranks] == [2] * len(found.ranks), (
        f"expected 2 steps on each rank, received {found.ranks}"
    )
    assert not ended.processes, f"left running: {'; '.join(ended.processes)}"
    for rank, up in sorted(ended.up.items()):
        assert not up, (
            f"rank {rank} has ended, and nobody has called teardown() of the strategy's "
            f"{', '.join(up)}: let teardown() call super().teardown(), which does. Otherwise a "
            "checkpoint that is written in the background may be lost"
        )
    for rank, left in sorted(ended.left.items()):
        left = [one for one in left if not one.startswith(found.target.allowed_leftovers)]
        assert not left, (
            f"rank {rank} has after its end {'; '.join(left)}: undo it in teardown(), and call "
            "super().teardown()"
        )


class _Failing(Learner):
    """The last rank fails in its second step."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails = fails

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.fails and batch_idx == 1:
            raise ValueError(PLANTED)
        return super().training_step(batch, batch_idx)


@check("end/the user's error")
def _own_error(probe: Probe) -> dict[str, Any]:
    """A RuntimeError that user code raises ends the run as what it is, with its own text.

    Afterwards, the same strategy object trains another model as a new one does. If an evaluation
    ends in an error, the model has the parameters of training.
    """

    class Fails(Learner):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            # In a step, the other stages of a pipeline would wait for this one.
            if batch_idx == 2 and self.trainer.strategy.opens_micro_batches:
                raise RuntimeError(PLANTED)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 2:
                raise RuntimeError(PLANTED)
            return super().training_step(batch, batch_idx)

    class FailsInEvaluation(Learner):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            raise RuntimeError(PLANTED)

    # In the second micro-batch of a step.
    trainer = probe.trainer(max_epochs=1, accumulate_grad_batches=2)
    first = Learner("dense", "momentum")
    told: dict[str, Any] = {}
    told["said"] = probe.said(lambda: trainer.fit(Fails("dense", "momentum"), probe.loader(32)))
    probe.fit(first)
    again = probe.trainer(trainer.strategy, max_epochs=1)
    second = Learner("dense", "momentum")
    later = probe.said(lambda: again.fit(second, probe.loader(32)))
    told |= {"later": later, "losses": second.losses, "expected": first.losses}
    evaluated = FailsInEvaluation("dense", "momentum")
    left = Parameters(not probe.target.capabilities().sharded_state)
    fails = probe.trainer(max_epochs=1, callbacks=[left])
    told["in evaluation"] = probe.said(
        lambda: fails.fit(evaluated, probe.loader(24), probe.loader(8))
    )
    left.on_train_batch_start(fails, evaluated)
    return {**told, "changed": left.changed}


@judge_of(_own_error)
def _judge_own_error(found: Result) -> None:
    for rank, told in enumerate(found.ranks):
        said = told["said"] or {"kind": "no error", "text": ""}
        assert PLANTED in said["text"], (
            f"training_step raised RuntimeError: {PLANTED}, and fit ended on rank {rank} in "
            f"{said['kind']}: {said['text']}. explain(prepared, error) has to return None for an "
            "error of which it does not know the cause; return another one only for what the "
            "engine says"
        )
        said = told["later"]
        assert said is None, (
            "after an error within a step, another fit by the same strategy object ended on rank "
            f"{rank} in {said['kind']}: {said['text']}. What a step sets, it has to put back in "
            "`finally`; or keep it in prepared.strategy_data"
        )
        assert close(told["losses"], told["expected"], found.target.tolerance), (
            "after an error within a step, another fit by the same strategy object has the losses "
            f"{shown(told['losses'])} on rank {rank}, expected {shown(told['expected'])}, those of "
            "a new one: put back in `finally` what a step sets, and keep gradients that wait in "
            "prepared.strategy_data"
        )
        said = told["in evaluation"] or {"kind": "no error", "text": ""}
        assert PLANTED in said["text"], (
            f"validation_step raised RuntimeError: {PLANTED}, and fit ended on rank {rank} in "
            f"{said['kind']}: {said['text']}"
        )
        assert not told["changed"], (
            "after an error in validation_step, the model has other parameters on rank "
            f"{rank} than before the evaluation: {', '.join(dict.fromkeys(told['changed']))}. "
            "evaluation(prepared) has to put back in `finally` what it changes"
        )


@check("end/failing rank", alone=True)
def _fail(probe: Probe) -> None:
    """An exception on one rank ends all ranks soon, with the traceback and a nonzero exit code."""
    probe.fit(_Failing(probe.rank == probe.world_size - 1))


@judge_of(_fail)
def _judge_failure(found: Result) -> None:
    ended = found.ended
    rank = found.target.devices - 1
    assert ended.exit_code is not None, (
        f"rank {rank} raised a ValueError in training_step, and the ranks did not end within "
        f"{ended.seconds:.0f} s"
    )
    assert ended.exit_code != 0, (
        f"rank {rank} raised a ValueError in training_step, and the run ended with exit code 0: "
        "the exception was swallowed"
    )
    assert PLANTED in ended.stderr, (
        f"rank {rank} raised a ValueError in training_step, and what is printed does not show it:"
        f"\n{ended.stderr[-3000:]}"
    )
    assert not ended.processes, f"left running: {'; '.join(ended.processes)}"
