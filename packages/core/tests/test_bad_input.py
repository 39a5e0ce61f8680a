"""What a user gets wrong is refused with what was expected, what was received, and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, IterableDataset

from stratagem import Callback, DataModule, Lite, Module, Trainer, seed_everything
from stratagem.accelerators import CPUAccelerator
from stratagem.callbacks import ModelCheckpoint
from stratagem.checkpoint import SingleFileCheckpointIO
from stratagem.discovery import Capabilities
from stratagem.environments import PlainEnvironment, TorchElasticEnvironment
from stratagem.errors import ConfigurationError, NonFiniteLossError, StratagemError, UserCodeError
from stratagem.interfaces.components import Components
from stratagem.precision import MixedPrecision, TruePrecision
from stratagem.rng import chosen_seed
from stratagem.strategies import DDPStrategy, SingleDeviceStrategy


class Line(Module):
    """Trains; the tests below break one thing of it at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.layer(batch).square().mean())

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1)


def loader(samples: int = 8, **arguments: Any) -> DataLoader[Any]:
    return DataLoader(torch.ones(samples, 2), **{"batch_size": 2, **arguments})  # type: ignore[arg-type]


def trainer(**arguments: Any) -> Trainer:
    arguments = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        **arguments,
    }
    return Trainer(**arguments)


def refusal(action: Callable[[], object], kind: type[Exception] = UserCodeError) -> str:
    """Return the text of the error that an action ends with."""
    with pytest.raises(StratagemError) as caught:
        action()
    assert type(caught.value) is kind
    return str(caught.value)


def configuration(action: Callable[[], object]) -> str:
    return refusal(action, ConfigurationError)


# ---------------------------------------------------------------- the model


