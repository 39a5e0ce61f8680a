"""Checkpoints: whole, under the model's names, exact, and good for another strategy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.utils._pytree import keystr, tree_leaves_with_path

from stratagem.callbacks import Callback
from stratagem.checkpoint import read_whole
from stratagem.errors import CheckpointMismatchError, ConfigurationError
from stratagem_testing.strategies.check import Result, check, judge_of
from stratagem_testing.strategies.judging import (
    close,
    difference,
    judge_accepted,
    judge_replicas,
    mean_losses,
    shown,
)
from stratagem_testing.strategies.models import (
    FIRST_STEP,
    Counting,
    Learner,
    Numbered,
    Scheduled,
    numbers,
)
from stratagem_testing.strategies.probe import Probe

SAVED_AT, STEPS = 3, 6
"""Steps; an epoch has 5, so that both are within one."""
SAMPLES = 40
VALIDATED = 8
"""Samples of the validation at the end of the epoch, which is after a resume."""
REFUSAL = ConfigurationError.__name__


def _train_and_save(
    probe: Probe, model: str = "dense", *, shuffle: bool = False, optimizer: str = "adam"
) -> Any:
    """Train half way and save; in one run, so that saving must not change what follows."""
    learner = Learner(model, optimizer)
    trainer = probe.fit(learner, SAMPLES, max_steps=SAVED_AT, shuffle=shuffle)
    trainer.save_checkpoint(probe.folder / "saved.ckpt")
    return learner, trainer


def _go_on(probe: Probe, path: Any, weights: Mapping[str, Any] | None = None) -> Any:
    """Resume from a checkpoint.

    Args:
        probe: the probe of the rank.
        path: the path of the checkpoint.
        weights: the weights of the model before; None for other weights than in the checkpoint,
            which take precedence.
    """
    learner = Learner("dense", "adam", seed=5)
    if weights is not None:
        learner.load_state_dict(weights)
    trainer = probe.fit(learner, SAMPLES, max_steps=STEPS, ckpt_path=path)
    return {**probe.report(learner, trainer), "seen": learner.seen}


def _whole(probe: Probe, model: str = "dense", *, shuffle: bool = False) -> Any:
    learner = Learner(model, "adam")
    trainer = probe.fit(learner, SAMPLES, max_steps=STEPS, shuffle=shuffle)
    return probe.report(learner, trainer)


class _Saves(Callback):
    """Saves after each of some steps, and notes the optimizer's state at a step.

    Args:
        probe: the probe; its folder contains the files, "1.ckpt" for the first step.
        steps: save after each of these steps; 0: before the first step.

    Attributes:
        optimizer: this rank's state of the optimizer after the step SAVED_AT.
        copies: the parameters in the strategy's own state after each step, each with its place in
            that state; None before the first step.
    """

    def __init__(self, probe: Probe, *steps: int) -> None:
        self.probe = probe
        self.steps = steps
        self.optimizer: list[Any] = []
        self.copies: set[tuple[str, str]] | None = None

    def on_train_batch_end(self, trainer: Any, *of_batch: Any) -> None:
        copies = _copies(trainer)
        self.copies = copies if self.copies is None else self.copies & copies
        self.on_train_start(trainer)
        self.on_train_batch_start(trainer)

    def on_train_start(self, trainer: Any, *module: Any) -> None:
        if trainer.global_step in self.steps:
            trainer.save_checkpoint(self.probe.folder / f"{trainer.global_step}.ckpt")

    def on_train_batch_start(self, trainer: Any, *of_batch: Any) -> None:
        if trainer.global_step == SAVED_AT and not self.optimizer:
            self.optimizer = _optimizer_state(trainer.optimizers[0])


def _copies(trainer: Any) -> set[tuple[str, str]]:
    """Return where the strategy's own state has the values that a parameter has now."""
    prepared = trainer.run.require_prepared()
    own = tree_leaves_with_path(trainer.strategy.state(prepared, trainer.optimizers))
    return {
        (name, keystr(path))
        for name, p in prepared.original.named_parameters()
        for path, value in own
        # The few values of a bias may be equal by chance.
        if isinstance(value, Tensor) and value.shape == p.shape and p.numel() > 1
        if torch.equal(value.to(p.device, torch.float64), p.detach().double())
    }


