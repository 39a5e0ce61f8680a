"""States of optimizers and schedulers that do not fit are refused when they are loaded."""

from __future__ import annotations

import copy
import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from logged_runs import Learner, last_of, numbers, trainer_in
from torch import nn
from torch.optim import lr_scheduler

from stratagem import Lite
from stratagem.checkpoint import SingleFileCheckpointIO
from stratagem.errors import CheckpointMismatchError
from stratagem.state.state_checks import load_scheduler_state
from stratagem.state.state_dict import load_named_state, load_weights, named_state, with_names

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "ASGD": torch.optim.ASGD,
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "Adagrad": torch.optim.Adagrad,
    "Adam": torch.optim.Adam,
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, amsgrad=True),
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
    "SGD": torch.optim.SGD,
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
}


def stepped(make: Callable[[Any], torch.optim.Optimizer]) -> tuple[nn.Module, Any]:
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters())
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_that_fits_is_loaded_by_each_optimizer_of_torch(name: str) -> None:
    model, optimizer = stepped(OPTIMIZERS[name])
    state = copy.deepcopy(named_state(optimizer, model))
    fresh = OPTIMIZERS[name](model.parameters())
    load_named_state(fresh, model, state)
    for key, entry in named_state(fresh, model)["state"].items():
        for part, value in entry.items():
            assert value is None or torch.equal(value, state["state"][key][part])
    fresh.step()


def test_a_state_of_lbfgs_is_loaded() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(1, 3)).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]  # its annotations
    state = copy.deepcopy(named_state(optimizer, model))
    fresh = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe")
    load_named_state(fresh, model, state)
    loaded, saved = named_state(fresh, model)["state"], state["state"]
    assert loaded.keys() == saved.keys()
    for name, entry in saved.items():
        assert loaded[name].keys() == entry.keys()
        assert loaded[name]["n_iter"] == entry["n_iter"] > 0


def test_an_entry_that_takes_the_place_of_sgds_momentum_is_refused() -> None:
    model, optimizer = stepped(OPTIMIZERS["SGD with momentum"])
    state = copy.deepcopy(named_state(optimizer, model))
    state["state"]["weight"] = {"exp_avg_x": torch.zeros(2, 3)}
    with pytest.raises(CheckpointMismatchError, match="'exp_avg_x' of weight, expected nothing"):
        load_named_state(optimizer, model, state)


def test_a_state_of_a_parameter_in_no_group_is_refused_for_any_optimizer_and_strategy() -> None:
    class Own(torch.optim.SGD):
        pass

    model, optimizer = stepped(lambda parameters: Own(parameters, momentum=0.9))
    state = copy.deepcopy(named_state(optimizer, model))
    state["state"]["weight"] = {"of its own": 1}
    assert with_names(optimizer, model, state) is state
    state["state"]["zzz.weight"] = state["state"].pop("bias")
    with pytest.raises(CheckpointMismatchError, match=r"parameters zzz\.weight, which are in none"):
        with_names(optimizer, model, state)


