"""What each rank reads, evaluates and logs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stratagem.callbacks import Callback
from stratagem.checkpoint import read_whole
from stratagem_testing.strategies.check import Result, check, judge_of
from stratagem_testing.strategies.judging import by_part, close, norm, shown
from stratagem_testing.strategies.models import Learner, Numbered, build, flat
from stratagem_testing.strategies.probe import Probe


@check("data/sampler")
def _sampler(probe: Probe) -> dict[str, Any]:
    """Ranks divide the data into disjoint parts, which cover all samples.

    Ranks with the same part read the same batches.
    """
    learner = Learner()
    trainer = probe.fit(learner, 36)
    ranks = trainer.ranks
    return {
        "shard": list(ranks.data_split),
        "shards": [list(shard) for shard in ranks.data_splits],
        "rank": [ranks.global_rank, ranks.world_size],
        "seen": learner.seen,
        "batches": trainer.num_training_batches,
    }


@judge_of(_sampler)
def _judge_sampler(found: Result) -> None:
    world = len(found.ranks)
    for rank, told in enumerate(found.ranks):
        assert told["rank"] == [rank, world], (
            f"ranks say that rank {rank} of {world} is rank {told['rank'][0]} of {told['rank'][1]}"
        )
        assert told["shards"][rank] == told["shard"], (
            f"data_split of rank {rank} is {told['shard']}, and its data_splits have "
            f"{told['shards'][rank]} for it"
        )
        assert told["shards"] == found.ranks[0]["shards"], "ranks disagree on the parts of the data"
    parts = len({told["shard"][0] for told in found.ranks})
    assert parts == found.target.data_groups, (
        f"ranks divide the data into {parts} part(s), expected {found.target.data_groups}: say "
        "data_groups = ... in the test where ranks share their data"
    )
    for told in found.ranks:
        same = next(other for other in found.ranks if other["shard"] == told["shard"])
        assert told["seen"] == same["seen"], "ranks of one part of the data read different batches"
    each = by_part(found.ranks, "seen")
    read = sorted(number for part in each for batch in part for number in batch)
    missing = sorted(set(range(36)) - set(read))
    assert not missing, (
        f"samples {missing} of 36 were not trained on: a part of the data was not read, or a last "
        "batch was dropped"
    )
    twice = len(read) - len(set(read))
    assert twice <= found.target.data_groups, (
        f"{twice} of 36 samples were read more than once: the parts of the data overlap"
    )


class _Events(Callback):
    """Notes which hooks are called, in order."""

    def __init__(self) -> None:
        self.called: list[str] = []


def _noting(name: str) -> Any:
    def hook(self: _Events, *arguments: Any) -> None:
        self.called.append(name)

    return hook


HOOKS = (
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
)
OF_MICRO_BATCHES = (
    "on_train_batch_start",
    "on_before_backward",
    "on_after_backward",
    "on_train_batch_end",
)
"""Hooks of a micro-batch, in order."""
OPTIONAL = {
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
}
"""Hooks that a strategy which runs the whole step as one program has no place for."""
for _name in HOOKS:
    setattr(_Events, _name, _noting(_name))


@check("data/hooks", reference=True)
def _hooks(probe: Probe) -> dict[str, Any]:
    """The hooks of callbacks are called as often and in the same order as on single_device.

    With opens_micro_batches=True, the micro-batches of a step may overlap. The hooks of each
    micro-batch keep their order.
    """
    events = _Events()
    trainer = probe.trainer(callbacks=events, max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(Learner(), probe.loader(24), probe.loader(8))
    return {"called": events.called, "overlaps": trainer.strategy.opens_micro_batches}


def _overlap(called: Sequence[str], expected: Sequence[str]) -> bool:
    """Whether the calls are the expected ones, with micro-batches that overlap within a step."""
    hooks = [name for name in OF_MICRO_BATCHES if name in called]
    counts = dict.fromkeys(hooks, 0)
    for name in called:
        if name in counts:
            counts[name] += 1
        # No micro-batch has a later hook before an earlier one.
        if any(counts[first] < counts[second] for first, second in pairwise(hooks)):
            return False
    return _ordered(called) == _ordered(expected)


def _ordered(called: Sequence[str]) -> list[str]:
    """Return the calls with those of the micro-batches of each step sorted."""
    ordered: list[str] = []
    of_step: list[str] = []
    for name in called:
        if name in OF_MICRO_BATCHES:
            of_step.append(name)
        else:
            ordered += [*sorted(of_step), name]
            of_step = []
    return ordered + sorted(of_step)


@judge_of(_hooks)
def _judge_hooks(found: Result) -> None:
    expected = found.reference["called"]
    for rank, told in enumerate(found.ranks):
        can, called = found.capabilities, told["called"]
        is_program = can.engine_steps or not can.manual_backward
        left_out = OPTIONAL - set(called) if is_program else set()
        wanted = [name for name in expected if name not in left_out]
        if called == wanted or (told["overlaps"] and _overlap(called, wanted)):
            continue
        counts = {name: (called.count(name), wanted.count(name)) for name in HOOKS}
        wrong = [
            f"{name} {mine} time(s), expected {other}"
            for name, (mine, other) in counts.items()
            if mine != other
        ]
        said = "; ".join(wrong) or f"in the order {called}, expected {wanted}"
        raise AssertionError(f"hooks are called otherwise on rank {rank}: {said}")


@check("data/logging", reference=True)
def _logging(probe: Probe) -> dict[str, Any]:
    """Logged values are reduced over all ranks, and every rank knows the result."""
    learner = Learner()
    trainer = probe.fit(learner)
    return {
        "shard": list(trainer.ranks.data_split),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "losses": learner.losses,
    }


@judge_of(_logging)
def _judge_logging(found: Result) -> None:
    parts = by_part(found.ranks, "losses")
    expected = dict(found.reference["metrics"])
    # Of the losses that there were, which are another check's affair.
    expected["loss"] = sum(map(sum, parts)) / sum(map(len, parts))
    for rank, told in enumerate(found.ranks):
        for name, value in expected.items():
            received = told["metrics"].get(name)
            assert received is not None, f"rank {rank} does not know the logged value {name!r}"
            assert math.isclose(received, value, rel_tol=1e-5, abs_tol=1e-6), (
                f"{name!r}, logged on each rank, is {received:.7g} on rank {rank}, expected "
                f"{value:.7g}: it was not reduced over all parts of the data"
            )


class _Counted(nn.Module):
    """A metric object as of torchmetrics: the number of samples of all ranks.

    Args:
        learner: the owner; its ranks communicate in `compute`.
    """

    def __init__(self, learner: Learner) -> None:
        super().__init__()
        self._learner = (learner,)  # no submodule
        self.reset()

    def reset(self) -> None:
        """Count again."""
        self.count = 0.0

    def compute(self) -> torch.Tensor:
        """Return the number of samples of all ranks."""
        return self._learner[0].trainer.ranks.all_reduce(torch.tensor(self.count), "sum")


class _Gathering(Learner):
    """Communicates in evaluation steps, as users do: ranks may have different numbers of them."""

    def __init__(self) -> None:
        super().__init__("batch_norm")
        self.counted = _Counted(self)
        self.gathered: list[tuple[list[int], list[int]]] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Gather the numbers of the samples, and log values that are reduced at each step."""
        super().validation_step(batch, batch_idx)
        if self.trainer.ranks.world_size > 1:
            number = batch[0]
            self.gathered.append((number.tolist(), self.all_gather(number).flatten().tolist()))
            self.log("at each step", float(len(number)), sync_dist=True, on_step=True)
            self.counted.count += len(number)
            self.log("counted", self.counted)