def _optimizer_state(optimizer: Any) -> list[Any]:
    """Return the state that this rank has for each parameter, as plain numbers."""

    def local(value: Any) -> Any:
        return value.to_local() if hasattr(value, "to_local") else value

    states = (optimizer.state.get(p, {}) for g in optimizer.param_groups for p in g["params"])
    return [_plain({key: local(value) for key, value in state.items()}) for state in states]


def _resumed(probe: Probe, model: str = "dropout", **options: Any) -> dict[str, Any]:
    """Train, save twice on the way, and go on from the second save."""
    whole: dict[str, Any] = {**_TO_THE_END, **options}
    told = {}
    for name, at in (("saved", None), ("resumed", SAVED_AT), ("resumed from 0", 0)):
        resumes = at is not None
        # Saves may change the state of further training (an average).
        notes = _Saves(probe, *(() if at else (1, SAVED_AT) if resumes else (0, 1, SAVED_AT)))
        path = probe.folder / f"{at}.ckpt" if resumes else None
        torch.manual_seed(8 if resumes else 7)
        # Other initial weights: the checkpoint's must win.
        learner = Scheduled(model, "adam_groups", seed=5 if resumes else 0)
        trainer = probe.fit(learner, SAMPLES, callbacks=[notes], ckpt_path=path, **whole)
        report = probe.report(learner, trainer)
        told[name] = {
            **report,
            "rates": learner.rates,
            "optimizer": notes.optimizer,
            "copies": sorted(notes.copies or ()),
            "validated": [loss for _, loss in learner.evaluated],
        }
    return told


_TO_THE_END: Mapping[str, Any] = {"max_steps": STEPS, "shuffle": True, "validated": VALIDATED}
"""What runs have in common that a resumed one is compared with."""


def _judge_resumed(found: Result, tolerance: float = 1e-6) -> None:
    """Compare a run that was resumed with the run that saved and went on, rank by rank."""
    for rank, told in enumerate(found.ranks):
        saved, resumed = told["saved"], told["resumed"]
        rates, expected = resumed["rates"], saved["rates"][SAVED_AT:]
        assert not rates or close(rates[0], expected[0], 1e-9), (
            "the optimizer's state was not restored: the first step after a resume has the "
            f"learning rates {rates[0]} on rank {rank}, "
            f"expected {expected[0]}: load_optimizer_state has to restore param_groups, and "
            "optimizer_state to return them as they are at each save"
        )
        _same_losses(
            resumed["losses"],
            saved["losses"][SAVED_AT:],
            tolerance,
            f"the run that saved for the second time then, and went on (rank {rank})",
            _meaning_of_steps(found),
        )
        assert close(resumed["validated"], saved["validated"], tolerance), (
            "the losses of training after a resume are those of the run that saved and went on, "
            f"and the losses of a validation are {shown(resumed['validated'])}, expected "
            f"{shown(saved['validated'])} (rank {rank}): what evaluation(prepared) uses, such as "
            "an average of weights, was not restored; return it in state"
        )
        begun = told["resumed from 0"]
        assert close(begun["losses"], saved["losses"], tolerance), (
            "a run that resumes from a checkpoint from before the first step has other losses on "
            f"rank {rank}: {shown(begun['losses'])}, expected {shown(saved['losses'])}. An "
            "optimizer has no state there, and the strategy has counted nothing"
        )
        said = difference(resumed["weights"], saved["weights"], tolerance)
        assert not said, (
            "the losses after a resume are those of the run that saved and went on, and the model "
            "is another one at the end: something between the optimizer and the weights was not "
            "restored. Return weights in a higher precision in model_state, and a compression "
            f"error or a count of steps in state. {said}"
        )


_OF_OPTIMIZER = (
    "the optimizer's state was not restored, or an earlier save's was (look at optimizer_state and "
    "load_optimizer_state)"
)
_OF_STEPS = f"{_OF_OPTIMIZER}; or what the strategy itself keeps was not (state and load_state)"
"""What it may mean if a run that was resumed has other losses after its first step."""


