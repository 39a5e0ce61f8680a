"""Hooks of a Module, a DataModule and a Callback: which are called, in which mode, with what."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from stratagem import Callback, DataModule, Module, Trainer
from stratagem.errors import UserCodeError

EVALUATIONS = ("validation", "test", "predict")


class Line(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs)  # type: ignore[no-any-return]

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self(batch).square().mean())

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test_loss", self(batch).square().mean())

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1)


def loader() -> DataLoader[Tensor]:
    inputs: Any = torch.linspace(-1, 1, 8).reshape(4, 2)
    return DataLoader(inputs, batch_size=2)


def quiet(**arguments: Any) -> Trainer:
    defaults = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(accelerator="cpu", devices=1, max_epochs=1, **{**defaults, **arguments})


@pytest.mark.parametrize("wanted", [True, False])
def test_all_of_an_evaluation_is_in_inference_mode_where_that_is_wanted(wanted: bool) -> None:
    seen: dict[str, bool] = {}

    class Looks(Callback):
        def __getattribute__(self, name: str) -> Any:
            if name.startswith("on_") and name.endswith(("_start", "_epoch_end")):
                return lambda *_: seen.update({name: torch.is_inference_mode_enabled()})
            return super().__getattribute__(name)

    hooks = [f"on_{what}_{when}" for what in EVALUATIONS for when in ("start", "epoch_end")]
    looks = type("Looks", (Looks,), {name: lambda *_: None for name in hooks})()
    trainer = quiet(callbacks=looks, inference_mode=wanted)
    run_all(trainer, Line())
    # Within a fit, training can use what the model keeps from validation.
    expected = {name: wanted and "validation" not in name for name in hooks}
    assert {name: seen[name] for name in hooks} == expected
    trainer.validate(Line(), loader(), verbose=False)
    assert {name: seen[name] for name in hooks} == dict.fromkeys(hooks, wanted)


def run_all(trainer: Trainer, model: Module) -> None:
    trainer.fit(model, loader(), loader())
    trainer.test(model, loader(), verbose=False)
    trainer.predict(model, loader())


# ---------------------------------------------------------------- in which mode


class Looking(Callback):
    """Notes the mode in each hook around an evaluation, and runs the model in it."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[bool, bool]] = {}

    def look(self, hook: str, module: Module) -> None:
        module(torch.ones(4, 2))
        self.seen[hook] = (module.training, torch.is_grad_enabled())


def _looking(hook: str) -> Any:
    return lambda self, trainer, module: self.look(hook, module)


for _what in EVALUATIONS:
    for _when in ("start", "epoch_start", "epoch_end", "end"):
        setattr(Looking, f"on_{_what}_{_when}", _looking(f"on_{_what}_{_when}"))


def test_a_callback_may_run_the_model_in_every_hook_of_an_evaluation() -> None:
    class Normed(Line):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)
            self.frozen = nn.Dropout().eval()

        def forward(self, inputs: Tensor) -> Tensor:
            return self.layer(self.norm(inputs))  # type: ignore[no-any-return]

    looking, model = Looking(), Normed()
    run_all(quiet(callbacks=looking, limit_train_batches=0), model)
    assert len(looking.seen) == 12
    assert set(looking.seen.values()) == {(False, False)}
    assert model.norm.num_batches_tracked == 0
    assert model.training
    assert model.norm.training
    assert not model.frozen.training


def test_module_overrides_its_evaluation_mode_hooks() -> None:
    called: list[str] = []

    class Own(Line):
        def on_validation_model_zero_grad(self) -> None:
            super().on_validation_model_zero_grad()
            called.append("zero_grad")

        def on_validation_model_eval(self) -> None:
            called.append("eval")
            self.layer.eval()

        def on_validation_start(self) -> None:
            called.append(f"start {self.training} {self.layer.training}")

        def on_validation_end(self) -> None:
            called.append("end")

        def on_validation_model_train(self) -> None:
            super().on_validation_model_train()
            called.append(f"train {self.layer.training}")

    quiet(num_sanity_val_steps=0).fit(Own(), loader(), loader())
    assert called == ["zero_grad", "eval", "start True False", "end", "train True"]


# ---------------------------------------------------------------- who is called