def test_module_without_required_methods_is_refused() -> None:
    class Empty(Module):
        pass

    class NoOptimizer(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

    assert refusal(lambda: trainer().fit(Empty(), loader())) == (
        "Empty does not define training_step and configure_optimizers, which trainer.fit needs"
    )
    assert refusal(lambda: trainer().fit(NoOptimizer(), loader())) == (
        "NoOptimizer does not define configure_optimizers, which trainer.fit needs"
    )
    assert refusal(lambda: trainer().validate(Empty(), loader())) == (
        "Empty does not define validation_step, which trainer.validate needs"
    )
    assert refusal(lambda: trainer().test(Line(), loader())) == (
        "Line does not define test_step, which trainer.test needs"
    )


def test_trainer_refuses_other_objects_than_modules() -> None:
    assert refusal(lambda: trainer().fit(nn.Linear(2, 1), loader())) == (  # type: ignore[arg-type]
        "trainer.fit() expected a stratagem.Module as model, received Linear: a plain nn.Module is "
        "trained with Lite, or wrapped in a Module with training_step and configure_optimizers"
    )

    class Forgetful(Line):
        def __init__(self) -> None:
            nn.Module.__init__(self)

    assert refusal(lambda: trainer().fit(Forgetful(), loader())) == (
        "Forgetful.__init__ does not call super().__init__(); call it first"
    )
    for run in (trainer().validate, trainer().test, trainer().predict):
        assert configuration(lambda run=run: run(dataloaders=loader())) == (  # type: ignore[misc]
            "there is no model: pass one, or fit one with this Trainer before"
        )


def test_the_loss_must_be_a_scalar_tensor_with_a_gradient() -> None:
    class Returns(Line):
        def __init__(self, make: Callable[[Tensor], Any]) -> None:
            super().__init__()
            self.make = make

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.make(self.layer(batch).square())

    def fit(make: Callable[[Tensor], Any]) -> str:
        return refusal(lambda: trainer().fit(Returns(make), loader()))

    shape = (
        "Returns.training_step returned a loss of shape (2, 1); expected a scalar: reduce it, for "
        "example by .mean()"
    )
    assert fit(lambda loss: loss) == shape
    assert fit(lambda loss: {"loss": loss}) == shape
    detached = (
        "Returns.training_step returned a loss without a gradient; expected one that depends on "
        "the parameters: do not detach it, do not compute it under no_grad, and check that some "
        "parameters require gradients"
    )
    assert fit(lambda loss: loss.mean().detach()) == detached
    expected = (
        "expected the loss (a scalar tensor), a dict with the key 'loss', or None to skip the batch"
    )
    assert fit(lambda loss: loss.mean().item()) == (
        f"Returns.training_step returned a float; {expected}"
    )
    assert fit(lambda loss: {"losses": loss}) == (
        f"Returns.training_step returned a dict with the keys ['losses']; {expected}"
    )
    assert fit(lambda loss: (loss.mean(), 1)) == (
        f"Returns.training_step returned a tuple; {expected}"
    )


def test_a_backward_of_the_users_own_is_to_be_removed() -> None:
    class CallsBackward(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.layer(batch).square().mean()
            loss.backward()
            return loss

    assert refusal(lambda: trainer().fit(CallsBackward(), loader())) == (
        "CallsBackward.training_step: backward has run before through a part of the loss's graph. "
        "The Trainer calls backward: remove loss.backward() from training_step, or set "
        "self.automatic_optimization = False. Detach tensors of earlier batches"
    )


def test_runtime_error_of_a_step_is_not_changed() -> None:
    class Broken(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch[:, :1]).mean()

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        trainer().fit(Broken(), loader())


def test_a_loss_that_is_not_finite_is_found_where_detection_is_on() -> None:
    class Infinite(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch).mean() / 0.0

    text = refusal(
        lambda: trainer(detect_anomaly=True).fit(Infinite(), loader()), NonFiniteLossError
    )
    assert re.fullmatch(
        r"the loss of batch 0 in epoch 0 \(after 0 optimizer steps\) is -?inf; expected a finite "
        r"number: look at the batch, the learning rate and divisions by 0\n"
        r"For an explanation: stratagem errors nan",
        text,
    )


# ---------------------------------------------------------------- optimizers


class Configures(Line):
    def __init__(self, configure: Callable[[Any], Any]) -> None:
        super().__init__()
        self.configure = configure

    def configure_optimizers(self) -> Any:
        return self.configure(SGD(self.parameters(), lr=0.1))


FORMS = (
    "expected an optimizer, a list of optimizers, (optimizers, schedulers), or a dict with "
    "'optimizer' and 'lr_scheduler'"
)


@pytest.mark.parametrize(
    ("configure", "text"),
    [
        (lambda o: None, f"returned None; {FORMS}"),
        (lambda o: [], f"returned []; {FORMS}"),
        (lambda o: "adam", f"returned 'adam'; {FORMS}"),
        (lambda o: [1, 2], f"returned [1, 2]; {FORMS}"),
        (lambda o: {"lr_scheduler": None}, f"returned {{'lr_scheduler': None}}; {FORMS}"),
        (lambda o: {"optimizer": o, "extra": 1}, f"returned a dict with ['extra']; {FORMS}"),
        (
            lambda o: [o, o],
            "returned 2 optimizers; automatic optimization takes one: set automatic_optimization = "
            "False and step them in training_step",
        ),
        (
            lambda o: ([o], [{"scheduler": StepLR(o, 1), "when": "epoch"}]),
            "returned a scheduler with ['when']; expected 'scheduler', 'interval', 'frequency', "
            "'monitor', 'strict', 'name' and 'reduce_on_plateau'",
        ),
        (
            lambda o: ([o], [{"interval": "epoch"}]),
            "returned a scheduler's options without 'scheduler'",
        ),
        (
            lambda o: ([o], ["cosine"]),
            "returned 'cosine' in the place of a scheduler: expected an object with step(), or "
            "automatic_optimization = False, where training_step calls it",
        ),
        (
            lambda o: ([o], [StepLR(SGD(o.param_groups[0]["params"], lr=0.1), 1)]),
            "returned a StepLR of a SGD that it did not return, so that it would change no "
            "learning rate that is trained with: make it of the optimizer that is returned",
        ),
        (
            lambda o: ([o], [{"scheduler": StepLR(o, 1), "interval": "batch"}]),
            "returned a scheduler with interval='batch', frequency=1; expected 'epoch' or 'step', "
            "and at least 1",
        ),
        (
            lambda o: ([o], [{"scheduler": StepLR(o, 1), "frequency": 0}]),
            "returned a scheduler with interval='epoch', frequency=0; expected 'epoch' or 'step', "
            "and at least 1",
        ),
        (
            lambda o: ([o], [ReduceLROnPlateau(o)]),
            "returned a ReduceLROnPlateau without 'monitor': name the logged value that it is "
            "stepped with, as in {'scheduler': ..., 'monitor': 'val_loss'}",
        ),
    ],
)
def test_configure_optimizers_refuses_other_return_values(
    configure: Callable[[Any], Any], text: str
) -> None:
    assert refusal(lambda: trainer().fit(Configures(configure), loader())) == (
        f"Configures.configure_optimizers() {text}"
    )


def test_a_scheduler_waits_for_a_value_that_is_logged() -> None:
    model = Configures(lambda o: ([o], [{"scheduler": ReduceLROnPlateau(o), "monitor": "loss"}]))
    val_loss = "val_loss. Did you mean 'val_loss'?"
    for val in (None, loader()):
        assert refusal(lambda v=val: trainer().fit(model, loader(), v)) == (  # type: ignore[misc]
            "ReduceLROnPlateau(monitor='loss'): no value of that name was logged; there is "
            f"{'nothing.' if val is None else val_loss} Log it in the Module with "
            "self.log('loss', ...)"
        )


def test_manual_optimization_clips_and_accumulates_by_itself() -> None:
    class Manual(Line):
        automatic_optimization = False

    for arguments in ({"gradient_clip_val": 1.0}, {"accumulate_grad_batches": 2}):
        assert configuration(lambda a=arguments: trainer(**a).fit(Manual(), loader())) == (  # type: ignore[misc]
            "Manual has automatic_optimization = False, so gradient_clip_val and "
            "accumulate_grad_batches do nothing: clip and accumulate in training_step"
        )

    class Engine(SingleDeviceStrategy):
        capabilities = Capabilities(manual_backward=False)

        def train_step(self, prepared: Any, step: Any, micro_batches: Any) -> None:
            """The engine's affair."""

    assert configuration(lambda: trainer(strategy=Engine()).fit(Manual(), loader())) == (
        "Manual has automatic_optimization = False, and the strategy 'Engine' runs backward "
        "itself: use automatic optimization, and one "
        "optimizer with parameter groups"
    )

    class Sharding(SingleDeviceStrategy):
        capabilities = Capabilities(backward_in_forward=False)

    assert configuration(lambda: trainer(strategy=Sharding()).fit(Manual(), loader())) == (
        "Manual has automatic_optimization = False, and under 'Sharding' a backward within "
        "training_step has no effect: gradients are reduced after the model's forward. Use "
        "automatic optimization, strategy='ddp', or a loop of your own with Lite"
    )


def test_backward_by_hand_needs_manual_optimization() -> None:
    class Backward(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.manual_backward(loss)
            return loss

    with pytest.raises(UserCodeError) as caught:
        trainer().fit(Backward(), loader())
    assert str(caught.value) == (
        "manual_backward() expected automatic_optimization=False, received True, with which the "
        "Trainer itself runs backward: set self.automatic_optimization = False in "
        "Backward.__init__, or return the loss without the call"
    )


# ---------------------------------------------------------------- data


class Unsized(IterableDataset[Tensor]):
    def __init__(self, samples: int = 8) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.ones(self.samples, 2))


def test_a_loader_must_be_there_and_be_one() -> None:
    assert refusal(lambda: trainer().fit(Line())) == (
        "there is no data: pass a data loader or a DataModule, or define train_dataloader() in Line"
    )
    assert refusal(lambda: trainer().fit(Line(), datamodule=DataModule())) == (
        "there is no data: pass a data loader or a DataModule, or define train_dataloader() in Line"
    )
    assert refusal(lambda: trainer().fit(Line(), 5)) == (
        "the training data loader is 5 (int); expected a DataLoader or another iterable of batches"
    )
    assert configuration(lambda: trainer().fit(Line(), loader(), datamodule=DataModule())) == (
        "both data loaders and a datamodule were passed; pass one of them"
    )


def test_empty_dataloader_is_refused() -> None:
    assert refusal(lambda: trainer().fit(Line(), loader(0))) == (
        "the training data loader is empty: expected at least one batch; its dataset has 0 "
        "samples for 1 rank(s), batch_size=2, drop_last=False"
    )
    assert refusal(lambda: trainer().fit(Line(), loader(3, batch_size=4, drop_last=True))) == (
        "the training data loader is empty: expected at least one batch; its dataset has 3 "
        "samples for 1 rank(s), batch_size=4, drop_last=True"
    )
    assert refusal(lambda: trainer().fit(Line(), [])) == (
        "the training data loader is empty: expected at least one batch"
    )
    assert refusal(lambda: trainer().validate(Line(), [loader(), loader(0)])) == (
        "the validation data loader 1 is empty: expected at least one batch; its dataset has 0 "
        "samples for 1 rank(s), batch_size=2, drop_last=False"
    )
    empty = DataLoader(Unsized(0))
    assert refusal(lambda: trainer().fit(Line(), empty)) == (
        "the training data loader yielded no batch; expected at least one in each epoch: a "
        "generator can be read only once, so pass a DataLoader or a list"
    )
    assert refusal(lambda: trainer().validate(Line(), empty)) == (
        "the validation data loader yielded no batch; expected at least one"
    )


def test_a_fraction_is_taken_of_a_length_only() -> None:
    unsized = DataLoader(Unsized(), batch_size=2)
    assert refusal(lambda: trainer(limit_train_batches=0.5).fit(Line(), unsized)) == (
        "the training data loader has no length, so limit_train_batches=0.5 cannot be taken of it: "
        "pass a number of batches (int), or give it a __len__"
    )
    assert refusal(lambda: trainer(limit_val_batches=0.5).validate(Line(), unsized)) == (
        "the validation data loader has no length, so limit_val_batches=0.5 cannot be taken of it: "
        "pass a number of batches (int), or give it a __len__"
    )
    assert refusal(lambda: trainer(val_check_interval=0.5).fit(Line(), unsized, loader())) == (
        "the training data loader has no length, so val_check_interval=0.5 cannot be taken of it: "
        "pass a number of batches (int)"
    )
    assert configuration(lambda: trainer(limit_train_batches=0.1).fit(Line(), loader())) == (
        "limit_train_batches=0.1 of the 4 batches of the training data loader is less than one "
        "batch: pass a larger fraction or a number of batches (int)"
    )
    assert configuration(lambda: trainer(val_check_interval=5).fit(Line(), loader(), loader())) == (
        "val_check_interval=5 is more than the 4 training batches of an epoch, so validation would "
        "never run: pass a smaller number, or check_val_every_n_epoch=None, which counts batches "
        "over epochs"
    )


# ---------------------------------------------------------------- the Trainer's arguments


WHOLE = "expected a whole number of at least"
BATCHES = "expected a number of batches of at least 0 (int), or a fraction from 0.0 to 1.0 (float)"
TIME = "expected a timedelta, text of the format DD:HH:MM:SS, a dict of its arguments, or seconds"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"max_epochs": -2}, f"max_epochs=-2: {WHOLE} -1"),
        ({"max_epochs": 1.5}, f"max_epochs=1.5: {WHOLE} -1"),
        ({"max_steps": "10"}, f"max_steps='10': {WHOLE} -1"),
        ({"max_steps": True}, f"max_steps=True: {WHOLE} -1"),
        ({"min_epochs": -1}, f"min_epochs=-1: {WHOLE} 0"),
        ({"min_steps": -1}, f"min_steps=-1: {WHOLE} 0"),
        ({"check_val_every_n_epoch": 0}, f"check_val_every_n_epoch=0: {WHOLE} 1"),
        ({"num_sanity_val_steps": -2}, f"num_sanity_val_steps=-2: {WHOLE} -1"),
        ({"log_every_n_steps": -1}, f"log_every_n_steps=-1: {WHOLE} 0"),
        ({"accumulate_grad_batches": 0}, f"accumulate_grad_batches=0: {WHOLE} 1"),
        ({"accumulate_grad_batches": {0: 2, 3: 0}}, f"accumulate_grad_batches=0: {WHOLE} 1"),
        (
            {"accumulate_grad_batches": {-1: 2}},
            f"accumulate_grad_batches (an epoch)=-1: {WHOLE} 0",
        ),
        ({"limit_train_batches": -1}, f"limit_train_batches=-1: {BATCHES}"),
        ({"limit_val_batches": 1.5}, f"limit_val_batches=1.5: {BATCHES}"),
        (
            {"limit_test_batches": "all"},
            "limit_test_batches='all': expected a number of batches (int) or a fraction (float)",
        ),
        (
            {"limit_predict_batches": True},
            "limit_predict_batches=True: expected a number of batches (int) or a fraction (float)",
        ),
        (
            {"val_check_interval": 0},
            "val_check_interval=0: expected at least one batch (int) or a fraction above 0",
        ),
        ({"val_check_interval": 2.5}, f"val_check_interval=2.5: {BATCHES}"),
        (
            {"fast_dev_run": -1},
            "fast_dev_run=-1: expected True, False, or a number of batches",
        ),
        (
            {"fast_dev_run": "yes"},
            "fast_dev_run='yes': expected True, False, or a number of batches",
        ),
        (
            {"gradient_clip_algorithm": "max"},
            "gradient_clip_algorithm='max': expected 'norm' or 'value'",
        ),
        (
            {"gradient_clip_val": -0.5},
            "gradient_clip_val=-0.5: expected a number above 0, or None or 0 for no clipping",
        ),
        (
            {"gradient_clip_val": True},
            "gradient_clip_val=True: expected a number above 0, or None or 0 for no clipping",
        ),
        ({"max_time": "1 hour"}, f"max_time='1 hour': {TIME}"),
        ({"max_time": "00:01:00"}, f"max_time='00:01:00': {TIME}"),
        ({"max_time": -1}, f"max_time=-1: {TIME}"),
        ({"max_time": float("nan")}, f"max_time=nan: {TIME}"),
        ({"max_time": {"hour": 1}}, f"max_time={{'hour': 1}}: {TIME}"),
        ({"max_time": "9999999999:00:00:00"}, f"max_time='9999999999:00:00:00': {TIME}"),
        (
            {"gradient_clip_val": float("nan")},
            "gradient_clip_val=nan: expected a number above 0, or None or 0 for no clipping",
        ),
        ({"limit_train_batches": float("nan")}, f"limit_train_batches=nan: {BATCHES}"),
        ({"val_check_interval": float("nan")}, f"val_check_interval=nan: {BATCHES}"),
        (
            {"deterministic": "error"},
            "deterministic='error': expected True, False or 'warn'",
        ),
        (
            {"logger": 7},
            "logger=7: expected a stratagem.loggers.Logger, the name of one, an object with "
            "log_metrics(metrics, step), a list of them, True or False",
        ),
        (
            {"callbacks": [1]},
            "callbacks has 1; expected instances of stratagem.Callback, or names of installed "
            "callbacks",
        ),
    ],
)
def test_an_argument_that_makes_no_sense_is_refused(arguments: dict[str, Any], text: str) -> None:
    assert configuration(lambda: trainer(**arguments)) == text