@check("evaluation/uneven ranks", reference=True)
def _uneven(probe: Probe) -> dict[str, Any]:
    """An evaluation counts each sample once if ranks have different numbers of batches, or none.

    Collectives of a step run among the ranks that have a batch. Metric objects are computed on all
    ranks.

    If ranks hang in this check, forward passes of the evaluation communicate: evaluate a module
    that does not (`PreparedModel.evaluation_module`), or set allows_uneven_eval=False; with
    follows_evaluation=True, announce and follow each operation.
    """
    # With buffers, which a wrapper may communicate in forward passes.
    learner = _Gathering()
    trainer = probe.trainer()
    # One sample: a rank has no batch. At first, since DDP sends buffers in its first pass alone.
    (one,) = trainer.validate(learner, probe.loader(1), verbose=False)
    of_one, learner.evaluated = learner.evaluated, []
    # 9 samples: parts of 5 and 4, in batches of 4 over two ranks: 2 batches and 1.
    (validated,) = trainer.validate(learner, probe.loader(9), verbose=False)
    (tested,) = trainer.test(learner, probe.loader(9), verbose=False)
    half = len(learner.evaluated) // 2
    strategy = trainer.strategy
    return {
        "exact": strategy.capabilities.allows_uneven_eval or strategy.follows_evaluation,
        "shard": list(trainer.ranks.data_split),
        "val_loss": validated["val_loss"],
        "test_loss": tested["val_loss"],
        "evaluated": learner.evaluated[:half],
        "loss of one": one["val_loss"],
        "counted": [one.get("counted"), validated.get("counted")],
        "gathered": learner.gathered,
        "evaluated of one": of_one,
    }