def _meaning_of_steps(found: Result) -> str:
    """Return what other losses mean, by the ranks' optimizers after the load and at the save."""
    for rank, told in enumerate(found.ranks):
        where = _first_difference(told["resumed"]["optimizer"], told["saved"]["optimizer"])
        if where is not None:
            return f"{_OF_OPTIMIZER}: it differs at {where} on rank {rank}"
    if not any(any(told["saved"]["optimizer"]) for told in found.ranks):
        return _OF_STEPS  # an engine has it elsewhere
    return (
        "the optimizer's state is that of the save, so look at state and load_state for what the "
        "strategy itself keeps, such as a count of steps or the error of a compression. Learning "
        "rates it reads from optimizer.param_groups in each step, where schedulers write them"
    )


@check("state/exact resume")
def _resume(probe: Probe) -> dict[str, Any]:
    """A run that resumes within an epoch has the same losses as the run that saved and continued.

    A checkpoint restores weights, optimizer, learning rates, the order of samples, random numbers
    and the strategy's own state. The check resumes from the last of three saves of a run, and from
    the first one, which comes before the first step. A validation after the resume has the same
    losses, too.
    """
    torch.manual_seed(7)
    learner = Scheduled("dropout", "adam_groups")
    trainer = probe.fit(learner, SAMPLES, **_TO_THE_END)
    return {**_resumed(probe), "whole": probe.report(learner, trainer)}


@judge_of(_resume)
def _judge_resume(found: Result) -> None:
    _judge_resumed(found)
    if not found.target.equal:
        return  # a save may change the state of further training (an average)
    expected = mean_losses([told["whole"] for told in found.ranks])
    own = mean_losses([told["saved"] for told in found.ranks])
    for step, (mine, other) in enumerate(zip(own, expected, strict=True)):
        assert math.isclose(mine, other, rel_tol=1e-6, abs_tol=1e-6), (
            f"a run that saves after the steps 0, 1 and {SAVED_AT} has other losses from its step "
            f"{step + 1} on than one that does not: {shown(own)}, expected {shown(expected)}. "
            "model_state, optimizer_state and state must not change what they return"
        )


def _register_precision(precision: str, tolerance: float, about: str, meaning: str = "") -> None:
    def judge(found: Result) -> None:
        if all((told["refused"] or {}).get("kind") == REFUSAL for told in found.ranks):
            return  # see precisions/
        judge_accepted(found, f"precision={precision!r} with a save and a resume")
        _judge_resumed(found)
        # In float32, weights in a higher precision may be equal to the model's. A place that has
        # one rank's parameter alone is for replicas, of which the model is the mean (DiLoCo).
        if precision == "bf16-true":
            of_ranks = [set(map(tuple, told["saved"]["copies"])) for told in found.ranks]
            for name, place in sorted(set.intersection(*of_ranks)):
                raise AssertionError(
                    f"state had the values of the parameter {name!r} at {place} on every rank "
                    f"after each of {STEPS} steps: what was to be an average, or the weights of an "
                    "earlier step, is the parameter itself or made anew. Keep "
                    "parameter.detach().clone() once, and update that"
                )
        try:
            _judge_resumed(found, tolerance)
        except AssertionError as error:
            raise AssertionError(f"{meaning}{error}") from None

    @check(f"state/exact resume in {precision}", judge, about=about)
    def run(probe: Probe) -> dict[str, Any]:
        return probe.attempt(lambda: _resumed(probe, "dense", precision=precision))


_register_precision(
    "64-true",
    1e-12,
    "A resumed run in float64 is exact: no state is rounded to float32 in the checkpoint.",
    "weights or optimizer state of float64 may have gone through float32 on their way to the "
    "checkpoint and back (look at model_state, optimizer_state and what loads them): ",
)
for _precision in ("bf16-mixed", "bf16-true"):
    _register_precision(
        _precision,
        1e-6,
        "A resumed run in low precision is exact, including weights kept in a higher precision.",
    )