def test_a_model_checkpoint_needs_checkpointing() -> None:
    assert configuration(
        lambda: trainer(callbacks=ModelCheckpoint(), enable_checkpointing=False)
    ) == ("callbacks has a ModelCheckpoint, but enable_checkpointing=False: leave one of them out")


def test_attributes_of_a_run_raise_before_a_run() -> None:
    for name in ("estimated_stepping_batches", "run"):
        assert configuration(lambda name=name: getattr(trainer(), name)) == (  # type: ignore[misc]
            "this needs a model that was fitted, validated, tested or predicted with this Trainer; "
            "there was none yet"
        )


def test_a_callback_class_is_not_an_instance() -> None:
    class Mine(Callback):
        pass

    assert configuration(lambda: trainer(callbacks=Mine)).startswith("callbacks has <class ")


# ---------------------------------------------------------------- seeds


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, True, "7"])
def test_a_seed_is_a_whole_number_in_range(seed: Any) -> None:
    assert configuration(lambda: seed_everything(seed)) == (
        f"seed={seed!r}: expected a whole number from 0 to 2**32 - 1"
    )


def test_the_seed_in_the_environment_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATAGEM_SEED", "tomorrow")
    assert configuration(seed_everything) == (
        "expected a number in STRATAGEM_SEED, received 'tomorrow'"
    )
    monkeypatch.setenv("STRATAGEM_SEED", "12")
    assert seed_everything() == chosen_seed() == 12


