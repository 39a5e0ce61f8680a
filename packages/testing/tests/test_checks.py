"""Single checks of the kits, on what once made them fail components that are right."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from _thread import start_new_thread
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from stratagem import Lite
from stratagem_testing import StrategyConformance
from stratagem_testing.child import Child, Report
from stratagem_testing.strategies.check import CHECKS, Result
from stratagem_testing.strategies.checks import load_checks
from stratagem_testing.strategies.probe import Probe
from stratagem_testing.strategies.session import Outcome
from stratagem_testing.strategies.target import Target
from stratagem_testing.surroundings import Surroundings

load_checks()
TARGET = Target(strategy="single_device")


def result(check: str, *ranks: Any, reference: Any = None, **declared: Any) -> partial[None]:
    """Return what judges a check by what ranks have told."""
    found = Result(
        target=TARGET,
        capabilities=replace(TARGET.capabilities(), **declared),
        ranks=list(ranks),
        reference=reference,
    )
    return partial(_judge, check, found=found)


def _judge(check: str, *, found: Result) -> None:
    CHECKS[check].judge(found)


def test_a_loop_of_a_check_has_its_batch_on_the_models_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = "lite/state"  # others read from a loader that was set up
    moved: list[Any] = []

    def to_device(self: Lite, batch: Any) -> Any:
        own = [tensor.clone() for tensor in batch if isinstance(tensor, torch.Tensor)]
        moved.extend(own)
        return [*batch[: len(batch) - len(own)], *own]

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        assert any(target is one for one in moved)
        return torch.nn.functional.mse_loss(output, target)

    monkeypatch.setattr(Lite, "to_device", to_device)
    monkeypatch.setattr(sys.modules[CHECKS[check].run.__module__], "mse_loss", loss)
    CHECKS[check].run(Probe(TARGET, 0, 1, tmp_path, tmp_path))
    assert moved


def test_a_failure_is_printed_once_and_without_the_kits_own_expressions() -> None:
    told = {"refused": None, "losses": [1.0], "returned": [0.5], "steps": 1}
    judge = result("steps/accumulation", told)

    def judged() -> None:
        Outcome(judge.keywords["found"]).judge("steps/accumulation")

    with pytest.raises(pytest.fail.Exception) as caught:
        StrategyConformance.judge(judged)
    assert caught.value.__context__ is None
    assert "training_step returned the losses [1] on rank 0" in str(caught.value)
    assert "\nassert " not in str(caught.value)


def test_a_precision_that_the_accelerator_cannot_do_is_no_fault_of_the_strategy() -> None:
    told = {"refused": {"kind": "ConfigurationError", "text": "no autocast"}, "autocasts": False}
    reference = {"refused": None, "dtypes": ["torch.bfloat16"], "losses": [1.0], "shard": [0, 1]}
    result("precisions/bf16-mixed", told, reference=reference)()
    with pytest.raises(AssertionError, match="the capabilities take precision='bf16-mixed'"):
        result("precisions/bf16-mixed", {**told, "autocasts": True}, reference=reference)()


START, BEFORE, AFTER, END = (
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_train_batch_end",
)
STEP = ["on_before_optimizer_step", "on_before_zero_grad"]
IN_TURN = {"called": [*(START, BEFORE, AFTER, END), *(START, BEFORE, AFTER), *STEP, END]}


def test_hooks_of_overlapping_micro_batches_keep_their_order_in_each() -> None:
    overlapping = [*(START, START, BEFORE, AFTER, BEFORE, END, AFTER), *STEP, END]
    told = {"called": overlapping, "overlaps": True}
    result("data/hooks", told, reference=IN_TURN)()
    with pytest.raises(AssertionError, match="hooks are called otherwise on rank 0: in the order"):
        result("data/hooks", {**told, "overlaps": False}, reference=IN_TURN)()
    for wrong in (
        [*(START, BEFORE, AFTER, START, AFTER, BEFORE, END), *STEP, END],
        [*(START, BEFORE, AFTER, START, BEFORE, AFTER), *STEP, END, END],
    ):
        with pytest.raises(AssertionError, match="on rank 0: in the order"):
            result("data/hooks", {**told, "called": wrong}, reference=IN_TURN)()


def test_ranks_with_different_parameters_may_refuse_models_of_one_module_only() -> None:
    text = "2 stages, but Learner has 1 module(s) with parameters to divide ('net.last')"
    told = {"refused": {"kind": "ConfigurationError", "text": text}}
    result("losses/complex", told, parameters="divided")()
    result("steps/large model", told, parameters="divided")()
    for check, declared in (
        ("losses/dense", {"parameters": "divided"}),
        ("losses/scalar", {"parameters": "divided"}),
        ("steps/gradient", {"parameters": "divided"}),
        ("steps/large model", {}),
        ("losses/complex", {}),
    ):
        with pytest.raises(AssertionError, match="ConfigurationError"):
            result(check, told, **declared)()


def test_no_rank_that_computes_losses_may_leave_some_out_after_a_release() -> None:
    def told(losses: list[float]) -> dict[str, Any]:
        run = {"losses": len(losses), "steps": 2}
        same: dict[str, Any] = {"shard": [0, 1], "said": None, "before": {}, "after": {}}
        return {**same, "run": run, "losses": losses}

    both, one, none = told([1.0, 2.0]), told([1.0]), told([])
    result("life/bound again", both, none, parameters="divided")()
    for ranks, declared in (
        ((both, none), {}),
        ((both, one), {"parameters": "divided"}),
        ((none, none), {"parameters": "divided"}),
    ):
        with pytest.raises(AssertionError, match="after the release of another model"):
            result("life/bound again", *ranks, **declared)()


def test_a_loop_without_lite_step_is_refused_where_only_lite_step_trains() -> None:
    declared = {"manual_backward": False, "lite_step": True}
    refused = {"refused": {"kind": "UserCodeError", "text": "outside of a training step"}}
    result("optimizers/two", refused, refused, **declared)()
    with pytest.raises(AssertionError, match=r"was not refused on rank\(s\) \[1\]"):
        result("optimizers/two", refused, {"refused": None}, **declared)()


def test_a_thread_that_python_only_knows_from_outside_is_nothing_left_behind() -> None:
    """Such as one of autograd's, which has called a function of Python."""
    before = Surroundings.now()
    known, goes_on = threading.Event(), threading.Event()

    def call() -> None:
        threading.current_thread()  # from now on it has an object
        known.set()
        goes_on.wait(60.0)

    start_new_thread(call, ())
    assert known.wait(60.0)
    try:
        assert any(isinstance(one, threading._DummyThread) for one in threading.enumerate())
        assert before.changes() == []
    finally:
        goes_on.set()


def test_child_ends_while_a_grandchild_holds_its_pipe(
    tmp_path: Path,
) -> None:
    """As ranks do that wait for each other when the process of a check is killed."""

    def start(report: Report) -> None:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            time.sleep(60.0)
            os._exit(0)
        report(pid=pid)

    with (tmp_path / "log").open("wb") as log:
        child = Child(start, log, {})
    pid = child.wait_for("pid")
    began = time.monotonic()
    assert child.end() == [{"pid": pid}]
    assert time.monotonic() - began < 30.0
    os.kill(pid, signal.SIGKILL)