@judge_of(_uneven)
def _judge_evaluation(found: Result) -> None:
    parts = by_part(found.ranks, "evaluated")
    numbers = sorted(number for part in parts for batch, _ in part for number in batch)
    assert set(numbers) == set(range(9)), (
        f"samples {sorted(set(range(9)) - set(numbers))} of 9 were not evaluated"
    )
    if found.ranks[0]["exact"]:
        assert len(numbers) == 9, f"{len(numbers) - 9} of 9 samples were evaluated twice"
    else:
        counts = {len(part) for part in parts}
        assert len(counts) == 1, (
            "allows_uneven_eval=False and follows_evaluation=False in the capabilities, and ranks "
            f"ran different numbers of batches: {counts}"
        )
    expected = sum(loss for part in parts for _, loss in part) / len(numbers)
    for rank, told in enumerate(found.ranks):
        for own, everyone in told["gathered"]:
            assert set(own) <= set(everyone), (
                f"all_gather in an evaluation step returned the samples {everyone} on rank {rank}, "
                f"which has {own}: look at all_gather and among(members) of the ranks"
            )
        assert told["counted"] == found.ranks[0]["counted"], (
            f"ranks have different values of a metric object: {told['counted']} on rank {rank}, "
            f"{found.ranks[0]['counted']} on rank 0"
        )
        for name in ("val_loss", "test_loss"):
            assert math.isclose(told[name], expected, rel_tol=1e-4), (
                f"{name} is {told[name]:.7g} on rank {rank}, expected {expected:.7g}, the mean "
                f"over the samples of all ranks: it is that of a part of the data"
            )
        ((_, only), *_) = (
            batch for part in by_part(found.ranks, "evaluated of one") for batch in part
        )
        assert math.isclose(told["loss of one"], only, rel_tol=1e-4), (
            f"the loss of an evaluation of one sample, of which some ranks have no batch, is "
            f"{told['loss of one']:.7g} on rank {rank}, expected {only:.7g}"
        )
    if len(numbers) == 9:
        wanted = found.reference["val_loss"]
        assert math.isclose(expected, wanted, rel_tol=1e-4), (
            f"the loss of an untrained model is {expected:.7g}, and {wanted:.7g} on single_device"
        )


class _Watching(Learner):
    """Evaluates one and the same input on every rank; a buffer that is not saved is a part of it.

    Training steps change this buffer by their samples, which differ between ranks.
    """

    def __init__(self) -> None:
        super().__init__("batch_norm", "sgd")
        self.register_buffer("latest", torch.zeros(()), persistent=False)
        net: Any = self.net
        net[0].bias.requires_grad_(False)
        net[2].eval()
        self.put_in_training = False
        self.outputs: list[list[float]] = []
        self.of_the_saved: list[float] = []
        self.evaluation_modes: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        net: Any = self.net
        self.put_in_training |= net[2].training
        self.get_buffer("latest").copy_(batch[1].mean())
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs = Numbered(8).inputs.to(batch[1].device)
        outputs = self.net(inputs)
        self.of_the_saved = outputs.flatten().tolist()
        self.outputs.append((outputs + self.get_buffer("latest")).flatten().tolist())
        self.evaluation_modes.append(self.net.training)