def set_entry(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["state"]["weight"].update(values)


def set_option(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["param_groups"][0].update(values)


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "shape": (
        set_entry(exp_avg=torch.zeros(7)),
        r"a tensor of \(7,\) and torch.float32 as 'exp_avg' of weight, expected the shape \(2, 3\)",
    ),
    "dtype": (
        set_entry(exp_avg=torch.zeros(2, 3, dtype=torch.int64)),
        r"a tensor of \(2, 3\) and torch.int64 as 'exp_avg' of weight, expected a tensor of floats",
    ),
    "kind": (set_entry(exp_avg_sq=3), "has 3 as 'exp_avg_sq' of weight, expected a tensor"),
    "none": (set_entry(exp_avg_sq=None), "has None as 'exp_avg_sq' of weight"),
    "step of a text": (set_entry(step="4"), "has '4' as 'step' of weight, expected a number"),
    "step of a list": (set_entry(step=[4]), "has a list of 1 as 'step' of weight"),
    "step of many": (set_entry(step=torch.zeros(2)), r"has a tensor of \(2,\).*as 'step'"),
    "step below 0": (set_entry(step=-1), "has -1 as 'step' of weight, expected a number from 0"),
    "tensor of a step below 0": (set_entry(step=torch.tensor(-1.0)), "as 'step' .* from 0 on"),
    "a number that is too large": (set_option(weight_decay=10**30), "as .* 'weight_decay', expec"),
    "missing": (
        lambda state: state["state"]["weight"].pop("exp_avg_sq"),
        "lacks 'exp_avg_sq' of weight, which Adam needs",
    ),
    "missing for an option": (set_option(amsgrad=True), "lacks 'max_exp_avg_sq' of weight"),
    "another parameter": (
        lambda state: state["state"].update({"zzz.weight": state["state"].pop("weight")}),
        "state of the parameters zzz.weight, which are in none of its groups",
    ),
    "another entry": (
        set_entry(exp_avg_x=torch.zeros(2, 3)),
        r"a tensor of \(2, 3\) and torch.float32 as 'exp_avg_x' of weight, expected nothing",
    ),
    "no entries": (
        lambda state: state["state"].update(weight=5),
        "has 5 as the state of weight, expected a dict by names",
    ),
    "a list of entries": (
        lambda state: state["state"].update(weight=[1, 2]),
        "has a list of 2 as the state of weight",
    ),
    "names of entries": (lambda state: state["state"]["weight"].update({3: 4}), "state of weight"),
    "no state": (lambda state: state.pop("state"), "the state of an optimizer lacks state"),
    "state of a list": (
        lambda state: state.update(state=[]),
        r"the state of an optimizer\['state'\] is a list, expected a dict",
    ),
    "no groups": (lambda state: state.pop("param_groups"), "of an optimizer lacks param_groups"),
    "groups of a number": (
        lambda state: state.update(param_groups=3),
        r"optimizer\['param_groups'\] is 3, expected a list",
    ),
    "group of a list": (
        lambda state: state.update(param_groups=[[]]),
        r"\['param_groups'\]\[0\] is a list, expected a dict",
    ),
    "params of a number": (set_option(params=4), r"\['params'\] is 4, expected a list"),
    "params of lists": (
        set_option(params=[["a"]]),
        r"\['params'\]\[0\] is a list, expected a str or a whole number",
    ),
    "rate of a text": (set_option(lr="1"), "'1' as the group option 'lr', expected a number"),
    "rate of none": (set_option(lr=None), "None as the group option 'lr', expected a number"),
    "no rate": (set_option(lr=float("nan")), "nan as the group option 'lr', expected a number"),
    "rates": (set_option(lr=[0.1]), "a list of 1 as the group option 'lr', expected a number"),
    "betas of a number": (set_option(betas=0.9), "0.9 as the group option 'betas', expected a li"),
    "one beta": (set_option(betas=(0.9,)), "a tuple of 1 as .* 'betas', expected 2 values"),
    "betas of texts": (set_option(betas=("a", "b")), "as .* 'betas', expected a number"),
    "bool of a text": (set_option(amsgrad="no"), "'no' as .* 'amsgrad', expected a bool"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_state_that_does_not_fit_names_parameter_and_entry(damage: str) -> None:
    model, optimizer = stepped(torch.optim.Adam)
    before = copy.deepcopy(optimizer.state_dict())
    state = copy.deepcopy(named_state(optimizer, model))
    change, message = DAMAGES[damage]
    change(state)
    with pytest.raises(CheckpointMismatchError, match=message):
        load_named_state(optimizer, model, state)
    assert str(optimizer.state_dict()) == str(before)


def test_numbers_of_parameters_that_no_group_has_are_refused() -> None:
    model, optimizer = stepped(torch.optim.Adam)
    state = optimizer.state_dict()
    state["state"][7] = state["state"][1]
    with pytest.raises(CheckpointMismatchError, match="state of the parameters 7, which are in"):
        with_names(optimizer, model, state)
    with pytest.raises(CheckpointMismatchError, match="the state of an optimizer lacks state"):
        with_names(optimizer, model, {"param_groups": 3})


def test_the_error_of_a_third_partys_optimizer_is_explained() -> None:
    class Own(torch.optim.SGD):
        def load_state_dict(self, state_dict: Any) -> None:
            raise KeyError("momentum")

    model, optimizer = stepped(Own)
    with pytest.raises(CheckpointMismatchError, match=r"Own cannot load its state \(KeyError: 'mo"):
        load_named_state(optimizer, model, named_state(optimizer, model))


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "milestones": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 4]),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, 20),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.1, 0.2),
    "plateau": lr_scheduler.ReduceLROnPlateau,
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)],
        [3],
    ),
}