def test_the_seed_is_printed_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    seed_everything(5, verbose=True)
    assert capsys.readouterr().out == "seed set to 5\n"


# ---------------------------------------------------------------- the native components


def test_precisions_refuse_other_names() -> None:
    assert configuration(lambda: TruePrecision("8-true")) == (
        "TruePrecision(name='8-true'): expected one of '64-true', '32-true', '16-true', 'bf16-true'"
    )
    assert configuration(lambda: MixedPrecision("16-mixed")) == (
        "MixedPrecision(name='16-mixed'): expected 'bf16-mixed'; '16-mixed' needs loss scaling on "
        "a GPU and is provided by stratagem-backend-cuda"
    )


def test_the_cpu_accelerator_takes_the_cpu() -> None:
    cpu = CPUAccelerator()
    assert configuration(lambda: cpu.setup_device(torch.device("meta"))) == (
        "CPUAccelerator expected the device cpu, received meta"
    )
    assert cpu.device_stats(torch.device("cpu"))["peak_resident_bytes"] > 10_000_000
    assert cpu.availability().count >= 1


@pytest.mark.parametrize("kind", [PlainEnvironment, TorchElasticEnvironment])
def test_a_rank_in_the_environment_is_a_number(
    kind: type[PlainEnvironment], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "first")
    assert configuration(kind().local_rank) == (
        "expected a number in the environment variable LOCAL_RANK, received 'first'"
    )


