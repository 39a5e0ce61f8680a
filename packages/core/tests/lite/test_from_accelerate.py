"""Lite's counterparts of Accelerate's: what is accumulated, set up and saved."""

from __future__ import annotations

import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import run_file
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from stratagem import Lite, Trainer
from stratagem.errors import CheckpointMismatchError, CheckpointNotFoundError, ConfigurationError
from stratagem.lite.lite import counterparts_of_accelerate
from stratagem.loggers import CSVLogger

COUNTERPARTS = counterparts_of_accelerate()
SCRIPT = Path(__file__).parents[1] / "scripts" / "from_accelerate.py"


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the script found on each of two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    run_file(SCRIPT, folder=folder)
    return [json.loads((folder / f"found{rank}.json").read_text()) for rank in range(2)]


# ---------------------------------------------------------------- accumulate and save_state


def test_accumulate_windows_equal_a_manual_loop(of_ranks: list[dict[str, Any]]) -> None:
    for found in of_ranks:
        assert found["accumulated"] == found["by hand"]
        assert [is_last for _, is_last, _ in found["accumulated"]] == [
            *(False, False, True, False, True) * 2
        ]
        rates = [float.fromhex(rate) for *_, rate in found["accumulated"]]
        assert rates[-1] == pytest.approx(0.05 * (1 - 0.9 * 8 / 20))


def test_a_run_goes_on_bit_for_bit_from_save_state(of_ranks: list[dict[str, Any]]) -> None:
    for found in of_ranks:
        assert found["resumed"] == found["accumulated"][8:]
        assert found["batches"] == 10


def ones(samples: int) -> Any:
    return torch.ones(samples)


def set_up(**options: Any) -> tuple[Lite, Any, Any, Any]:
    lite = Lite(accelerator="cpu", devices=1, **options)
    net = nn.Linear(1, 1)
    model, optimizer, loader = lite.setup(net, SGD(net.parameters(), lr=0.1), DataLoader(ones(5)))
    return lite, model, optimizer, loader


def test_saving_within_a_window_is_warned_of(tmp_path: Path) -> None:
    lite, model, _, loader = set_up(accumulate_grad_batches=2)
    for step, batch in enumerate(loader):
        with lite.accumulate(model) as is_last:
            lite.backward(model(batch.float()).sum())
        if step == 0:
            with pytest.warns(UserWarning, match="not saved") as caught:
                lite.save_state(tmp_path)
            assert str(caught[0].message) == (
                "save_state() between the 2 batches of a step: the gradients of 1 batch(es) are "
                "not saved, and a run that resumes from it differs. Save after an optimizer step"
            )
        elif is_last:
            lite.save_state(tmp_path)


def test_accumulate_averages_the_gradients_of_a_window() -> None:
    lite, model, optimizer, loader = set_up(accumulate_grad_batches=2)
    weights, gradients = [], []
    for batch in loader:
        with lite.accumulate(model):
            lite.backward(model(batch.float()).sum())
            gradients.append(model.weight.grad.item())
            optimizer.step()
            optimizer.zero_grad()
        weights.append(round(model.weight.item(), 6))
    assert gradients == [0.5, 1.0, 0.5, 1.0, 0.5], "the last window has one batch"
    assert weights[0] != weights[1] == weights[2] != weights[3] != weights[4]
    lite.backward(model(torch.ones(1)).sum())
    assert model.weight.grad == 1.0, "outside of a block nothing is divided"


def test_only_the_last_block_of_a_window_clips() -> None:
    lite, model, optimizer, loader = set_up(accumulate_grad_batches=2)
    norms, gradients = [], []
    for batch in loader:
        with lite.accumulate(model):
            lite.backward(model(batch.float()).sum())
            norms.append(lite.clip_gradients(model, optimizer, max_norm=0.25))
            gradients.append(model.weight.grad.item())
            optimizer.step()
            optimizer.zero_grad()
    assert [norm is not None for norm in norms] == [False, True, False, True, True]
    clipped = 0.25 / 2**0.5  # the bias has the same gradient
    assert gradients == pytest.approx([0.5, clipped, 0.5, clipped, clipped], rel=1e-5)