def scheduled(name: str) -> Any:
    return SCHEDULERS[name](torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1, momentum=0.9))


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_state_that_fits_is_loaded_by_each_scheduler(name: str) -> None:
    scheduler, fresh = scheduled(name), scheduled(name)
    for _ in range(5):
        scheduler.step(*([1.0] if name == "plateau" else []))
    state = scheduler.state_dict()
    load_scheduler_state(fresh, copy.deepcopy(state))
    assert str(fresh.state_dict()) == str(state)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("step", {"step": 3}, "has 3 as 'step' of the scheduler StepLR, expected nothing"),
        ("step", {"get_lr": 3}, "has 3 as 'get_lr' of the scheduler StepLR, expected nothing"),
        ("step", {"optimizer": 3}, "has 3 as 'optimizer'"),
        ("step", {"last_epoch": "1"}, "has '1' as 'last_epoch' of .*, expected a number"),
        ("step", {"last_epoch": None}, "has None as 'last_epoch'"),
        ("step", {"base_lrs": [0.1, 0.2]}, "a list of 2 as 'base_lrs' of .*, expected 1 values"),
        ("step", {"base_lrs": ["a"]}, "a list of 1 as 'base_lrs' of .*, expected a number"),
        ("step", {"_last_lr": 3}, "has 3 as '_last_lr' of .*, expected a list"),
        ("milestones", {"milestones": [2, 4]}, "as 'milestones' of .*, expected a dict of numbers"),
        ("one cycle", {"_schedule_phases": 3}, r"OneCycleLR cannot load its state \(TypeError"),
        (
            "one cycle",
            {"_schedule_phases": [{}, {}]},
            r"OneCycleLR .* state \(KeyError: 'end_step'",
        ),
        (
            "one cycle",
            {"_schedule_phases": [{"end_step": 3}]},
            "a list of 1 as '_schedule_phases' of",
        ),
        ("one cycle", {"last_epoch": 10**30}, "as 'last_epoch' of .*, expected a number"),
        ("plateau", {"mode": 3}, "has 3 as 'mode' of .*, expected a text"),
        ("sequential", {"_schedulers": 3}, "has 3 as '_schedulers' of .*, expected a list"),
        ("sequential", {"_schedulers": [3, 4]}, "has 3 as the state of the scheduler ConstantLR"),
        ("sequential", {"_schedulers": [{}, {"step": 1}]}, "'step' of the scheduler Exponential"),
    ],
)
def test_a_schedulers_state_that_does_not_fit_is_named(
    name: str, change: dict[str, Any], message: str
) -> None:
    scheduler = scheduled(name)
    state = {**copy.deepcopy(scheduler.state_dict()), **change}
    with pytest.raises(CheckpointMismatchError, match=message):
        load_scheduler_state(scheduler, state)


@pytest.mark.parametrize(
    ("key", "value"),
    [("start_lr", "lrs"), ("end_momentum", None), ("end_step", "3"), ("end_step", torch.zeros(3))],
)
def test_a_phase_that_does_not_fit_is_named(key: str, value: Any) -> None:
    scheduler = scheduled("one cycle")
    state = copy.deepcopy(scheduler.state_dict())
    state["_schedule_phases"][1][key] = value
    with pytest.raises(CheckpointMismatchError, match="a list of 2 as '_schedule_phases' of"):
        load_scheduler_state(scheduler, state)


def test_phases_of_another_length_are_loaded() -> None:
    saved, fresh = scheduled("one cycle"), scheduled("one cycle")
    state = copy.deepcopy(saved.state_dict())
    state["_schedule_phases"][1]["end_step"] = 7
    load_scheduler_state(fresh, state)
    assert fresh.state_dict()["_schedule_phases"] == state["_schedule_phases"]


