"""ipu_strategy over a stub of poptorch that enforces its states and computes on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Lite, Module, Trainer
from stratagem.callbacks import Callback
from stratagem.errors import ConfigurationError, UserCodeError
from stratagem_hpu_ipu import ipu_probe
from stratagem_hpu_ipu.ipu_strategy import IPUStrategy

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def poptorch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stub, as new; it emulates, so that the probe looks for no hardware."""
    monkeypatch.syspath_prepend(str(HERE / "stubs"))
    monkeypatch.setenv("POPTORCH_IPU_MODEL", "1")
    import poptorch as stub

    yield stub
    del sys.modules["poptorch"]


class Net(Module):
    def __init__(self, make: Any = None, norm: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8) if norm else nn.Tanh(), nn.Linear(8, 4)
        )
        self.make = make or (lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        self.runs = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.runs += 1
        inputs, targets = batch
        return mse_loss(self.net(inputs), targets)

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        return mse_loss(self.net(inputs), targets)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"rows": self.net(batch[0]), "name": "net"}

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


class Losses(Callback):
    def __init__(self) -> None:
        self.training: list[float] = []
        self.validation: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        if outputs["loss"] is not None:
            self.training.append(float(outputs["loss"]))

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.validation.append(float(outputs))


def loader(size: int = 4) -> DataLoader[Any]:
    inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(2))
    return DataLoader(TensorDataset(inputs, inputs.roll(1, 1)), batch_size=size)


def trainer(folder: Path, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "ipu",
        "devices": 1,
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "num_sanity_val_steps": 0,
    }
    return Trainer(**{**defaults, **options}, default_root_dir=folder)


def fit(
    folder: Path, *, net: Net | None = None, validates: bool = False, size: int = 4, **options: Any
) -> tuple[Net, Losses]:
    net, losses, path = net or Net(), Losses(), options.pop("ckpt_path", None)
    one = trainer(folder, callbacks=losses, **options)
    one.fit(net, loader(size), loader(size) if validates else None, ckpt_path=path)
    return net, losses


def assert_same(one: nn.Module, other: nn.Module) -> None:
    torch.testing.assert_close(dict(one.state_dict()), dict(other.state_dict()))


CPU: dict[str, Any] = {"accelerator": "cpu", "strategy": "single_device"}


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


@pytest.mark.parametrize("make", [None, adam], ids=["SGD", "AdamW"])
def test_ipu_fit_equals_a_fit_on_the_cpu(tmp_path: Path, make: Any) -> None:
    ours, losses = fit(tmp_path, net=Net(make), validates=True)
    theirs, expected = fit(tmp_path, net=Net(make), validates=True, **CPU)
    assert losses.training == pytest.approx(expected.training, rel=1e-5)
    assert losses.validation == pytest.approx(expected.validation, rel=1e-5)
    assert len(losses.training) == len(losses.validation) == 12
    assert_same(ours, theirs)
    assert ours.runs == 1  # compiled once


def test_auto_selects_ipu_strategy(tmp_path: Path) -> None:
    assert trainer(tmp_path).plan.strategy.name == "ipu_strategy"
    assert trainer(tmp_path, devices=4).plan.strategy.name == "ipu_strategy"


def test_micro_batches_replicas_and_parts_are_one_call(tmp_path: Path, poptorch: Any) -> None:
    strategy = IPUStrategy(gradient_accumulation=2)
    options: dict[str, Any] = {"accumulate_grad_batches": 3, "max_epochs": 1}
    ours, _ = fit(tmp_path, net=Net(norm=False), strategy=strategy, devices=2, **options)
    assert poptorch.calls.count("training called") == 2
    theirs, _ = fit(tmp_path, net=Net(norm=False), **options, **CPU)
    assert_same(ours, theirs)


def test_programs_take_turns_on_the_device(tmp_path: Path, poptorch: Any) -> None:
    fit(tmp_path, validates=True, limit_train_batches=2, limit_val_batches=1)
    first = ["training wrapped", "training compiled", "training called", "training called"]
    training = ["training attached", "training called", "training called"]
    to_host = ["training weights to host", "training detached"]
    assert poptorch.calls == [
        *(*first, *to_host),
        *("inference wrapped", "inference compiled", "inference called", "inference detached"),
        *(*training, *to_host),
        *("inference attached", "inference called", "inference detached"),
    ]