def test_error_within_accumulate_restores_the_optimizer() -> None:
    lite, model, optimizer, _ = set_up(accumulate_grad_batches=2)
    with pytest.raises(ZeroDivisionError), lite.accumulate(model):
        _ = 1 / 0
    before = model.weight.item()
    lite.backward(model(torch.ones(1)).sum())
    optimizer.step()
    assert model.weight.item() != before


@pytest.mark.parametrize("value", [0, True, 1.5, "2"])
def test_a_window_is_a_whole_number(value: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Lite(accelerator="cpu", accumulate_grad_batches=value)
    assert str(caught.value) == (
        f"accumulate_grad_batches={value!r}: expected a whole number of at least 1"
    )


def test_another_set_of_objects_is_refused(tmp_path: Path) -> None:
    lite, *_ = set_up()
    lite.setup(nn.Linear(2, 2))
    lite.save_state(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["state.ckpt"]
    other, *_ = set_up()
    with pytest.raises(CheckpointMismatchError) as caught:
        other.load_state(tmp_path)
    assert str(caught.value) == (
        f"'{tmp_path}' has the state of model1, and no such object was set up: set up the objects "
        "of the run that saved it, in the same order"
    )
    with pytest.raises(CheckpointNotFoundError):
        other.load_state(tmp_path / "elsewhere")


def test_a_loader_that_is_gone_is_not_saved(tmp_path: Path) -> None:
    lite, _, _, loader = set_up()
    del loader
    lite.save_state(tmp_path)
    assert "dataloader0" not in Lite(accelerator="cpu").load(tmp_path / "state.ckpt")


# ---------------------------------------------------------------- setup


def test_objects_are_set_up_in_any_order() -> None:
    lite = Lite(accelerator="cpu", devices=1)
    one, two = nn.Linear(1, 1), nn.Linear(1, 1)
    by_two, by_one = SGD(two.parameters(), lr=0.2), SGD(one.parameters(), lr=0.1)
    scheduler = StepLR(by_one, 1)
    found = lite.setup(None, by_two, scheduler, two, DataLoader(ones(1)), by_one, one)
    nothing, second, same, model_two, loader, first, model_one = found
    assert nothing is None
    assert same is scheduler
    assert len(loader) == 1
    assert [second.param_groups[0]["lr"], first.param_groups[0]["lr"]] == [0.2, 0.1]
    assert [model_two.module, model_one.module] == [two, one]
    assert [second.prepared, first.prepared] == [model_two.prepared, model_one.prepared]
    lite.backward(model_one(torch.ones(1)).sum())
    first.step()
    scheduler.step()
    assert first.param_groups[0]["lr"] == pytest.approx(0.01)


def test_an_optimizer_and_a_scheduler_may_come_later() -> None:
    lite = Lite(accelerator="cpu", devices=1)
    model = lite.setup(nn.Linear(1, 1))
    optimizer, loader = lite.setup(SGD(model.parameters(), lr=0.1), DataLoader(ones(1)))
    assert lite.setup(scheduler := StepLR(optimizer, 1)) is scheduler
    assert optimizer.prepared is model.prepared
    assert len(loader) == 1


def test_setup_refuses_unknown_objects() -> None:
    lite = Lite(accelerator="cpu", devices=1)
    net = nn.Linear(1, 1)
    for objects, message in (
        ((), "setup() received nothing; expected a model"),
        (
            (nn.Linear,),
            "setup() expects models, optimizers, schedulers, data loaders and objects with "
            "state_dict() and load_state_dict(), received the class Linear",
        ),
        (
            (net, 3),
            "setup() expects models, optimizers, schedulers, data loaders and objects with "
            "state_dict() and load_state_dict(), received a int",
        ),
        (
            (StepLR(SGD(net.parameters(), lr=0.1), 1),),
            "setup() received a StepLR whose optimizer was not set up: pass the optimizer too, or "
            "set it up first",
        ),
    ):
        with pytest.raises(ConfigurationError) as caught:
            lite.setup(*objects)
        assert str(caught.value) == message


# ---------------------------------------------------------------- loggers


def test_loggers_may_be_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lite = Lite(accelerator="cpu", loggers=["csv", CSVLogger(tmp_path / "other")])
    lite.log_hyperparams({"lr": 0.1})
    lite.log_dict({"loss": 0.5}, step=3)
    for folder in (tmp_path, tmp_path / "other"):
        run = folder / "stratagem_logs" / "version_0"
        assert (run / "metrics.csv").read_text().split() == ["step,loss", "3,0.5"]
        assert json.loads((run / "hparams.json").read_text()) == {"lr": 0.1}


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("name", sorted(COUNTERPARTS))
def test_accelerate_method_names_its_counterpart_in_lite(name: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(Lite(accelerator="cpu"), name)
    expected = f"'Lite' object has no attribute '{name}'. {COUNTERPARTS[name]}"
    assert str(caught.value) == f"{expected} (docs/start/from-accelerate.md)"


def test_an_error_within_a_property_is_not_hidden() -> None:
    class Own(Lite):
        @property
        def broken(self) -> int:
            return {}.missing  # type: ignore[attr-defined, no-any-return]

    with pytest.raises(AttributeError, match="'dict' object has no attribute 'missing'"):
        _ = Own(accelerator="cpu").broken
    with pytest.raises(AttributeError, match="'Own' object has no attribute 'anything'"):
        Own(accelerator="cpu").anything  # type: ignore[attr-defined]  # noqa: B018
    assert not hasattr(Lite(accelerator="cpu"), "prepare")


@pytest.mark.skipif(
    not importlib.util.find_spec("accelerate"),
    reason="needs accelerate: `nox -s accelerate` runs it",
)
def test_every_public_name_of_accelerates_is_known() -> None:
    from accelerate import Accelerator

    theirs = {name for name in dir(Accelerator) if not name.startswith("_")}
    assert theirs <= COUNTERPARTS.keys() | set(dir(Lite))
    assert not COUNTERPARTS.keys() & set(dir(Lite))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert COUNTERPARTS.keys() <= set(dir(Accelerator(cpu=True)))


# ---------------------------------------------------------------- what `stratagem run` leaves open


def test_arguments_that_are_left_open_come_from_the_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {"precision": "bf16-mixed", "accelerator": "cpu", "accumulate_grad_batches": 4}
    monkeypatch.setenv("STRATAGEM_LITE", json.dumps(given))
    plan = Lite().plan
    assert (plan.precision.name, plan.accelerator.name) == ("bf16-mixed", "cpu")
    lite = Lite(precision="64-true", accumulate_grad_batches=1)
    assert lite.plan.precision.name == "64-true"
    model = lite.setup(nn.Linear(1, 1))
    with lite.accumulate(model) as is_last:
        assert is_last


def test_trainer_that_contradicts_accelerate_config_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {"precision": "bf16-mixed", "accelerator": "cpu", "accumulate_grad_batches": 4}
    monkeypatch.setenv("STRATAGEM_LITE", json.dumps(given))
    Trainer(precision="bf16-mixed", accumulate_grad_batches=4)
    with pytest.raises(ConfigurationError) as raised:
        Trainer(accumulate_grad_batches=4)
    assert str(raised.value) == (
        "the file of --accelerate-config means precision='bf16-mixed', which reaches Lite only, "
        "and this Trainer has precision='32-true': pass precision='bf16-mixed' to the Trainer, or "
        "start the script with --devices instead"
    )


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("gather_for_metrics", (torch.ones(2),)),
        ("pad_across_processes", (torch.ones(2),)),
    ],
)
def test_gather_functions_without_extras_name_the_package(
    name: str, arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stratagem.discovery.exports._offers", lambda module, kind: [])
    with pytest.raises(ImportError, match=f"'stratagem.lite' has no '{name}'. .*stratagem-extras"):
        getattr(Lite(accelerator="cpu"), name)(*arguments)