def _same_losses(
    own: list[float],
    expected: list[float],
    tolerance: float,
    of: str,
    later: str = _OF_STEPS,
) -> None:
    """Compare the losses after a resume.

    Args:
        own, expected: the losses.
        tolerance: relative and absolute.
        of: the owner of the expected losses.
        later: the meaning of losses that differ from a later step on.
    """
    assert len(own) == len(expected), (
        f"{len(own)} losses after a resume at step {SAVED_AT} of {STEPS}, expected {len(expected)}"
    )
    for step, (mine, other) in enumerate(zip(own, expected, strict=True), start=1):
        assert math.isclose(mine, other, rel_tol=tolerance, abs_tol=tolerance), (
            f"the losses after a resume are not those of {of} from its step {step} on: {mine:.7g}, "
            f"expected {other:.7g}. "
            + (
                "The first one differs: weights, the order of samples or random numbers were not "
                "restored, or an earlier save's were (look at model_state and load_model_state)"
                if step == 1
                else f"The weights are those of the save, and a step after it differs: {later}"
            )
            + f"\nlosses   {shown(own)}\nexpected {shown(expected)}"
        )


def on_single_device(probe: Probe) -> dict[str, Any]:
    """Load what the ranks have saved."""
    saved = probe.trainer().checkpoint_writer.load(probe.folder / "saved.ckpt")
    return {
        "resumed": _go_on(probe, probe.folder / "saved.ckpt"),
        "names": {
            name: f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
            for name, value in read_whole(saved)["state_dict"].items()
        },
    }


@check("state/into single_device", after=on_single_device)
def _into(probe: Probe) -> dict[str, Any]:
    """A checkpoint has the whole model by its own names, and single_device resumes from it."""
    whole = _whole(probe)
    learner, _ = _train_and_save(probe)
    module = Learner()
    return {
        "whole": whole,
        "names": {
            name: f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
            for name, value in module.state_dict().items()
        },
        "losses": learner.losses,
    }


@judge_of(_into)
def _judge_into(found: Result) -> None:
    names, expected = found.after["names"], found.ranks[0]["names"]
    assert names == expected, (
        f"the checkpoint's state_dict has {names}, expected the model's own names, dtypes "
        f"and whole shapes, {expected}"
    )
    losses = mean_losses([found.after["resumed"]])
    whole = mean_losses([told["whole"] for told in found.ranks])[SAVED_AT:]
    if found.target.equal:
        _same_losses(losses, whole, 10 * found.target.tolerance, "the strategy's own run")
    else:
        assert max(losses) < 2 * max(whole) + 0.1, (
            f"single_device goes on with losses {losses} from the checkpoint, and the strategy's "
            f"own run with {whole}: other weights were saved than those that were trained"
        )


@check("state/out of single_device", reference=True)
def _out(probe: Probe) -> dict[str, Any]:
    """The strategy resumes from a checkpoint of single_device, with the optimizer's state.

    What a strategy has made of the weights before, such as slow weights, is renewed.
    """
    if probe.target.strategy == "single_device" and probe.folder == probe.reference:
        whole = _whole(probe)
        _train_and_save(probe)
        return {"whole": whole}
    path = probe.reference / "saved.ckpt"
    told = {"resumed": _go_on(probe, path)}
    if not probe.target.equal:  # else the losses say it
        weights = read_whole(probe.trainer().checkpoint_writer.load(path))["state_dict"]
        told["on its weights"] = _go_on(probe, path, weights)
    return told


@judge_of(_out)
def _judge_out(found: Result) -> None:
    expected = mean_losses([found.reference["whole"]])[SAVED_AT:]
    own = mean_losses([told["resumed"] for told in found.ranks])
    if not found.target.equal:
        expected, own = expected[:1], own[:1]
    _same_losses(own, expected, 10 * found.target.tolerance, "single_device's run")
    for rank, told in enumerate(found.ranks if not found.target.equal else ()):
        own, expected = told["resumed"], told["on its weights"]
        said = difference(own["weights"], expected["weights"], 1e-6)
        assert close(own["losses"], expected["losses"], 1e-6) and not said, (  # noqa: PT018
            "a resume from a checkpoint without the strategy's own state trains otherwise than "
            "one of a model that had the checkpoint's weights before: load_model_state has to "
            "renew what prepare has made of the weights (slow weights, an average), of which "
            f"load_state may know nothing. Rank {rank} has the losses {shown(own['losses'])}, "
            f"expected {shown(expected['losses'])}{'; at the end ' if said else ''}{said}"
        )