def test_learning_rate_changes_reach_the_ipu_program(tmp_path: Path, poptorch: Any) -> None:
    class Scheduled(Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    ours, losses = fit(tmp_path, net=Scheduled(), max_epochs=3)
    theirs, expected = fit(tmp_path, net=Scheduled(), max_epochs=3, **CPU)
    assert poptorch.handed_over == [[0.05], [0.025]]
    assert losses.training == pytest.approx(expected.training, rel=1e-5)
    assert_same(ours, theirs)


def test_ipu_checkpoint_resumes_on_the_cpu_and_back(tmp_path: Path, poptorch: Any) -> None:
    reference, _ = fit(tmp_path, **CPU)
    ways: list[tuple[str, dict[str, Any], dict[str, Any]]] = [("to", {}, CPU), ("from", CPU, {})]
    for name, first, second in ways:
        one = trainer(tmp_path, **{"max_epochs": 1, **first})
        one.fit(Net(), loader())
        path = tmp_path / f"{name}.ckpt"
        one.save_checkpoint(path)
        resumed, _ = fit(tmp_path, ckpt_path=path, **second)
        assert_same(resumed, reference)


def test_a_checkpoint_within_training_has_the_weights_of_its_step(tmp_path: Path) -> None:
    class Saves(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(tmp_path / "third.ckpt", weights_only=True)

    one = trainer(tmp_path, max_epochs=1, callbacks=Saves())
    one.fit(Net(), loader())
    theirs, _ = fit(tmp_path, max_steps=3, **CPU)
    saved = torch.load(tmp_path / "third.ckpt", weights_only=True)["state_dict"]
    torch.testing.assert_close(dict(saved), dict(theirs.state_dict()))


def test_ipu_checkpoint_without_momenta_warns(tmp_path: Path) -> None:
    one = trainer(tmp_path, max_epochs=1)
    one.fit(Net(adam), loader())
    with pytest.warns(UserWarning, match="momenta lie in the program .* does not hold them"):
        one.save_checkpoint(tmp_path / "adam.ckpt")
    theirs = trainer(tmp_path, max_epochs=1, **CPU)
    theirs.fit(Net(adam), loader())
    theirs.save_checkpoint(tmp_path / "cpu.ckpt")
    with pytest.warns(UserWarning, match="those of the checkpoint are left out"):
        fit(tmp_path, net=Net(adam), ckpt_path=tmp_path / "cpu.ckpt")


def test_a_model_is_fitted_again_and_evaluated_by_further_trainers(
    tmp_path: Path, poptorch: Any
) -> None:
    net, _ = fit(tmp_path)
    reference, _ = fit(tmp_path, **CPU)
    net, _ = fit(tmp_path, net=net)
    reference, _ = fit(tmp_path, net=reference, **CPU)
    assert_same(net, reference)
    losses, expected = Losses(), Losses()
    trainer(tmp_path, callbacks=losses).validate(net, loader(), verbose=False)
    trainer(tmp_path, callbacks=expected, **CPU).validate(reference, loader(), verbose=False)
    assert losses.validation == pytest.approx(expected.validation, rel=1e-5)


def test_predictions_are_put_together_from_their_parts(tmp_path: Path) -> None:
    strategy = IPUStrategy(device_iterations=2)
    ours = trainer(tmp_path, strategy=strategy, devices=2).predict(Net(), loader())
    theirs = trainer(tmp_path, **CPU).predict(Net(), loader())
    assert [batch["name"] for batch in ours] == ["net"] * 6
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one["rows"], other["rows"])


def test_scalars_of_an_evaluation_are_means_over_parts(tmp_path: Path) -> None:
    losses, expected = Losses(), Losses()
    strategy = IPUStrategy(device_iterations=2)
    trainer(tmp_path, callbacks=losses, strategy=strategy).validate(Net(), loader(), verbose=False)
    trainer(tmp_path, callbacks=expected, **CPU).validate(Net(), loader(), verbose=False)
    assert losses.validation == pytest.approx(expected.validation, rel=1e-5)


def test_lite_evaluates_by_a_program(poptorch: Any) -> None:
    lite = Lite(accelerator="ipu", devices=1)
    lite.launch()
    net = nn.Linear(4, 2)
    module = lite.setup(net)
    with torch.no_grad():
        rows = torch.ones(3, 4)
        torch.testing.assert_close(module(rows), net(rows))
    assert poptorch.calls[-1] == "inference called"
    lite.strategy.teardown()
    assert poptorch.calls[-2:] == ["inference detached", "inference destroyed"]


def test_options_are_set_before_a_model_freezes_them(tmp_path: Path, poptorch: Any) -> None:
    seen: list[Any] = []

    def use_model(options: Any) -> None:
        seen.append(options.useIpuModel(True))

    strategy = IPUStrategy(configure_options=use_model)
    fit(tmp_path, strategy=strategy, limit_train_batches=1, max_epochs=1, validates=True)
    assert [options.target for options in seen] == ["model", "model"]
    with pytest.raises(AttributeError, match="frozen"):
        seen[0].deviceIterations(2)


# -- what is refused


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"gradient_clip_val": 1.0},
            "the strategy 'ipu_strategy' cannot clip gradients, received gradient_clip_val=1.0: "
            "leave it out, or use another strategy",
        ),
        (
            {"accumulate_grad_batches": {0: 1, 4: 2}},
            "accumulate_grad_batches={0: 1, 4: 2} changes between epochs, and a step on IPUs is "
            "compiled for one number: pass a number",
        ),
        (
            {"strategy": "ddp", "devices": 2},
            "accelerator='ipu' takes strategies that were made for it alone, 'ipu_strategy'; "
            "received 'ddp': change one of the two",
        ),
        (
            {"precision": "bf16-mixed"},
            "the strategy 'ipu_strategy' takes the precisions '32-true', received "
            "precision='bf16-mixed': change one of the two",
        ),
    ],
)
def test_ipu_refuses_bad_trainer_options(tmp_path: Path, options: Any, expected: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        trainer(tmp_path, **options)
    assert str(refused.value) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"devices": 5},
            "devices=5 asks for ipu device 4, but there are 4 here (4 IPU(s) in this machine), "
            "counted from 0: name those, or pass devices=-1 for all",
        ),
        (
            {"devices": 2, "num_nodes": 2, "strategy": "ipu_strategy"},
            "the strategy 'ipu_strategy' runs on one node, received num_nodes=2: pass num_nodes=1",
        ),
        (
            {"accelerator": "cpu", "strategy": "ipu_strategy"},
            "the strategy 'ipu_strategy' runs on 'ipu', received accelerator='cpu': change one of "
            "the two",
        ),
    ],
)
def test_ipu_cards_refuse_bad_trainer_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Any, expected: str
) -> None:
    monkeypatch.delenv("POPTORCH_IPU_MODEL")
    for index in range(4):
        (tmp_path / f"ipu{index}").touch()
    monkeypatch.setattr(ipu_probe, "DEVICES", tmp_path)
    with pytest.raises(ConfigurationError) as refused:
        trainer(tmp_path, **options)
    assert str(refused.value) == expected