class Parameters(Callback):
    """Notes which parameters change between one training batch and the next one.

    Args:
        values: whether to also compare the values of the tensors on this rank.
    """

    def __init__(self, values: bool) -> None:
        self.values = values
        self.left: dict[str, tuple[bool, float]] = {}
        self.changed: list[str] = []

    def now(self, module: Any) -> dict[str, tuple[bool, float]]:
        """Return whether each parameter is trained, and a number for its values."""
        return {
            name: (p.requires_grad, float(p.detach().double().sum()) if self.values else 0.0)
            for name, p in module.named_parameters()
        }

    def on_train_batch_end(self, trainer: Any, module: Any, *of_batch: Any) -> None:
        """Note what a batch has left."""
        self.left = self.now(module)

    def on_train_batch_start(self, trainer: Any, module: Any, *of_batch: Any) -> None:
        """Note what has changed since."""
        now = self.now(module)
        self.changed += [name for name, seen in self.left.items() if now.get(name) != seen]


_STEPS = 7
"""Steps of a fit: a strategy's period is rarely a divisor of seven."""


class _SavesAtTheEnd(Callback):
    """Saves at the end of the last validation, as users save the best model.

    Args:
        probe: the probe; its folder contains the file.
    """

    def __init__(self, probe: Probe) -> None:
        self.path = probe.folder / "best.ckpt"

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        """Save after the last step."""
        if trainer.global_step == _STEPS:
            trainer.save_checkpoint(self.path)


@check("evaluation/one model")
def _one_model(probe: Probe) -> dict[str, Any]:
    """All ranks evaluate the same model, in evaluation mode.

    This includes buffers that are not saved (persistent=False). Afterwards, training continues in
    training mode with the parameters from before the evaluation.
    """
    learner, parameters = _Watching(), Parameters(not probe.target.capabilities().sharded_state)
    saves = _SavesAtTheEnd(probe)
    trainer = probe.trainer(max_epochs=1, val_check_interval=1, callbacks=[parameters, saves])
    trainer.fit(learner, probe.loader(8 * _STEPS), probe.loader(8))
    if probe.rank == 0:
        (probe.folder / _EVALUATED).write_text(json.dumps(learner.of_the_saved))
    return {
        "outputs": learner.outputs,
        "training": learner.modes,
        "put in training": learner.put_in_training,
        "changed": parameters.changed,
        "evaluation": learner.evaluation_modes,
    }


@judge_of(_one_model)
def _judge_one_model(found: Result) -> None:
    for rank, told in enumerate(found.ranks):
        assert not any(told["evaluation"]), f"rank {rank} evaluates a model in training mode"
        assert all(told["training"]), (
            f"rank {rank} trains a model in evaluation mode, from micro-batch "
            f"{told['training'].index(False)} on: evaluation mode was left on"
        )
        assert not told["put in training"], (
            f"rank {rank} trains the layer 'net.2' in training mode after an evaluation, and the "
            "user has put it in evaluation mode: put each module back in the mode that it had, and "
            "do not call train() for the whole (look at evaluation and train_step)"
        )
        assert not told["changed"], (
            f"rank {rank} trains on with other parameters than before an evaluation, or with "
            f"another requires_grad: {', '.join(dict.fromkeys(told['changed']))}. "
            "evaluation(prepared) has to put back what it changes"
        )
        for mine, other in zip(told["outputs"], found.ranks[0]["outputs"], strict=True):
            assert close(mine, other, 1e-5), (
                f"ranks 0 and {rank} evaluate different models: the same input gives other "
                "outputs. Parameters or buffers (of batch norm, or persistent=False) are not made "
                "alike in evaluation(prepared)"
            )


_EVALUATED = "evaluated.json"
"""What rank 0 has evaluated in the last validation, beside the model that it has saved then."""


@check("evaluation/saved model", ranks=1, follows="evaluation/one model")
def _saved_model(probe: Probe) -> dict[str, Any]:
    """An evaluation uses the model that a save at its end writes, including buffers.

    A strategy may evaluate another model if it does so on one rank, too, such as an average over
    steps.
    """
    _one_model.run(probe)
    several, one = (_of_saved(probe, folder) for folder in (probe.reference, probe.folder))
    return {"on several ranks": several, "on one rank": one}