@check("state/other number of ranks", ranks=3, follows="state/into single_device")
def _other_number(probe: Probe) -> dict[str, Any]:
    """A run on three ranks resumes from the checkpoint of two, with the strategy's own state.

    load_state takes the state of more or fewer ranks than there are. A strategy that cannot raises
    a CheckpointMismatchError that says so.
    """
    path = probe.reference / "saved.ckpt"
    try:
        told = _go_on(probe, path)
    except (ConfigurationError, CheckpointMismatchError) as error:
        if "rank" not in str(error):
            raise
        return {"refused": str(error)}
    # Compute the first loss by hand, from the checkpoint's weights and the samples of the step.
    saved = read_whole(probe.trainer().checkpoint_writer.load(path))["state_dict"]
    learner, every, first = Learner("dense"), Numbered(SAMPLES), told["seen"][0]
    learner.load_state_dict(saved)
    loss = mse_loss(learner.net(every.inputs[first]), every.targets[first])
    return {**told, "expected": float(loss.detach()), "refused": None}


@judge_of(_other_number)
def _judge_other_number(found: Result) -> None:
    refused = [told["refused"] for told in found.ranks]
    if any(refused):
        assert all(refused), f"only some ranks refused it: {refused}"
        return
    for rank, told in enumerate(found.ranks):
        assert close(told["losses"][:1], [told["expected"]], 10 * found.target.tolerance), (
            "on another number of ranks, a resumed run does not begin with the weights of its "
            f"checkpoint: the first loss is {told['losses'][0]:.7g} on rank {rank}, expected "
            f"{told['expected']:.7g}"
        )
    judge_replicas(found, found.target.tolerance)


@check("state/other model")
def _other_model(probe: Probe) -> dict[str, Any]:
    """Loading a checkpoint of another model raises an error that names a parameter.

    A validation loads a checkpoint of the same model, without an optimizer.
    """
    _, trained = _train_and_save(probe)
    path = probe.folder / "saved.ckpt"
    trainer = probe.trainer()

    def load(model: str) -> None:
        loader = probe.loader(8)
        trainer.validate(Learner(model, seed=5), loader, ckpt_path=path, verbose=False)

    told: dict[str, Any] = {"said": probe.said(lambda: load("batch_norm"))}
    told |= {"evaluated": probe.said(lambda: load("dense")), "expected": probe.weights(trained)}
    return {**told, "weights": {} if told["evaluated"] else probe.weights(trainer)}


@judge_of(_other_model)
def _judge_other_model(found: Result) -> None:
    for rank, told in enumerate(found.ranks):
        said = told["said"]
        assert said is not None, (
            f"rank {rank} loaded a checkpoint that has some of the model's parameters and others, "
            "without an error: load_model_state(prepared, state, strict=True) has to refuse "
            "missing and unexpected names (stratagem.state.check_weights does)"
        )
        assert "net." in said["text"], (
            "a checkpoint of another model ends in an error that names none of the parameters: "
            f"{said['kind']}: {said['text']}"
        )
        said = told["evaluated"]
        assert said is None, (
            "Trainer.validate(module, ckpt_path=...) of a checkpoint of the strategy's own ended on"
            f" rank {rank} in {said['kind']}: {said['text']}. There is no optimizer, and "
            "prepared.optimizers is empty"
        )
    told = found.ranks[0]
    wrong = difference(told["weights"], told["expected"], 1e-6)
    assert not wrong, (
        f"Trainer.validate(module, ckpt_path=...) evaluates other weights than were saved: {wrong}"
    )


class _Options(Callback):
    """Changes and adds options of a group of the optimizer, as user code does.

    Attributes:
        last: everything that a checkpoint takes from the strategy, after the last step.
    """

    def __init__(self) -> None:
        self.last: dict[str, Any] = {}

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        for group in trainer.optimizers[0].param_groups[-1:]:
            group.update(scale=0.5, note="kit")

    def on_train_batch_end(self, trainer: Any, *of_batch: Any) -> None:
        if trainer.global_step == SAVED_AT:
            self.last = _state(trainer)