@pytest.mark.parametrize("front_end", [Lite, Trainer])
def test_without_poptorch_the_request_is_refused(
    monkeypatch: pytest.MonkeyPatch, front_end: type[Lite | Trainer]
) -> None:
    monkeypatch.undo()  # the stub is off the path
    monkeypatch.setitem(sys.modules, "poptorch", None)
    with pytest.raises(ConfigurationError) as refused:
        front_end(accelerator="ipu", devices=1)
    assert str(refused.value) == (
        "accelerator='ipu' is not available on this machine: the Poplar SDK is not enabled (no "
        "package poptorch; it comes with the SDK, see https://docs.graphcore.ai); pass "
        "accelerator='auto' to take what there is"
    )
    monkeypatch.undo()


def test_several_ipus_are_one_rank(
    tmp_path: Path,
) -> None:
    one = trainer(tmp_path, devices=4)
    assert (one.plan.world_size, one.plan.processes_per_node) == (1, 1)
    ranks = one.strategy.ranks
    assert float(ranks.all_reduce(torch.tensor(3.0))) == 3.0
    assert ranks.gather_objects({"rows": 2}) == [{"rows": 2}]


def test_arguments_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="device_iterations=0: expected a whole number"):
        IPUStrategy(device_iterations=0)
    with pytest.raises(ConfigurationError, match="replication_factor=2 and devices=3: expected"):
        trainer(tmp_path, strategy=IPUStrategy(replication_factor=2), devices=3)


def test_poptorch_without_an_ipu_is_refused(
    tmp_path: Path, poptorch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trainer(tmp_path)
    monkeypatch.delenv("POPTORCH_IPU_MODEL")
    monkeypatch.setattr(poptorch, "available", 0)
    with pytest.raises(ConfigurationError, match=r"devices=1: poptorch finds no 1 IPU\(s\)"):
        one.fit(Net(), loader())


def test_missing_poptorch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = trainer(tmp_path)
    monkeypatch.setitem(sys.modules, "poptorch", None)
    with pytest.raises(ConfigurationError, match="needs poptorch, which cannot be imported"):
        one.fit(Net(), loader())
    monkeypatch.undo()


def test_ipu_refuses_device_indices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POPTORCH_IPU_MODEL")
    for index in range(4):
        (tmp_path / f"ipu{index}").touch()
    monkeypatch.setattr(ipu_probe, "DEVICES", tmp_path)
    assert trainer(tmp_path, devices="auto").plan.devices == (0, 1, 2, 3)
    with pytest.raises(ConfigurationError) as refused:
        trainer(tmp_path, devices=[1, 3])
    assert str(refused.value) == (
        "devices=[1, 3] chooses IPUs by index, and poptorch takes any that are free: pass devices=2"
    )


def test_optimizers_that_no_program_takes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="received Adagrad: expected torch's own SGD, Ada"):
        fit(tmp_path, net=Net(torch.optim.Adagrad))
    strategy = trainer(tmp_path).strategy
    net = nn.Linear(4, 1)
    with pytest.raises(ConfigurationError) as refused:
        strategy.prepare(net, [torch.optim.LBFGS(net.parameters())])
    assert str(refused.value) == (
        "a step on IPUs is compiled with its optimizer, received LBFGS: expected torch's own "
        "SGD, Adam, AdamW, RMSprop"
    )
    with pytest.raises(ConfigurationError) as refused:
        strategy.prepare(net, [torch.optim.SGD([p], lr=0.1) for p in net.parameters()])
    assert str(refused.value) == (
        "a step on IPUs has one optimizer, received 2: put the parameters into groups of one "
        "optimizer"
    )