def _of_saved(probe: Probe, folder: Path) -> list[list[float]]:
    """Return the outputs of the last evaluation, and those of the model that was saved then."""
    saved = read_whole(probe.trainer().checkpoint_writer.load(folder / "best.ckpt"))["state_dict"]
    net = build("batch_norm").eval()
    net.load_state_dict({k.removeprefix("net."): v for k, v in saved.items() if "net." in k})
    with torch.no_grad():
        outputs = net(Numbered(8).inputs)
    return [json.loads((folder / _EVALUATED).read_text()), outputs.flatten().tolist()]


@judge_of(_saved_model)
def _judge_saved_model(found: Result) -> None:
    (told,) = found.ranks
    (one, saved_on_one), (several, saved) = told["on one rank"], told["on several ranks"]
    if close(one, saved_on_one, 1e-4):
        assert close(several, saved, 1e-4), (
            "the model that is evaluated is not the one that a save at the end of the evaluation "
            "writes, so that the best checkpoint is chosen by another model's loss: evaluated, it "
            f"returns {shown(several)}, and saved, {shown(saved)}. On one rank both are equal. "
            "Buffers (of batch norm) differ between ranks: let evaluation(prepared) and "
            "model_state(prepared) use the same ones, and the same average of parameters"
        )


class _Moving(Learner):
    """Notes how far the weights of the last validation are from those of the begin."""

    def __init__(self) -> None:
        super().__init__("dense", "momentum")
        self.moved: dict[str, list[float]] = {}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Note it, while they are there."""
        self.moved = self.move()
        super().validation_step(batch, batch_idx)

    def move(self) -> dict[str, list[float]]:
        """Return the differences of this rank's whole parameters to those of the begin."""
        whole = {n: p for n, p in self.named_parameters() if not hasattr(p, "to_local")}
        return {
            name: [value - before for value, before in zip(now, self.begun[name], strict=True)]
            for name, now in flat(whole).items()
            if len(now) == len(self.begun.get(name, ()))
        }


_LONG = 64
"""Steps after which an average of weights has moved."""


@check("evaluation/same training")
def _same_training(probe: Probe) -> dict[str, Any]:
    """Training is the same with an evaluation after each step, and without evaluations.

    After more steps, each weight of an evaluation has moved, in the direction of training.
    """

    def losses(**options: Any) -> list[float]:
        learner = Learner("dense", "momentum")
        probe.fit(learner, 8 * _STEPS, **options)
        return learner.losses

    told = {"without": losses(), "with": losses(validated=8, val_check_interval=1)}
    learner, epochs = _Moving(), _LONG // 8
    probe.fit(learner, 64, validated=8, max_epochs=epochs, check_val_every_n_epoch=epochs)
    return {**told, "evaluated": learner.moved, "trained": learner.move()}


@judge_of(_same_training)
def _judge_same_training(found: Result) -> None:
    for rank, told in enumerate(found.ranks):
        assert close(told["with"], told["without"], 1e-6), (
            f"with an evaluation after each step, training has the losses {shown(told['with'])} on "
            f"rank {rank}, and without {shown(told['without'])}: evaluation(prepared) changes what "
            "a later step depends on, such as weights, gradients or a count of steps"
        )
        if found.capabilities.sharded_state:
            continue  # weights are gathered for a while
        for name, trained in told["trained"].items():
            evaluated = told["evaluated"].get(name, trained)
            along = sum(a * b for a, b in zip(evaluated, trained, strict=True))
            assert along >= -0.3 * norm(evaluated) * norm(trained), (
                f"after {_LONG} steps, {name!r} has moved against the direction of training in an "
                f"evaluation on rank {rank}: what evaluation(prepared) uses, such as an average "
                "of weights, moves away from the weights. Look at how it is updated"
            )
            assert (
                found.capabilities.parameters != "same" or norm(evaluated) or not norm(trained)
            ), (
                f"after {_LONG} steps, {name!r} is what it was at the begin in an evaluation on "
                f"rank {rank}, and training has changed it: what evaluation(prepared) uses, such "
                "as an average of weights, is not updated. Do it in optimizer_step, for each "
                "parameter. A strategy with a longer period is tested with a shorter one"
            )