def test_hooks_may_call_super() -> None:
    called: list[str] = []

    def overriding(hook: str) -> Any:
        def override(self: Any, *args: Any) -> Any:
            called.append(hook)
            return getattr(super(Cooperating, self), hook)(*args)

        return override

    hooks = [
        name
        for base in Module.__mro__
        if base.__module__ == "stratagem.module.hooks"
        for name, hook in vars(base).items()
        if callable(hook)
        and not name.startswith("_")
        and not name.endswith(("_model_train", "exception", "_dataloader"))
    ]
    Cooperating: Any = type("Cooperating", (Line,), {name: overriding(name) for name in hooks})
    run_all(quiet(), Cooperating())
    assert set(called) == set(hooks)
    assert len(hooks) > 40

    class Data(DataModule):
        def setup(self, stage: str) -> None:
            super().setup(stage)

    Data().setup("fit")


class Data(DataModule):
    def __init__(self) -> None:
        self.called: list[str] = []

    def train_dataloader(self) -> Any:
        return loader()

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.called.append(f"before {dataloader_idx}")
        return [batch]

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        self.called.append(f"transfer {device}")
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.called.append(f"after {batch[0].dtype}")
        return batch[0] * 2

    def on_exception(self, exception: BaseException) -> None:
        self.called.append(f"exception {exception}")


def test_a_datamodules_hooks_surround_the_transfer_of_each_batch() -> None:
    given: list[Tensor] = []

    class Takes(Line):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            given.append(batch)
            return super().training_step(batch, batch_idx)

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            raise AssertionError("the datamodule's goes before")

    of_one_batch = ["before 0", "transfer cpu", "after torch.float64"]
    datamodule = Data()
    quiet(precision="64-true", limit_val_batches=0).fit(Takes(), datamodule=datamodule)
    assert datamodule.called == of_one_batch * 2
    assert torch.equal(torch.cat(given), loader().dataset[:] * 2)

    for stage in ("validate", "test", "predict"):
        datamodule = Data()
        getattr(quiet(precision="64-true"), stage)(Line(), datamodule=datamodule)
        assert datamodule.called == of_one_batch * 2


def test_a_modules_transfer_hooks_are_given_the_loaders_index() -> None:
    class Takes(Line):
        indices: list[int]

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.indices.append(dataloader_idx)
            return batch

    model = Takes()
    model.indices = []
    quiet().validate(model, [loader(), loader()], verbose=False)
    assert model.indices == [0, 0, 1, 1]


def test_a_datamodule_hears_of_an_exception() -> None:
    class Fails(Line):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            raise ValueError("on purpose")

    datamodule = Data()
    with pytest.raises(ValueError, match="on purpose"):
        quiet(limit_val_batches=0).fit(Fails(), datamodule=datamodule)
    assert datamodule.called[-1] == "exception on purpose"


@pytest.mark.parametrize(
    ("method", "remedy"),
    [
        ("configure_sharded_model", "rename it to configure_model"),
        ("training_step_end", "put it into training_step"),
        ("validation_epoch_end", "rename it to on_validation_epoch_end, and keep outputs"),
    ],
)
def test_uncalled_lightning_method_is_refused_with_a_remedy(method: str, remedy: str) -> None:
    model = type("Old", (Line,), {method: lambda self: None})()
    text = f"Old defines {method}, which Stratagem does not call, so .*: for {method}, {remedy}"
    with pytest.raises(UserCodeError, match=text):
        quiet().fit(model, loader())


def test_a_stage_refuses_the_methods_of_that_stage_alone() -> None:
    model = type("Old", (Line,), {"test_epoch_end": lambda self, outputs: None})()
    trainer = quiet()
    trainer.fit(model, loader(), loader())
    trainer.validate(model, loader(), verbose=False)
    trainer.predict(model, loader())
    with pytest.raises(UserCodeError, match="for test_epoch_end, rename it to on_test_epoch_end"):
        trainer.test(model, loader(), verbose=False)


def test_each_of_several_uncalled_methods_has_its_remedy() -> None:
    names = ("training_epoch_end", "training_step_end", "configure_sharded_model")
    model = type("Old", (Line,), dict.fromkeys(names, lambda self: None))()
    with pytest.raises(UserCodeError) as raised:
        quiet().fit(model, loader())
    assert str(raised.value) == (
        "Old defines configure_sharded_model, training_epoch_end, training_step_end, which "
        "Stratagem does not call, so training would differ silently: for configure_sharded_model, "
        "rename it to configure_model; for training_epoch_end, rename it to on_train_epoch_end, "
        "and keep outputs in an attribute; for training_step_end, put it into training_step"
    )