def test_ranks_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = PlainEnvironment()
    assert not plain.creates_processes_externally
    assert (plain.world_size(), plain.global_rank(), plain.main_address, plain.main_port) == (
        1,
        0,
        "127.0.0.1",
        29500,
    )
    for name, value in {
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "1234",
        "WORLD_SIZE": "8",
        "LOCAL_WORLD_SIZE": "4",
        "NODE_RANK": "1",
        "LOCAL_RANK": "2",
    }.items():
        monkeypatch.setenv(name, value)
    assert plain.creates_processes_externally
    assert (plain.main_address, plain.main_port) == ("10.0.0.1", 1234)
    assert (plain.world_size(), plain.local_world_size(), plain.node_rank()) == (8, 4, 1)
    assert plain.global_rank() == 6
    monkeypatch.setenv("RANK", "7")
    assert plain.global_rank() == 7
    elastic = TorchElasticEnvironment()
    monkeypatch.setenv("GROUP_RANK", "3")
    assert elastic.creates_processes_externally
    assert elastic.node_rank() == 3


def with_backend(name: Any) -> None:
    Lite(accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend=name))


def test_ddp_refuses_a_backend_that_is_not_built_in_and_a_timeout_of_nothing() -> None:
    text = configuration(lambda: with_backend("mpi"))
    assert re.fullmatch(
        r"process_group_backend='mpi' is not in this build of torch; expected one of .*gloo.*", text
    )
    assert "mpi," not in text.partition("expected one of")[2]
    assert configuration(lambda: DDPStrategy(timeout=0)) == (
        "timeout=0: expected seconds or a timedelta, more than 0 and at most 315360000 s"
    )
    for unusable in (None, "abc", float("inf")):
        timeout: Any = unusable
        text = configuration(partial(DDPStrategy, timeout=timeout))
        assert text.startswith(f"timeout={unusable!r}: expected seconds")
    for backend in ("fake", "undefined", 3):
        named: Any = backend
        text = configuration(partial(with_backend, named))
        assert text.startswith(f"process_group_backend={backend!r} is not in this build of torch")
        assert "fake" not in text.partition("expected one of")[2]