@check("state/round trip")
def _round_trip(probe: Probe) -> dict[str, Any]:
    """A load restores the model, the optimizer and the strategy's own state of the save.

    This includes dtypes, buffers, integers, options of parameter groups, and a module's extra
    state. `end_training` does not drop the strategy's own state, which a later save needs.
    """
    try:
        return _saved_and_loaded(probe, "counting")
    except ConfigurationError as error:
        # An engine may take optimizers that it knows, and no other one.
        if Counting.__name__ not in str(error):
            raise
        return _saved_and_loaded(probe, "adam_groups")


def _saved_and_loaded(probe: Probe, optimizer: str) -> dict[str, Any]:
    first, options = Learner("unusual", optimizer), _Options()
    trainer = probe.fit(first, SAMPLES, max_steps=SAVED_AT, callbacks=[options])
    path = probe.folder / "saved.ckpt"
    trainer.save_checkpoint(path)
    told: dict[str, Any] = {
        "last": options.last,
        "saved": _state(trainer),
        "lives": _live(first, trainer),
        "names": _with_dtypes(Learner("unusual").state_dict()),
        "steps": SAVED_AT + (FIRST_STEP if optimizer == "counting" else 0),
    }
    learner = Learner("unusual", optimizer, seed=5)
    again = probe.trainer(max_steps=SAVED_AT)
    said = probe.said(lambda: again.fit(learner, probe.loader(SAMPLES), ckpt_path=path))
    if said:
        return {**told, "said": said}
    told |= {"loaded": _state(again), "live after": _live(learner, again)}
    return {**told, "step": again.global_step, "said": None}


def _state(trainer: Any) -> dict[str, Any]:
    """Return everything that a checkpoint takes from the strategy, as plain numbers."""
    strategy, prepared = trainer.strategy, trainer.run.require_prepared()
    optimizers = [strategy.optimizer_state(prepared, each) for each in trainer.optimizers]
    model = strategy.model_state(prepared)
    return {
        # Ranks that leave saving to rank 0 may have empty tensors.
        "model": _plain({k: v for k, v in model.items() if getattr(v, "shape", ()) != (0,)}),
        "optimizer": _plain(optimizers),
        "own": _plain(strategy.state(prepared, trainer.optimizers)),
    }


def _live(learner: Learner, trainer: Any) -> dict[str, Any]:
    """Return what user code sees of the model and its optimizer on this rank."""
    buffers = {f"net.{name}": value for name, value in learner.net.named_buffers()}
    return {
        "the buffers": _plain(buffers),
        "the extra state": getattr(learner.net, "history", None),
        "optimizer.param_groups": [
            {key: _plain(value) for key, value in group.items() if key != "params"}
            for one in trainer.optimizers
            for group in one.param_groups
        ],
    }


def _with_dtypes(state: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
        for name, value in state.items()
    }