# ---------------------------------------------------------------- with what


def test_dataloader_idx_is_optional_in_hooks_and_steps() -> None:
    class Plain(Line):
        indices: list[int]

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("x", 1.0)

        def test_step(  # type: ignore[override]
            self, batch: Tensor, batch_idx: int, dataloader_idx: int
        ) -> None:
            self.indices.append(dataloader_idx)

    class Short(Callback):
        batches = 0

        def on_validation_batch_start(  # type: ignore[override]
            self, trainer: Trainer, module: Module, batch: Any, batch_idx: int
        ) -> None:
            self.batches += 1

        def on_validation_batch_end(  # type: ignore[override]
            self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            self.batches += 10

    model, short = Plain(), Short()
    model.indices = []
    trainer = quiet(callbacks=short)
    trainer.validate(model, loader(), verbose=False)
    assert short.batches == 22
    values = trainer.validate(model, [loader(), loader()], verbose=False)
    assert values == [{"x/dataloader_idx_0": 1.0}, {"x/dataloader_idx_1": 1.0}]
    assert short.batches == 66
    trainer.test(model, loader(), verbose=False)
    assert model.indices == [0, 0]


def test_predict_takes_several_loaders_without_a_predict_step() -> None:
    predictions = quiet().predict(Line(), [loader(), loader()])
    assert [len(of_loader) for of_loader in predictions] == [2, 2]


def test_a_loader_beside_another_iterable_is_a_loader() -> None:
    class Batches:
        def __iter__(self) -> Any:
            return iter([torch.ones(2, 2)] * 3)

    predictions = quiet().predict(Line(), [loader(), Batches()])
    assert [len(of_loader) for of_loader in predictions] == [2, 3]


def test_the_loss_that_a_hook_is_given_has_no_graph() -> None:
    class ReturnsDict(Line):
        kept: dict[str, Any]

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return {"loss": super().training_step(batch, batch_idx), "note": batch_idx}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.kept = outputs

    model = ReturnsDict()
    quiet().fit(model, loader())
    assert model.kept["loss"].grad_fn is None
    assert model.kept["note"] == 1


def test_method_set_to_none_counts_as_undefined() -> None:
    model: Any = Line()
    model.validation_step = None
    model.on_train_start = None
    trainer = quiet()
    trainer.fit(model, loader(), loader())
    assert "val_loss" not in trainer.callback_metrics
    with pytest.raises(UserCodeError, match="Line does not define validation_step"):
        trainer.validate(model, loader())


def test_a_training_step_may_be_set_on_the_model() -> None:
    class Bare(Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def configure_optimizers(self) -> Any:
            return SGD(self.parameters(), lr=0.1)

    seen = []

    def training_step(batch: Tensor, batch_idx: int) -> Tensor:
        seen.append(batch_idx)
        loss: Tensor = model.layer(batch).square().mean()
        return loss

    model: Any = Bare()
    before = model.layer.weight.detach().clone()
    model.training_step = training_step
    trainer = quiet()
    trainer.fit(model, loader())
    assert seen == list(range(len(loader())))
    assert trainer.global_step == len(seen)
    assert not torch.equal(model.layer.weight, before)


# ---------------------------------------------------------------- copies


class KeepsOptimizer(Line):
    kept: Any

    def on_train_start(self) -> None:
        self.kept = self.optimizers()


def test_module_is_copyable_and_picklable_during_training(tmp_path: Path) -> None:
    class Copies(Callback):
        copies: list[Any]

        def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
            self.copies.append(copy.deepcopy(module))
            torch.save(module, io.BytesIO())

    copies, model, data = Copies(), KeepsOptimizer(), Data()
    copies.copies = []
    trainer = quiet(callbacks=copies, limit_val_batches=0)
    trainer.fit(model, datamodule=data)
    assert len(copies.copies) == 2
    assert not torch.equal(copies.copies[0].layer.weight, copies.copies[1].layer.weight)
    copied = copy.deepcopy(model)
    assert torch.equal(copied.layer.weight, model.layer.weight)
    # The copy's optimizer is the copy's own, and steps it.
    assert type(copied.kept) is SGD
    assert copied.kept.param_groups[0]["params"][0] is copied.layer.weight
    with pytest.raises(UserCodeError, match="is not attached to a Trainer"):
        copied.trainer  # noqa: B018
    assert copy.deepcopy(data).trainer is None
    assert model.trainer is trainer
    quiet().fit(copied, loader())