def test_a_process_group_of_another_size_is_not_taken_over(tmp_path: Path) -> None:
    strategy = DDPStrategy()
    strategy.bind(
        Components(
            accelerator=CPUAccelerator(),
            precision=TruePrecision(),
            checkpoint_io=SingleFileCheckpointIO(),
            cluster_environment=PlainEnvironment(),
            devices=(0, 1),
        )
    )
    threads = torch.get_num_threads()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        assert configuration(strategy.setup_environment) == (
            "this process is already rank 0 of 1 in a torch.distributed group, but the plan makes "
            "it rank 0 of 2: use as many devices as the first launch in this process did"
        )
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)


def test_an_optimizer_of_parameters_that_are_gone_is_refused_before_training() -> None:
    class Replaced(Line):
        def __init__(self) -> None:
            super().__init__()
            self.optimizer = SGD(self.parameters(), lr=0.1)

        def configure_model(self) -> None:
            self.layer = nn.Linear(2, 1)

        def configure_optimizers(self) -> Any:
            return self.optimizer

    with pytest.raises(UserCodeError) as caught:
        trainer().fit(Replaced(), loader())
    assert str(caught.value) == (
        "Replaced.configure_optimizers() returned a SGD that holds 2 of 2 parameters that the "
        "model does not have (any more), so its steps would not train the model: make it in "
        "configure_optimizers(), from self.parameters()"
    )