def test_manual_optimization_and_loops_by_hand_are_refused(tmp_path: Path) -> None:
    net = Net()
    net.automatic_optimization = False
    with pytest.raises(ConfigurationError, match="runs backward itself"):
        fit(tmp_path, net=net)
    lite = Lite(accelerator="ipu", devices=1)
    lite.launch()
    plain = nn.Linear(4, 1)
    with pytest.raises(ConfigurationError, match="a loop of your own cannot train with it"):
        lite.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))


class Misused(Net):
    """A Net whose training_step does what no program can."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.what == "log":
            self.log("loss", loss)
        if self.what == "index" and batch_idx == 0:
            return loss
        return {"None": None, "no loss": {"other": loss}}.get(self.what, loss)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("log", r"self.log\('loss', ...\) in a step on IPUs would see no value"),
        ("index", "batch_idx and dataloader_idx are not known in a step on IPUs"),
        ("None", "training_step returned None; a step on IPUs is compiled once"),
        ("no loss", "training_step returned .*: return the loss, or a dict with the key 'loss'"),
    ],
)
def test_a_step_that_cannot_be_compiled_is_refused(
    tmp_path: Path, what: str, expected: str
) -> None:
    with pytest.raises(UserCodeError, match=expected):
        fit(tmp_path, net=Misused(what))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"size": 5}, r"compiled for tensors of \(5, 4\), \(5, 4\), received \(4, 4\), \(4, 4\)"),
        (
            {"accumulate_grad_batches": 4},
            "the epoch's last step has 2 of accumulate_grad_batches=4 batches",
        ),
        ({"devices": 3}, r"into 3 parts .* received one of shape \(4, 4\)"),
    ],
)
def test_batches_of_other_shapes_are_refused(tmp_path: Path, options: Any, expected: str) -> None:
    with pytest.raises(UserCodeError, match=expected):
        fit(tmp_path, **options)


def test_poptorch_stub_raises_like_poptorch(poptorch: Any) -> None:
    net = nn.Linear(2, 1)
    options = poptorch.Options()
    poptorch.DataLoader(options, [torch.ones(2)])
    with pytest.raises(AttributeError, match="frozen"):
        options.Training.gradientAccumulation(2)
    executor = poptorch.trainingModel(net, poptorch.Options())
    with pytest.raises(RuntimeError, match="already been wrapped"):
        poptorch.trainingModel(net, poptorch.Options())
    with pytest.raises(poptorch.Error, match="not been compiled"):
        executor.attachToDevice()
    executor.destroy()
    with pytest.raises(poptorch.Error, match="destroyed"):
        executor(torch.ones(1, 2))


def test_the_stub_refuses_devices_that_are_taken_in_the_wrong_order(poptorch: Any) -> None:
    first, second = (poptorch.inferenceModel(nn.Linear(2, 1), poptorch.Options()) for _ in "12")
    rows = torch.ones(1, 2)
    first.compile(rows)  # and attached
    with pytest.raises(poptorch.Error, match="already attached"):
        first.attachToDevice()
    with pytest.raises(poptorch.Error, match="another program holds them"):
        second.compile(rows)
    first.detachFromDevice()
    with pytest.raises(poptorch.Error, match="not attached"):
        first.copyWeightsToHost()
    second.compile(rows)
    with pytest.raises(poptorch.Error, match="another program holds them"):
        first.attachToDevice()


def test_the_stub_takes_one_target(poptorch: Any) -> None:
    with pytest.raises(poptorch.Error, match="exclude each other"):
        poptorch.Options().useIpuModel(True).useOfflineIpuTarget(2)


def test_the_stub_accumulates_in_training_only(poptorch: Any) -> None:
    options = poptorch.Options()
    options.Training.gradientAccumulation(2)
    with pytest.raises(AssertionError, match="left to its default for inference"):
        poptorch.inferenceModel(nn.Linear(2, 1), options)


def test_activation_checkpointing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="=True: poptorch compiles a step"):
        IPUStrategy().check_activation_checkpointing(True)