def _plain(data: Any) -> Any:
    if isinstance(data, Tensor):
        return {"dtype": str(data.dtype), "numbers": numbers(data)}
    if isinstance(data, Mapping):
        return {str(key): _plain(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_plain(each) for each in data]
    return data if isinstance(data, (int, float, str, bool, type(None))) else repr(type(data))


@judge_of(_round_trip)
def _judge_round_trip(found: Result) -> None:
    what_it_is = {
        "model": "load_model_state does not restore what model_state returned",
        "optimizer": "load_optimizer_state does not restore what optimizer_state returned",
        "own": "load_state does not restore what state returned",
    }
    _judge_saved(found.ranks[0])
    for rank, told in enumerate(found.ranks):
        _judge_end_of_training(rank, told)
        assert told["said"] is None, (
            f"a checkpoint of the strategy's own did not load on rank {rank}: "
            f"{told['said']['kind']}: {told['said']['text']}"
        )
        assert told["step"] == SAVED_AT, (
            f"rank {rank} counts {told['step']} steps after loading a checkpoint of step {SAVED_AT}"
        )
        for what, meaning in what_it_is.items():
            loaded = told["loaded"][what]
            saved = told["saved"][what]
            if what == "model":
                # Buffers may differ, of which rank 0's are saved; others may leave saving to it.
                whole = found.ranks[0]["saved"][what]
                saved = {name: value for name, value in whole.items() if not rank or name in loaded}
            where = _first_difference(saved, loaded)
            assert where is None, f"{meaning}: they differ at {where} on rank {rank}"
        for what, of_first in found.ranks[0]["lives"].items():
            expected = of_first
            if found.capabilities.parameters == "divided" and what == "the buffers":
                # This rank saves the buffers that rank 0 lacks.
                expected = {name: of_first.get(name, v) for name, v in told["lives"][what].items()}
            where = _first_difference(told["live after"][what], expected)
            assert where is None, (
                f"{what} are not after a load what they were at the save on rank {rank} (look at "
                "load_model_state and load_optimizer_state, and at what model_state and "
                f"optimizer_state return): they differ at {where}"
            )


def _judge_end_of_training(rank: int, told: Mapping[str, Any]) -> None:
    """Compare what would be saved after the last step with what is saved after the fit."""
    last, saved = told["last"], told["saved"]
    # With other weights (an average), the strategy's own state may well be another one.
    if any(_first_difference(last[what], saved[what]) for what in ("model", "optimizer")):
        return
    where = _first_difference(saved["own"], last["own"])
    assert where is None, (
        f"state returned something else on rank {rank} after the fit than after its last step, and "
        "model and optimizer are the same: end_training(prepared) has changed or dropped what a "
        f"run that resumes from a save after the fit needs. They differ at {where}"
    )


def _judge_saved(told: Mapping[str, Any]) -> None:
    """Compare what rank 0 saves with what there is."""
    model, expected = told["saved"]["model"], told["names"]
    assert model.keys() == expected.keys(), (
        f"model_state returned the names {sorted(model)} on rank 0, expected those of the model's "
        "state_dict(), with its extra state (get_extra_state) and without buffers of "
        f"persistent=False: {sorted(expected)}"
    )
    for name, value in model.items():
        dtype = value.get("dtype", "dict")
        assert dtype == expected[name], (
            f"model_state returned {name!r} in {dtype} on rank 0, expected {expected[name]}, which "
            "the model has"
        )
    buffers = {k: v for k, v in told["lives"]["the buffers"].items() if k in model}
    where = _first_difference({name: model[name] for name in buffers}, buffers)
    assert where is None, (
        "model_state returned other buffers on rank 0 than the model has: they went through "
        f"another dtype, or are old ones; they differ at {where}"
    )
    for state in told["saved"]["optimizer"]:
        for name, entry in state["state"].items():
            step = entry.get("step")
            counted = step["numbers"][0] if isinstance(step, dict) else step
            assert counted == told["steps"], (
                f"optimizer_state returned the 'step' of {name!r} as {counted} on rank 0, expected "
                f"{told['steps']}, of which float32 has not all digits"
            )


def _first_difference(own: Any, other: Any, where: str = "") -> str | None:
    if isinstance(own, dict) and isinstance(other, dict):
        if own.keys() != other.keys():
            return f"{where or 'its keys'} ({sorted(own.keys() ^ other.keys())})"
        if own.keys() == {"dtype", "numbers"} and own["dtype"] == other["dtype"]:
            exact = own["dtype"] in ("torch.float64", "torch.complex128")
            pair = own["numbers"], other["numbers"]
            same = _same_numbers(*pair, 1e-12 if exact else 1e-6)
            return None if same else f"{where} ({shown(pair[0])}, {shown(pair[1])})"
        inner = (_first_difference(v, other[k], f"{where}[{k!r}]") for k, v in own.items())
        return next((found for found in inner if found), None)
    if isinstance(own, list) and isinstance(other, list):
        if len(own) != len(other):
            return f"{where} ({len(own)} and {len(other)} entries)"
        pairs = enumerate(zip(own, other, strict=True))
        inner = (_first_difference(a, b, f"{where}[{i}]") for i, (a, b) in pairs)
        return next((found for found in inner if found), None)
    if isinstance(own, (int, float)) and isinstance(other, (int, float)):
        return None if _same_numbers([own], [other], 1e-6) else f"{where} ({own}, {other})"
    return None if own == other else f"{where} ({own!r}, {other!r})"


def _same_numbers(own: list[Any], other: list[Any], tolerance: float) -> bool:
    """Whether numbers are equal: floats up to a tolerance, integers to the last digit."""
    if all(isinstance(value, int) for value in [*own, *other]):
        return own == other
    return close(own, other, tolerance)


@check("state/in part")
def _in_part(probe: Probe) -> dict[str, Any]:
    """If a name is missing, load_model_state raises an error, and loads nothing.

    With strict=False, it loads all other names, including buffers and a module's extra state. It
    copies values, so that the model shares no memory with the state. An evaluation uses them.
    """
    learner, other = Learner("unusual", "adam"), Learner("unusual", seed=5)
    trainer = probe.fit(learner, 8)
    strategy, prepared = trainer.strategy, trainer.run.require_prepared()
    part = {name: value for name, value in other.state_dict().items() if name != LEFT_OUT}
    part["net.stranger"] = torch.zeros(1)

    def now() -> Any:
        return _plain(strategy.model_state(prepared))

    before = now()
    said = probe.said(lambda: strategy.load_model_state(prepared, part))
    refused = now()
    strategy.load_model_state(prepared, part, strict=False)
    told = {"said": said, "before": before, "refused": refused, "loaded": now()}
    told["part"] = _plain(part)
    told["evaluated"] = {}
    can = strategy.capabilities
    if not can.sharded_state and can.parameters != "divided":
        with strategy.evaluation(prepared), torch.no_grad():
            told["evaluated"] = _plain(dict(learner.named_parameters()))
    with torch.no_grad():
        for value in part.values():
            if isinstance(value, Tensor) and value.is_floating_point():
                value.zero_()
    return {**told, "later": now()}


LEFT_OUT = "net.last.weight"
"""What the state of `state/in part` lacks."""


@judge_of(_in_part)
def _judge_in_part(found: Result) -> None:
    for rank, told in enumerate(found.ranks):
        said = told["said"]
        assert said is not None, (
            f"load_model_state(prepared, state, strict=True) loaded a state without {LEFT_OUT!r} "
            f"on rank {rank}, and said nothing: refuse missing and unexpected names "
            "(stratagem.state.check_weights does)"
        )
        assert LEFT_OUT in said["text"], (
            f"a state without {LEFT_OUT!r} ends on rank {rank} in an error that does not name it: "
            f"{said['kind']}: {said['text']}"
        )
    told = found.ranks[0]
    where = _first_difference(told["refused"], told["before"])
    assert where is None, (
        "load_model_state refused a state with strict=True, and has loaded some of it before: "
        f"check names and shapes first (stratagem.state.check_weights); the model has changed at "
        f"{where}"
    )
    part = {name: value for name, value in told["part"].items() if name in told["before"]}
    where = _first_difference(told["loaded"], {**told["before"], **part})
    assert where is None, (
        "load_model_state(prepared, state, strict=False) has to load every parameter, buffer and "
        "extra state that both have, and to leave the rest: the model's state is another one at "
        f"{where}"
    )
    evaluated = {name: value for name, value in told["evaluated"].items() if name in part}
    where = _first_difference(evaluated, {name: part[name] for name in evaluated})
    assert where is None, (
        "after load_model_state(prepared, state), an evaluation uses other weights than those of "
        "the state: what evaluation(prepared) uses, such as an average of weights, is that of the "
        "weights before. Let load_model_state drop it, so that it begins with the loaded weights; "
        f"load_state comes after it. They differ at {where}"
    )
    where = _first_difference(told["later"], told["loaded"])
    assert where is None, (
        "the model changes with the tensors of the state that load_model_state was given: copy "
        "their values (parameter.copy_), and do not make them the model's own (parameter.data = "
        f"...), which may also have another dtype; it has changed at {where}"
    )