@pytest.mark.parametrize("state", [3, [], None])
def test_load_scheduler_state_refuses_other_states(state: Any) -> None:
    with pytest.raises(CheckpointMismatchError, match="as the state of the scheduler StepLR"):
        load_scheduler_state(scheduled("step"), state)


def test_a_scheduler_that_lacks_an_entry_is_explained() -> None:
    with pytest.raises(CheckpointMismatchError, match=r"LambdaLR cannot load its state \(KeyError"):
        load_scheduler_state(scheduled("lambda"), {"last_epoch": 1})


class Scheduled(Learner):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters())
        return [optimizer], [lr_scheduler.StepLR(optimizer, 1)]


@pytest.mark.parametrize("place", ["optimizer", "scheduler"])
def test_a_trainer_refuses_them_with_the_path(place: str, tmp_path: Path) -> None:
    first = trainer_in(tmp_path, False)
    first.fit(Scheduled(), numbers())
    saved = first.checkpoint_writer.load(last_of(first))
    if place == "optimizer":
        entry = next(iter(saved["optimizer_states"][0]["state"].values()))
        entry["exp_avg"] = entry["exp_avg"].to(torch.int64)
    else:
        saved["lr_schedulers"][0]["step"] = 3
    path = tmp_path / "edited.ckpt"
    first.checkpoint_writer.save(saved, path)
    with pytest.raises(CheckpointMismatchError, match=re.escape(f"{str(path)!r}: the checkpoint")):
        trainer_in(tmp_path, False, max_epochs=2).fit(Scheduled(), numbers(), ckpt_path=path)


@pytest.mark.parametrize(
    ("entry", "value", "said"),
    [
        ("callbacks", 3, "the checkpoint has a list of 1 as ModelCheckpoint's 'last_step_saved'"),
        (
            "ranks",
            [{"random": {}}],
            "state of rank 0 lacks loader",
        ),
    ],
)
def test_an_entry_in_another_form_is_named_with_the_checkpoint(
    entry: str, value: Any, said: str, tmp_path: Path
) -> None:
    first = trainer_in(tmp_path, False)
    first.fit(Scheduled(), numbers())
    saved = first.checkpoint_writer.load(last_of(first))
    path = tmp_path / "edited.ckpt"
    if entry == "callbacks":
        (value,) = ({key: {"last_step_saved": [value]}} for key in saved["callbacks"])
    first.checkpoint_writer.save({**saved, entry: value}, path)
    again = trainer_in(tmp_path, False, max_epochs=2)
    with pytest.raises(CheckpointMismatchError, match=re.escape(f"{str(path)!r}: {said}")):
        again.fit(Scheduled(), numbers(), ckpt_path=path)


def test_an_attribute_of_a_state_dict_takes_the_place_of_no_method(tmp_path: Path) -> None:
    state: Any = OrderedDict(w=torch.ones(2))
    vars(state).update(keys=5, _metadata={"": {"version": 1}})
    torch.save({"state_dict": state}, tmp_path / "edited.ckpt")
    loaded = SingleFileCheckpointIO().load_checkpoint(tmp_path / "edited.ckpt")
    assert list(loaded["state_dict"].keys()) == ["w"]


def test_lite_refuses_the_state_of_a_scheduler(tmp_path: Path) -> None:
    lite = Lite(accelerator="cpu")
    lite.save(tmp_path / "one.ckpt", {"schedule": {"step": 3}})
    with pytest.raises(CheckpointMismatchError, match="'step' of the scheduler StepLR"):
        lite.load(tmp_path / "one.ckpt", {"schedule": scheduled("step")})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({0: torch.zeros(1)}, "the state by names has the key 0, expected a str"),
        ({"weight": "x"}, r"these have another shape: weight 'x' \(the model has \(1, 3\)\)"),
        ({"bias": {"a": 1}}, r"bias a dict \(the model has \(1,\)\)"),
    ],
)
def test_weights_of_other_kinds_are_refused_by_name(changed: dict[Any, Any], message: str) -> None:
    model = nn.Linear(3, 1)
    with pytest.raises(CheckpointMismatchError, match=message):
        load_weights(model, {**model.state_dict(), **changed})
