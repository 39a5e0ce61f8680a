"""The callbacks that users know: what each does, and that a run goes on exactly with its state."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from callback_runs import Net, loader, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Callback, Module, Trainer
from stratagem.callbacks import ModelCheckpoint, ProgressBar
from stratagem.errors import ConfigurationError
from stratagem.loggers import CSVLogger
from stratagem_extras.callbacks.finetuning import BackboneFinetuning, BaseFinetuning
from stratagem_extras.callbacks.gradient_accumulation import GradientAccumulationScheduler
from stratagem_extras.callbacks.lambda_callback import LambdaCallback
from stratagem_extras.callbacks.lr_monitor import LearningRateMonitor
from stratagem_extras.callbacks.on_exception_checkpoint import OnExceptionCheckpoint
from stratagem_extras.callbacks.prediction_writer import BasePredictionWriter
from stratagem_extras.callbacks.progress_bar_names import RichProgressBar, TQDMProgressBar
from stratagem_extras.callbacks.pruning import ModelPruning
from stratagem_extras.callbacks.stochastic_weight_averaging import StochasticWeightAveraging
from stratagem_extras.callbacks.throughput import Throughput, ThroughputMonitor
from stratagem_extras.callbacks.timer import Timer
from stratagem_extras.callbacks.weight_averaging import EMAWeightAveraging, WeightAveraging


def rows(logger: CSVLogger) -> list[dict[str, str]]:
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


class EveryEpoch(WeightAveraging):
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return epoch_idx is not None


STATEFUL: dict[str, Callable[[], Callback]] = {
    "ema": lambda: EMAWeightAveraging(decay=0.8),
    "average": WeightAveraging,
    "average of epochs": EveryEpoch,
    "swa": lambda: StochasticWeightAveraging(0.05, 2, annealing_epochs=2),
    "swa linear": lambda: StochasticWeightAveraging(0.05, 1, 3, "linear"),
    "finetuning": lambda: BackboneFinetuning(1, lambda epoch: 1.5, verbose=False),
    "pruning": lambda: ModelPruning("l1_unstructured", amount=0.3),
    "pruning, structured": lambda: ModelPruning(
        "ln_structured",
        parameter_names=["weight"],
        use_global_unstructured=False,
        amount=0.25,
        pruning_dim=0,
        pruning_norm=2,
        use_lottery_ticket_hypothesis=False,
    ),
}


@pytest.mark.parametrize("make", STATEFUL.values(), ids=STATEFUL.keys())
@pytest.mark.parametrize("steps", [8, 12], ids=["within an epoch", "at its end"])
def test_a_run_goes_on_exactly_with_a_callbacks_state(
    make: Callable[[], Callback], steps: int, tmp_path: Path
) -> None:
    torch.manual_seed(5)
    whole = Net()
    if isinstance(make(), ModelPruning):
        whole.backbone[1] = nn.Identity()
    trainer(make(), max_epochs=4).fit(whole, loader(shuffle=True))

    torch.manual_seed(5)
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=steps, save_top_k=-1)
    first, resumed = Net(), Net()
    if isinstance(make(), ModelPruning):
        first.backbone[1] = resumed.backbone[1] = nn.Identity()
    trainer(make(), saver, max_epochs=4, limit_train_batches=6).fit(first, loader(shuffle=True))
    (path,) = (p for p in tmp_path.iterdir() if f"step={steps}" in p.name)

    trainer(make(), max_epochs=4).fit(resumed, loader(shuffle=True), ckpt_path=path)
    assert_same(state(resumed), state(whole))


@pytest.mark.parametrize("make", STATEFUL.values(), ids=STATEFUL.keys())
@pytest.mark.parametrize("steps", [8, 12], ids=["within an epoch", "at its end"])
def test_a_run_goes_on_exactly_from_a_fit_that_a_limit_has_ended(
    make: Callable[[], Callback], steps: int, tmp_path: Path
) -> None:
    def fitted(*callbacks: Callback, path: Path | None = None, **limit: Any) -> Net:
        torch.manual_seed(5)
        model = Net()
        if isinstance(make(), ModelPruning):
            model.backbone[1] = nn.Identity()
        one = trainer(make(), *callbacks, max_epochs=4, **limit)
        one.fit(model, loader(shuffle=True), ckpt_path=path)
        one.save_checkpoint(tmp_path / "after.ckpt")
        return model

    whole = fitted()
    # Saved at the end of the epoch, which the limit may cut short; and after the fit.
    cut = fitted(ModelCheckpoint(tmp_path, filename="within"), max_steps=steps)
    after = torch.load(tmp_path / "after.ckpt", weights_only=True)
    assert_same(after["state_dict"], state(cut))
    (tmp_path / "after.ckpt").rename(tmp_path / "copy.ckpt")
    for name in ("within.ckpt", "copy.ckpt"):
        assert_same(state(fitted(path=tmp_path / name)), state(whole))


# -- averages of weights


def test_ema_validates_and_ends_with_the_average() -> None:
    weights: list[Tensor] = []

    def note(trainer: Trainer, module: Module, *_: Any) -> None:
        weights.append(module.head.weight.detach().clone())  # type: ignore[operator, union-attr]

    model = Net()
    noting = LambdaCallback(on_train_batch_end=note)
    one = trainer(EMAWeightAveraging(decay=0.8), noting, max_epochs=1, num_sanity_val_steps=0)
    one.fit(model, loader(), loader())
    expected = weights[0]
    for value in weights[1:]:
        expected = 0.8 * expected + 0.2 * value
    assert torch.allclose(model.head.weight, expected)
    assert not torch.allclose(model.head.weight, weights[-1])
    assert model.validated_with[0] == pytest.approx(float(expected.sum()), abs=1e-6)


def test_a_checkpoint_has_the_average_as_the_models_weights(tmp_path: Path) -> None:
    model, saver = Net(), ModelCheckpoint(tmp_path)
    trainer(WeightAveraging(), saver, max_epochs=1).fit(model, loader())
    assert_same(state(Net.load_from_checkpoint(saver.best_model_path)), state(model))


def resumed_from(path: Path, make: Callable[[], Callback], **options: Any) -> Net:
    model = Net()
    trainer(make(), max_epochs=3, **options).fit(model, loader(), loader(), ckpt_path=path)
    return model


@pytest.mark.parametrize("limit", [{"max_epochs": 1}, {"max_steps": 8}], ids=["epoch", "step"])
def test_a_run_goes_on_exactly_from_a_checkpoint_saved_after_the_fit_of_an_average(
    limit: dict[str, int], tmp_path: Path
) -> None:
    whole, first, path = Net(), Net(), tmp_path / "after.ckpt"
    trainer(WeightAveraging(), max_epochs=3).fit(whole, loader(), loader())
    one = trainer(WeightAveraging(), **limit)
    one.fit(first, loader(), loader())
    average = state(first)
    one.save_checkpoint(path)
    assert_same(state(first), average)
    assert_same(state(Net.load_from_checkpoint(path)), average)
    assert_same(state(resumed_from(path, WeightAveraging)), state(whole))
    # Evaluations leave both as they are; an error in one does, too.
    one.validate(first, loader(), verbose=False)
    failing = LambdaCallback(on_validation_start=lambda *_: 1 / 0)
    one.callbacks.append(failing)
    with pytest.raises(ZeroDivisionError):
        one.validate(first, loader())
    one.callbacks.remove(failing)
    one.save_checkpoint(path)
    assert_same(state(first), average)
    assert_same(state(resumed_from(path, WeightAveraging)), state(whole))


@pytest.mark.parametrize("hook", ["on_validation_batch_end", "on_validation_epoch_end"])
@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
def test_a_checkpoint_saved_in_validation_has_the_average_and_the_trained_weights(
    hook: str, is_first: bool, tmp_path: Path
) -> None:
    path = tmp_path / "within.ckpt"

    def save(trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 6 and not path.exists():
            trainer.save_checkpoint(path)

    whole, saves, average = Net(), LambdaCallback(**{hook: save}), WeightAveraging()
    callbacks = (saves, average) if is_first else (average, saves)
    trainer(*callbacks, max_epochs=3).fit(whole, loader(), loader())
    saved = torch.load(path, weights_only=True)
    expected = Net()
    trainer(WeightAveraging(), max_epochs=1).fit(expected, loader())
    assert_same(saved["state_dict"], state(expected))
    assert not torch.equal(saved["current_model_state"]["head.weight"], expected.head.weight)
    assert_same(state(resumed_from(path, WeightAveraging)), state(whole))


def test_a_second_fit_begins_with_the_average_and_another_model_frees_the_trained_weights(
    tmp_path: Path,
) -> None:
    average, model, began = WeightAveraging(), Net(), []
    noting = LambdaCallback(on_fit_start=lambda trainer, module: began.append(state(module)))
    one = trainer(average, noting, max_epochs=1)
    one.fit(model, loader())
    ended = state(model)
    one.fit(model, loader())
    assert_same(began[1], ended)
    other = Net()
    before = state(other)
    one.validate(other, loader(), verbose=False)
    one.save_checkpoint(tmp_path / "other.ckpt")
    saved = torch.load(tmp_path / "other.ckpt", weights_only=True)
    assert_same(saved["state_dict"], before)
    assert "current_model_state" not in saved


def test_an_error_after_training_leaves_the_average_in_the_model() -> None:
    def fail(trainer: Trainer, module: Module) -> None:
        ended.append(state(module))
        raise ZeroDivisionError

    model, ended = Net(), list[dict[str, Tensor]]()
    with pytest.raises(ZeroDivisionError):
        trainer(WeightAveraging(), LambdaCallback(on_fit_end=fail), max_epochs=1).fit(
            model, loader()
        )
    assert_same(state(model), ended[0])


@pytest.mark.parametrize("count", ["../..", -1, True, 1.5])
def test_weight_averaging_refuses_a_bad_n_averaged(count: Any) -> None:
    with pytest.raises(ValueError, match=r"n_averaged is a .*, expected a whole number"):
        WeightAveraging().load_state_dict({"n_averaged": count})


def test_ema_starts_at_the_given_step_and_epoch() -> None:
    ema = EMAWeightAveraging(
        update_every_n_steps=2, update_starting_at_step=3, update_starting_at_epoch=1
    )
    trainer(ema, max_epochs=2).fit(Net(), loader())
    assert ema.state_dict() == {"n_averaged": 3}  # after steps 6, 8 and 10, counted from 0
    with pytest.raises(ConfigurationError, match=r"decay=1\.5"):
        EMAWeightAveraging(decay=1.5)
    with pytest.raises(ConfigurationError, match="expected one of them"):
        WeightAveraging(avg_fn=lambda a, b, n: a, multi_avg_fn=lambda a, b, n: None)


def test_swa_is_the_average_at_the_starts_of_epochs_and_has_its_statistics() -> None:
    weights: list[Tensor] = []

    def note(trainer: Trainer, module: Module) -> None:
        weights.append(module.head.weight.detach().clone())  # type: ignore[operator, union-attr]

    model = Net()
    swa = StochasticWeightAveraging(0.02, swa_epoch_start=0.5, annealing_epochs=1, device=None)
    one = trainer(swa, LambdaCallback(on_train_epoch_start=note), max_epochs=4)
    one.fit(model, loader())
    assert (swa.swa_start, swa.n_averaged) == (1, 3)
    assert torch.allclose(model.head.weight, torch.stack(weights[1:]).mean(0))
    assert one.optimizers[0].param_groups[0]["lr"] == 0.02
    inputs = torch.cat([model.backbone[0](batch[0]) for batch in loader()])
    norm: Any = model.backbone[1]
    assert torch.allclose(norm.running_mean, inputs.mean(0), atol=1e-6)
    assert norm.momentum == 0.1


def test_swa_names_the_replaced_scheduler(caplog: pytest.LogCaptureFixture) -> None:
    class Scheduled(Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 9)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    caplog.set_level("INFO")
    with pytest.warns(UserWarning, match="only supported every epoch: the scheduler with interval"):
        trainer(StochasticWeightAveraging(0.1, 1), max_epochs=1).fit(Scheduled(), loader())
    assert "Swapping scheduler `StepLR` for `SWALR`" in caplog.text


def test_swa_refuses_bad_arguments() -> None:
    for wrong, what in (
        ({"swa_lrs": 0.0}, "swa_lrs"),
        ({"swa_lrs": 0.1, "swa_epoch_start": 1.5}, "swa_epoch_start"),
        ({"swa_lrs": 0.1, "annealing_epochs": -1}, "annealing_epochs"),
        ({"swa_lrs": 0.1, "annealing_strategy": "up"}, "annealing_strategy"),
    ):
        with pytest.raises(ConfigurationError, match=what):
            StochasticWeightAveraging(**wrong)
    with pytest.raises(ConfigurationError, match="pass max_epochs"):
        trainer(StochasticWeightAveraging(0.1), max_steps=2).fit(Net(), loader())
    with pytest.raises(ConfigurationError, match=r"has 2 learning rates.*1 parameter groups"):
        trainer(StochasticWeightAveraging([0.1, 0.2], 1), max_epochs=1).fit(Net(), loader())

    class Two(Net):
        automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]

    with pytest.raises(ConfigurationError, match=r"takes one optimizer; configure.* returned 2"):
        trainer(StochasticWeightAveraging(0.1, 1), max_epochs=1).fit(Two(), loader())


# -- finetuning and pruning


def test_the_backbone_is_trained_from_its_epoch_on() -> None:
    first: list[Tensor] = []
    rates: list[list[float]] = []

    def note(trainer: Trainer, module: Module) -> None:
        first.append(module.backbone[0].weight.detach().clone())  # type: ignore[index, union-attr]
        rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])

    model = Net()
    unfreeze = BackboneFinetuning(2, lambda epoch: 3.0, backbone_initial_lr=0.01)
    one = trainer(unfreeze, LambdaCallback(on_train_epoch_start=note), max_epochs=5)
    one.fit(model, loader())
    assert torch.equal(first[0], first[2])
    assert not torch.equal(first[2], first[3])
    assert rates[1] == [pytest.approx(0.09)]
    assert rates[2] == [pytest.approx(0.081), 0.01]
    assert rates[3][1] == pytest.approx(0.03)
    assert rates[4] == [pytest.approx(0.1 * 0.9**4)] * 2  # not above the first group's
    with pytest.raises(ConfigurationError, match=r"module\.backbone, and Bare"):
        trainer(BackboneFinetuning(), max_epochs=1).fit(Bare(), loader())


def test_an_optimizer_that_has_the_backbone_already_keeps_its_learning_rate() -> None:
    class All(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    one = trainer(BackboneFinetuning(1, backbone_initial_lr=0.001), max_epochs=4)
    with pytest.warns(UserWarning, match=r"^2 of the parameters that are unfrozen were in the opt"):
        one.fit(All(), loader())
    assert [group["lr"] for group in one.optimizers[0].param_groups] == [0.1]


class Bare(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = self.backbone
        del self.backbone

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head(self.layers(batch[0])).square().mean()  # type: ignore[no-any-return]


def test_pruned_weights_stay_zero_and_names_stay_the_models(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Net()
    names = list(model.state_dict())
    pruning = ModelPruning(
        "l1_unstructured",
        parameter_names=["weight"],
        amount=0.5,
        use_lottery_ticket_hypothesis=False,
        verbose=2,
    )
    caplog.set_level("INFO")
    trainer(pruning, max_epochs=2).fit(model, loader())
    assert list(model.state_dict()) == names
    total = sum(mask.numel() for mask in pruning.masks.values())
    zeros = sum(int((mask == 0).sum()) for mask in pruning.masks.values())
    assert zeros == total * 3 // 4  # half, and half of what was left
    for name, mask in pruning.masks.items():
        assert torch.equal(model.get_parameter(name) * mask, model.get_parameter(name))
    half = f"{total // 2}/{total} (50.00%)"
    whole = [line for line in caplog.messages if line.startswith("Applied `L1Unstructured`. ")]
    assert [line.partition("Pruned: ")[2] for line in whole] == [
        f"0/{total} (0.00%) -> {half}",
        f"{half} -> {zeros}/{total} (75.00%)",
    ]
    of_head = "to `head.weight` with amount=0.5. Pruned: 0 (0.00%) -> "
    assert any(of_head in line for line in caplog.messages)


def test_sanitize_parameters_to_prune_lists_shared_parameters_once() -> None:
    model = Net()
    model.other = model.head  # the same parameters under two names
    listed = ModelPruning.sanitize_parameters_to_prune(
        model, parameter_names=["weight", "training"]
    )
    linear, norm, _ = model.backbone
    assert listed == [(linear, "weight"), (norm, "weight"), (model.head, "weight")]
    assert ModelPruning.sanitize_parameters_to_prune(model, [(model.head, "bias")]) == [
        (model.head, "bias")
    ]
    with pytest.raises(ConfigurationError, match="Linear with 'mask'; expected submodules of the"):
        ModelPruning.sanitize_parameters_to_prune(model, [(model.head, "mask")])


def test_lottery_ticket_resets_kept_weights_to_initial_values() -> None:
    model = Net()
    before = model.head.weight.detach().clone()
    pruning = ModelPruning("random_unstructured", [(model.head, "weight")], amount=1)
    trainer(pruning, max_epochs=1).fit(model, loader())
    assert torch.equal(model.head.weight, before * pruning.masks["head.weight"])
    assert int((pruning.masks["head.weight"] == 0).sum()) == 1


def test_pruning_keeps_masks_if_not_permanent() -> None:
    model = Net()
    before = model.head.weight.detach().clone()
    given = [(model.head, "weight")]
    pruning = ModelPruning("l1_unstructured", given, amount=0.5, make_pruning_permanent=False)
    trainer(pruning, max_epochs=1).fit(model, loader())
    left = model.state_dict()
    assert torch.equal(left["head.weight_orig"], before)
    assert torch.equal(left["head.weight_mask"], pruning.masks["head.weight"])


def test_pruning_refuses_bad_arguments() -> None:
    with pytest.raises(ConfigurationError, match="expected one of l1_unstructured"):
        ModelPruning("smallest")
    with pytest.raises(ConfigurationError, match="use_global_unstructured=False and a pruning_dim"):
        ModelPruning("ln_structured", pruning_dim=0)
    with pytest.raises(ConfigurationError, match="pruning_norm, such as"):
        ModelPruning("ln_structured", pruning_dim=0, use_global_unstructured=False)
    with pytest.raises(ConfigurationError, match="nothing to prune in Net"):
        trainer(ModelPruning("l1_unstructured", parameter_names=["x"])).fit(Net(), loader())
    strange = ModelPruning("l1_unstructured", [(nn.Linear(1, 1), "weight")])
    with pytest.raises(ConfigurationError, match="expected submodules of the model"):
        trainer(strange).fit(Net(), loader())


# -- logs


def test_learning_rate_monitor_logs_the_rates_of_the_next_step(tmp_path: Path) -> None:
    monitor = LearningRateMonitor(log_momentum=True, log_weight_decay=True)
    logger = CSVLogger(tmp_path)
    one = trainer(monitor, logger=logger, max_epochs=3)
    one.fit(Net(), loader())
    assert monitor.lrs == {"lr-SGD": pytest.approx([0.1, 0.09, 0.081])}
    assert monitor.last_momentum_values == {"lr-SGD-momentum": 0.9}
    assert monitor.last_weight_decay_values == {"lr-SGD-weight_decay": 0.0}
    assert float(one.callback_metrics["lr-SGD"]) == pytest.approx(0.081)
    logged = {row["step"]: float(row["lr-SGD"]) for row in rows(logger) if row["lr-SGD"]}
    assert logged == {"0": 0.1, "6": pytest.approx(0.09), "12": pytest.approx(0.081)}

    class Plain(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.ASGD(self.parameters())

    monitor = LearningRateMonitor(log_momentum=True)
    with pytest.warns(
        RuntimeWarning, match="logs 0.0 for ASGD: these optimizers do not have momentum"
    ):
        trainer(monitor, logger=logger, max_epochs=1).fit(Plain(), loader())
    assert monitor.last_momentum_values == {"lr-ASGD-momentum": 0.0}

    by_step = LearningRateMonitor("step")
    trainer(by_step, logger=CSVLogger(tmp_path), max_epochs=1, log_every_n_steps=3).fit(
        Net(), loader()
    )
    assert by_step.lrs == {"lr-SGD": [0.1, 0.1]}

    class Unscheduled(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    both = LearningRateMonitor()
    trainer(both, logger=CSVLogger(tmp_path), max_epochs=2, log_every_n_steps=100).fit(
        Unscheduled(), loader()
    )
    assert both.lrs == {"lr-SGD": [0.1, 0.1]}


def test_several_groups_and_names_of_schedulers(tmp_path: Path) -> None:
    class Grouped(Net):
        def configure_optimizers(self) -> Any:
            groups: list[dict[str, Any]] = [
                {"params": self.backbone.parameters(), "name": "backbone"},
                {"params": self.head.parameters(), "lr": 0.2},
            ]
            optimizer = torch.optim.SGD(groups, lr=0.1)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return [optimizer], [{"scheduler": scheduler, "name": "mine", "interval": "step"}]

    monitor = LearningRateMonitor()
    trainer(monitor, logger=CSVLogger(tmp_path), max_steps=2).fit(Grouped(), loader())
    assert monitor.lrs == {"mine/backbone": [0.1, 0.05], "mine/pg2": [0.2, 0.1]}
    with pytest.raises(ConfigurationError, match="nowhere to log to"):
        trainer(monitor, max_steps=2).fit(Net(), loader())
    with pytest.raises(ConfigurationError, match="logging_interval='batch'"):
        LearningRateMonitor("batch")  # type: ignore[arg-type]

    class Twice(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(
                [{"params": [p], "name": "same"} for p in self.head.parameters()], lr=0.1
            )

    with pytest.raises(ConfigurationError, match="several groups of an optimizer are called"):
        trainer(LearningRateMonitor(), logger=CSVLogger(tmp_path), max_steps=2).fit(
            Twice(), loader()
        )


def test_each_scheduler_of_an_optimizer_logs_its_rate_and_optimizers_without_one_follow(
    tmp_path: Path,
) -> None:
    class Two(Net):
        automatic_optimization = False

        def configure_optimizers(self) -> Any:
            without, optimizer = (torch.optim.SGD(self.parameters(), lr=rate) for rate in (0.2, 1))
            schedulers = [
                torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
                {
                    "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1),
                    "interval": "step",
                },
            ]
            return [without, optimizer], schedulers

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            optimizer = self.optimizers()[1]
            optimizer.zero_grad()
            self.manual_backward(self.head(self.backbone(batch[0])).sum())
            optimizer.step()

        def on_train_epoch_end(self) -> None:
            for scheduler in self.lr_schedulers():
                scheduler.step()

    monitor = LearningRateMonitor()
    logger = CSVLogger(tmp_path)
    trainer(monitor, logger=logger, max_epochs=2, log_every_n_steps=6).fit(Two(), loader())
    # Twice in an epoch a batch begins with which two optimizers could take the step to log.
    assert monitor.lrs == {
        "lr-SGD": [1.0, pytest.approx(0.05)],
        "lr-SGD-1": [1.0, 1.0, pytest.approx(0.05), pytest.approx(0.05)],
        "lr-SGD-2": [0.2] * 6,
    }


def test_learning_rates_of_a_group_that_was_added_and_of_two_optimizers(tmp_path: Path) -> None:
    class Later(BaseFinetuning):
        def freeze_before_training(self, module: Any) -> None:
            self.freeze(module.backbone)

        def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.backbone, optimizer, lr=0.5)

    class Plain(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)

    class Two(Net):
        automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=rate) for rate in (0.1, 0.2)]

        def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self.head(self.backbone(batch[0])).sum())
                optimizer.step()

    monitor = LearningRateMonitor("epoch")
    trainer(Later(), monitor, logger=CSVLogger(tmp_path), max_epochs=2).fit(Plain(), loader())
    assert monitor.lrs == {"lr-SGD/pg1": [0.1, 0.1], "lr-SGD/pg2": [0.5]}

    # Each batch takes two steps, so that none begins one before the one that is logged.
    monitor = LearningRateMonitor("step")
    logger = CSVLogger(tmp_path)
    one = trainer(monitor, logger=logger, max_epochs=1, log_every_n_steps=2)
    one.fit(Two(), loader())
    assert monitor.lrs == {"lr-SGD": [0.1] * 6, "lr-SGD-1": [0.2] * 6}
    assert len([row for row in rows(logger) if row["lr-SGD-1"]]) == 6


def test_schedulers_within_a_scheduler_know_of_unfrozen_groups(tmp_path: Path) -> None:
    class Warms(Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.head.parameters(), lr=0.1)
            parts = [
                torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=2),
                torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
            ]
            return [optimizer], [torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [2])]

    unfreezes = BackboneFinetuning(
        unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01, should_align=False, verbose=False
    )
    one = trainer(unfreezes, max_epochs=4)
    one.fit(Warms(), loader())
    head, backbone = one.optimizers[0].param_groups
    assert head["lr"] == pytest.approx(0.025)
    one.save_checkpoint(tmp_path / "saved.ckpt")
    unfreezes = BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)
    resumed = trainer(unfreezes, max_epochs=5)
    resumed.fit(Warms(), loader(), ckpt_path=tmp_path / "saved.ckpt")
    assert resumed.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.0125)
    assert resumed.optimizers[0].param_groups[1]["lr"] < backbone["lr"]


@pytest.mark.parametrize(
    "cycle",
    [
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40),
        lambda optimizer: torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=5),
    ],
    ids=["OneCycleLR", "CyclicLR"],
)
def test_an_unfrozen_group_follows_the_cycle_of_the_first_one(
    cycle: Callable[[Any], Any], tmp_path: Path
) -> None:
    class Cycles(Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.head.parameters(), lr=0.1, momentum=0.9)
            return [optimizer], [{"scheduler": cycle(optimizer), "interval": "step"}]

    def fit(epochs: int, path: Path | None = None) -> Any:
        unfreezes = BackboneFinetuning(
            unfreeze_backbone_at_epoch=1, backbone_initial_ratio_lr=0.2, verbose=False
        )
        one = trainer(unfreezes, max_epochs=epochs)
        one.fit(Cycles(), loader(), ckpt_path=path)
        return one

    whole = fit(4)
    head, backbone = whole.optimizers[0].param_groups
    assert backbone["lr"] == pytest.approx(0.2 * head["lr"])
    assert backbone["momentum"] == pytest.approx(head["momentum"])
    fit(3).save_checkpoint(tmp_path / "saved.ckpt")
    resumed = fit(4, tmp_path / "saved.ckpt").optimizers[0].param_groups
    assert [group["lr"] for group in resumed] == [head["lr"], backbone["lr"]]


def test_gradients_of_the_frozen_epochs_are_not_applied() -> None:
    """Batch norm stays trainable in a frozen backbone, and no optimizer clears its gradients."""

    class Normalized(Net):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(self.backbone, nn.BatchNorm1d(4))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.head.parameters(), lr=0.1)

    class Looks(Callback):
        gradients: list[Any] = []  # noqa: RUF012

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            if index == 0:
                self.gradients.append(module.backbone[1].weight.grad)

    looks = Looks()
    unfreezes = BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)
    trainer(unfreezes, looks, max_epochs=2).fit(Normalized(), loader())
    assert looks.gradients == [None, None]


def test_throughput_counts_batches_samples_and_items(tmp_path: Path) -> None:
    class Counted(Net):
        flops_per_batch = 100

    monitor = ThroughputMonitor(
        lambda batch: len(batch[0]), lambda batch: batch[0].numel(), available_flops=1e9
    )
    logger = CSVLogger(tmp_path)
    one = trainer(monitor, logger=logger, max_epochs=1, log_every_n_steps=2)
    one.fit(Counted(), loader(), loader())
    last = [row for row in rows(logger) if row["train/samples"]][-1]
    assert (last["train/batches"], last["train/samples"], last["train/lengths"]) == (
        *("6", "24", "72"),
    )
    rate = float(last["train/device/samples_per_sec"])
    assert float(last["train/device/items_per_sec"]) == pytest.approx(3 * rate)
    assert float(last["train/device/mfu"]) == pytest.approx(rate / 4 * 100 / 1e9)
    assert [row["validate/samples"] for row in rows(logger) if row["validate/samples"]] == ["24"]
    with pytest.raises(ConfigurationError, match="nowhere to log to"):
        trainer(monitor, max_epochs=1).fit(Net(), loader())
    with pytest.raises(ConfigurationError, match="window_size=1"):
        trainer(ThroughputMonitor(len, window_size=1), logger=CSVLogger(tmp_path)).fit(
            Net(), loader()
        )


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"time": 1.0, "batches": 1, "samples": 2}, "Expected the value to increase, last: "),
        (
            {"time": 3.0, "batches": 9, "samples": 8, "lengths": 9},
            r"samples \(8\) to be greater or equal than b",
        ),
        (
            {"time": 3.0, "batches": 3, "samples": 8, "lengths": 7},
            r"lengths \(7\) to be greater or equal than samples \(8\): pass totals",
        ),
        ({"time": 3.0, "batches": 3, "samples": 8}, "needs to be the same number of samples"),
    ],
)
def test_throughput_takes_totals(given: dict[str, Any], match: str) -> None:
    throughput = Throughput()
    throughput.update(time=2.0, batches=2, samples=4, lengths=9)
    with pytest.raises(ConfigurationError, match=match):
        throughput.update(**{"lengths": None, **given})


def test_a_resumed_run_counts_its_throughput_on_and_logs_a_learning_rate_once(
    tmp_path: Path,
) -> None:
    monitors = [ThroughputMonitor(lambda batch: len(batch[0])), LearningRateMonitor("epoch")]
    first = trainer(*monitors, logger=CSVLogger(tmp_path / "first"), max_epochs=2, max_steps=8)
    first.fit(Net(), loader())
    first.save_checkpoint(tmp_path / "saved.ckpt")
    logger = CSVLogger(tmp_path / "second")
    monitors = [ThroughputMonitor(lambda batch: len(batch[0])), LearningRateMonitor("epoch")]
    trainer(*monitors, logger=logger, max_epochs=2).fit(
        Net(), loader(), ckpt_path=tmp_path / "saved.ckpt"
    )
    (last,) = [row for row in rows(logger) if row["train/samples"] == "48"]
    assert last["train/batches"] == "12"
    assert float(last["train/time"]) > 0
    assert not any(row.get("lr-SGD") for row in rows(logger))


# -- time, hooks, bars


def test_a_timer_ends_training_and_counts_the_time_before_a_resume(
    capsys: pytest.CaptureFixture[str],
) -> None:
    timer = Timer(duration=0.0001)
    one = trainer(timer, max_epochs=50)
    one.fit(Net(), loader())
    assert one.global_step == 1
    one = trainer(Timer(timedelta(0)), max_epochs=50, min_steps=2)
    one.fit(Net(), loader())
    assert one.global_step == 2
    assert "Timer(duration=0.0001 s) is up" in capsys.readouterr().out
    assert timer.time_elapsed() > 0.0001
    assert timer.start_time("test") is None
    assert timer.end_time() is not None

    resumed = Timer(duration={"hours": 1}, interval="epoch")
    resumed.load_state_dict({"time_elapsed": {"train": 3601.0}})
    one = trainer(resumed, max_epochs=50)
    one.fit(Net(), loader())
    assert (one.global_step, one.current_epoch) == (0, 0)  # there is no time left
    remaining = resumed.time_remaining()
    assert remaining is not None
    assert remaining < -1
    with pytest.raises(ConfigurationError, match=r"Timer\(duration\)='soon'"):
        Timer("soon")
    with pytest.raises(ConfigurationError, match="interval='batch'"):
        Timer(interval="batch")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="stage 'sleep'"):
        timer.time_elapsed("sleep")


def test_functions_are_hooks() -> None:
    seen: list[str] = []
    hooks = LambdaCallback(
        setup=lambda trainer, module, stage: seen.append(stage),
        on_train_end=lambda trainer, module: seen.append("end"),
        on_fit_end=None,
    )
    trainer(hooks, max_steps=1).fit(Net(), loader())
    assert seen == ["fit", "end"]
    with pytest.raises(ConfigurationError, match=r"no such hook; expected one of .*on_fit_end"):
        LambdaCallback(on_coffee=print)
    with pytest.raises(ConfigurationError, match="expected a function"):
        LambdaCallback(on_fit_end=3)  # type: ignore[arg-type]


def test_accumulation_changes_with_the_epoch() -> None:
    schedule = GradientAccumulationScheduler({1: 3})
    steps: list[int] = []
    note = LambdaCallback(on_train_epoch_end=lambda t, m: steps.append(t.global_step))
    trainer(schedule, note, max_epochs=2).fit(Net(), loader())
    assert steps == [6, 8]
    assert schedule.going_to_accumulate_grad_batches()
    with pytest.raises(ConfigurationError, match="accumulate_grad_batches=4 beside 1"):
        trainer(schedule, accumulate_grad_batches=4)
    for wrong, what in (
        ({}, "at least one epoch"),
        ({0: 0}, "Accumulation factor should be an int of at least 1, received 0"),
        ({-1: 2}, "Epoch should be an int of at least 0, received -1"),
    ):
        with pytest.raises(ConfigurationError, match=what):
            GradientAccumulationScheduler(wrong)

    class Asks(Net):
        def configure_callbacks(self) -> Any:
            return GradientAccumulationScheduler({0: 2})

    with pytest.raises(ConfigurationError, match=r"pass it to Trainer\(callbacks"):
        trainer(max_epochs=1).fit(Asks(), loader())


def test_progress_bars_under_the_names_that_users_know(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for bar in (RichProgressBar(leave=True), TQDMProgressBar(refresh_rate=5)):
        one = Trainer(callbacks=bar, logger=False, enable_checkpointing=False, max_steps=1)
        assert bar in one.callbacks
        assert [c for c in one.callbacks if isinstance(c, ProgressBar)] == [bar]
        assert bar.is_enabled
        bar.disable()
        assert bar.is_disabled
        one.fit(Net(), loader(), loader())
        assert capsys.readouterr() == ("", "")
        bar.enable()
        assert bar.is_enabled
        one.fit(Net(), loader())
        assert "epoch" in capsys.readouterr().err
    with pytest.raises(ConfigurationError, match=r"TQDMProgressBar\(refresh_rate=-1\)"):
        TQDMProgressBar(refresh_rate=-1)


# -- predictions and errors


class Writer(BasePredictionWriter):
    def __init__(self, interval: Any) -> None:
        super().__init__(interval)
        self.batches: list[Any] = []
        self.epochs: list[Any] = []

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: Module,
        prediction: Any,
        batch_indices: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        self.batches.append((dataloader_idx, batch_indices, prediction))

    def write_on_epoch_end(
        self, trainer: Trainer, pl_module: Module, predictions: Any, batch_indices: Any
    ) -> None:
        self.epochs.append((predictions, batch_indices))


@pytest.mark.parametrize("workers", [0, 1])
def test_prediction_writer_receives_predictions_with_their_indices(workers: int) -> None:
    data = TensorDataset(torch.zeros(5, 3), torch.arange(5.0))
    shuffled = DataLoader(data, 2, shuffle=True, num_workers=workers)
    writer = Writer("batch_and_epoch")
    returned = trainer(writer).predict(Net(), shuffled, return_predictions=False)
    assert returned is None
    assert [len(indices) for _, indices, _ in writer.batches] == [2, 2, 1]
    for _, indices, prediction in writer.batches:
        assert prediction.tolist() == indices
    ((predictions, indices),) = writer.epochs
    assert [one.tolist() for one in predictions] == indices[0]


def test_prediction_writer_takes_several_loaders_and_plain_lists() -> None:
    writer = Writer("epoch")
    batch = [torch.zeros(2, 3), torch.arange(2.0)]
    trainer(writer).predict(Net(), [loader(), [batch]])
    ((predictions, indices),) = writer.epochs
    assert [len(one) for one in predictions] == [6, 1]
    assert indices[0][0] == [0, 1, 2, 3]
    assert indices[1] == [None]
    assert writer.batches == []
    with pytest.raises(
        ConfigurationError, match=r"`write_interval` should be one of .*, received 'step'"
    ):
        Writer("step")


def test_a_checkpoint_is_left_of_a_run_that_fails(tmp_path: Path) -> None:
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 3:
                raise ValueError("a bad batch")
            return super().training_step(batch, batch_idx)

    saver = OnExceptionCheckpoint(tmp_path, "failed")
    with (
        pytest.warns(UserWarning, match="within an optimizer step"),
        pytest.raises(ValueError, match="a bad batch"),
    ):
        trainer(saver, max_epochs=1).fit(Fails(), loader())
    assert saver.ckpt_path == str(tmp_path / "failed.ckpt")
    one = trainer(max_epochs=1)
    one.fit(Net(), loader(), ckpt_path=saver.ckpt_path)
    assert one.global_step == 6
    with pytest.raises(ConfigurationError, match="expected the name of a file"):
        OnExceptionCheckpoint(tmp_path, "")


def test_no_checkpoint_is_saved_of_several_ranks_that_ctrl_c_ends(tmp_path: Path) -> None:
    """Each rank may be in another step, or in a collective that a save would be mixed with."""
    saver, saved = OnExceptionCheckpoint(tmp_path), list[str]()
    run: Any = SimpleNamespace(stage="fit", prepared=True)
    for ranks, expected in ((2, []), (1, [saver.ckpt_path])):
        fit: Any = SimpleNamespace(world_size=ranks, run=run, save_checkpoint=saved.append)
        text = (
            f"OnExceptionCheckpoint saves nothing with {ranks} ranks: when an error or Ctrl-C ends "
            "one, the others are elsewhere. With a ModelCheckpoint, SIGTERM saves in any case; its "
            "train_time_interval limits what an error costs"
        )
        with pytest.warns(UserWarning, match=re.escape(text)) if ranks > 1 else nullcontext():
            saver.on_fit_start(fit, Net())
        saver.on_exception(fit, Net(), KeyboardInterrupt())
        assert saved == expected


@pytest.mark.parametrize(
    ("callback", "method", "count"),
    [
        (cast(Any, BaseFinetuning)(), "freeze_before_training", 1),
        (cast(Any, BaseFinetuning)(), "finetune_function", 3),
        (BasePredictionWriter("batch"), "write_on_batch_end", 7),
        (BasePredictionWriter("epoch"), "write_on_epoch_end", 4),
    ],
)
def test_a_method_that_a_subclass_has_left_out_is_named(
    callback: Any, method: str, count: int
) -> None:
    with pytest.raises(NotImplementedError) as caught:
        getattr(callback, method)(*[None] * count)
    assert str(caught.value) == f"{type(callback).__name__} has to define {method}()"


@pytest.mark.parametrize("name", ["model_checkpoint", "model_summary", "progress_bar"])
def test_a_callback_of_core_has_a_name(name: str) -> None:
    kind = name.title().replace("_", "")
    trainer = Trainer(accelerator="cpu", callbacks=name, logger=False)
    assert [type(c).__name__ for c in trainer.callbacks].count(kind) == 1


def test_a_callback_that_needs_arguments_cannot_be_given_by_its_name() -> None:
    text = r"callbacks='swa': .*'swa_lrs'. A name takes no arguments: pass an instance, as in "
    with pytest.raises(ConfigurationError, match=text):
        Trainer(accelerator="cpu", callbacks="swa", logger=False)
