"""Loss scaling, on the CPU, whose float16 is slow and computes alike."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Lite, Module, Trainer
from stratagem.callbacks import Callback
from stratagem.errors import ConfigurationError, UserCodeError
from stratagem_cuda.precision import Float16Mixed


class Linear(Module):
    """One layer; the batches of `overflows` have a loss whose scaled gradient is infinite."""

    def __init__(self, overflows: tuple[int, ...] = (), fused: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.overflows, self.fused = overflows, fused
        self.weights: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (inputs,) = batch
        loss = self.layer(inputs).float().square().mean()
        return cast("Tensor", loss * float("inf") if batch_idx in self.overflows else loss)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9, fused=self.fused)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Watch(Callback):
    """Notes steps, learning rate and scale after each batch."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.rates: list[float] = []
        self.scales: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, module: Module, *_: Any) -> None:
        self.steps.append(trainer.global_step)
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.scales.append(trainer.strategy.precision.state_dict()["scale"])


def data(batches: int) -> DataLoader[Any]:
    inputs = torch.randn(batches * 2, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs), batch_size=2)


def fit(module: Module, batches: int = 6, **options: Any) -> tuple[Trainer, Watch]:
    watch = Watch()
    precision = options.pop("precision", None) or Float16Mixed(init_scale=1024.0)
    ckpt_path = options.pop("ckpt_path", None)
    trainer = Trainer(
        **{
            "accelerator": "cpu",
            "max_epochs": 1,
            "plugins": precision,
            "callbacks": watch,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            **options,
        }
    )
    trainer.fit(module, data(batches), ckpt_path=ckpt_path)
    return trainer, watch


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_overflows_is_left_out_and_not_counted(fused: bool) -> None:
    trainer, watch = fit(Linear(overflows=(1, 3), fused=fused))
    assert watch.steps == [1, 1, 2, 2, 3, 4]
    # The schedule follows the steps that were taken, and the scale the overflows.
    assert watch.rates == [0.005, 0.005, 0.0025, 0.0025, 0.00125, 0.000625]
    assert watch.scales == [1024.0, 512.0, 512.0, 256.0, 256.0, 256.0]
    assert trainer.global_step == 4


def test_the_scale_grows_after_as_many_steps_as_asked() -> None:
    _, watch = fit(Linear(), precision=Float16Mixed(init_scale=64.0, growth_interval=2))
    assert watch.scales == [64.0, 128.0, 128.0, 256.0, 256.0, 512.0]


def test_a_scaler_of_the_users_is_the_one_that_scales() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=32.0, growth_factor=4.0, growth_interval=2)
    _, watch = fit(Linear(), precision=Float16Mixed(scaler=scaler))
    assert watch.scales == [32.0, 128.0, 128.0, 512.0, 512.0, 2048.0]
    assert scaler.get_scale() == 2048.0


def test_a_precision_that_has_stepped_travels_to_another_process() -> None:
    precision = Float16Mixed(scaler=torch.amp.GradScaler("cpu", init_scale=4.0))
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    precision.scale_loss(weight.sum()).backward()  # type: ignore[no-untyped-call]
    precision.optimizer_step(optimizer)
    again = pickle.loads(pickle.dumps(precision))
    assert again.state_dict() == precision.state_dict()
    optimizer.zero_grad()
    again.scale_loss(weight.sum()).backward()
    again.optimizer_step(optimizer)
    assert (weight.item(), again.step_was_skipped) == (0.0, False)


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_of_one_optimizer_leaves_the_step_of_another(fused: bool) -> None:
    precision = Float16Mixed(scaler=torch.amp.GradScaler("cpu", init_scale=4.0))
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=0.5, fused=fused) for weight in weights]
    loss = weights[0].sum() * float("inf") + weights[1].sum()
    precision.scale_loss(loss).backward()  # type: ignore[no-untyped-call]
    skipped = []
    for optimizer in optimizers:
        precision.unscale_gradients(optimizer)
        precision.unscale_gradients(optimizer)  # clipped by value, and then by norm
    for optimizer in optimizers:
        precision.optimizer_step(optimizer)
        skipped.append(precision.step_was_skipped)
    assert skipped == [True, False]
    assert [weight.item() for weight in weights] == [1.0, 0.5]
    assert precision.state_dict()["scale"] == 2.0
    precision.load_state_dict({})
    assert precision.state_dict()["scale"] == 4.0


def test_gradients_that_a_later_backward_has_added_to_are_not_unscaled_again() -> None:
    precision = Float16Mixed(scaler=torch.amp.GradScaler("cpu", init_scale=4.0))
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    precision.scale_loss(weight.sum()).backward()  # type: ignore[no-untyped-call]
    precision.unscale_gradients(optimizer)
    precision.scale_loss(weight.sum()).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="already been called on this optimizer"):
        precision.unscale_gradients(optimizer)


def test_16_mixed_equals_a_torch_loop() -> None:
    torch.manual_seed(3)
    module = Linear()
    own = nn.Linear(4, 1)
    own.load_state_dict(module.layer.state_dict())
    fit(module, gradient_clip_val=0.1)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.01, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for (inputs,) in data(6):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = own(inputs).float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(own.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        schedule.step()
    for name, value in own.state_dict().items():
        assert torch.equal(module.layer.state_dict()[name], value)


def test_a_resumed_run_goes_on_with_the_scale(tmp_path: Path) -> None:
    torch.manual_seed(5)
    whole = Linear(overflows=(1, 4))
    before = {name: value.clone() for name, value in whole.state_dict().items()}
    _, whole_watch = fit(whole)
    half = Linear(overflows=(1, 4))
    half.load_state_dict(before)
    trainer, _ = fit(half, max_steps=2)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    rest = Linear(overflows=(1, 4))
    _, rest_watch = fit(rest, ckpt_path=tmp_path / "half.ckpt")
    assert rest_watch.scales == whole_watch.scales[3:]
    assert rest_watch.steps == whole_watch.steps[3:]
    for name, value in whole.state_dict().items():
        assert torch.equal(rest.state_dict()[name], value)


def test_manual_optimization_counts_the_steps_that_were_taken() -> None:
    class Manual(Linear):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return loss

    _, watch = fit(Manual(overflows=(0, 2)), batches=4)
    assert watch.steps == [0, 1, 1, 2]


def lite_run(path: Path, *, load: bool) -> tuple[float, dict[str, Tensor]]:
    lite = Lite(accelerator="cpu", plugins=Float16Mixed(init_scale=2.0**20, growth_interval=3))
    lite.launch()
    torch.manual_seed(1)
    net = nn.Linear(4, 1)
    model, optimizer = lite.setup(net, torch.optim.Adam(net.parameters(), lr=0.1))
    state = {"model": model, "optimizer": optimizer}
    if load:
        lite.load(path, dict(state))
    for number, (inputs,) in enumerate(data(8)):
        if load and number < 4:
            continue
        optimizer.zero_grad()
        lite.backward(mse_loss(model(inputs), inputs[:, :1]) * (1e9 if number == 2 else 1.0))
        norm = lite.clip_gradients(model, optimizer, max_norm=1.0)
        assert norm is not None
        optimizer.step()
        if not load and number == 3:
            lite.save(path, state)
    return lite.strategy.precision.state_dict()["scale"], net.state_dict()


def test_lite_saves_the_scale_beside_the_optimizer(tmp_path: Path) -> None:
    scale, whole = lite_run(tmp_path / "half.ckpt", load=False)
    again, rest = lite_run(tmp_path / "half.ckpt", load=True)
    assert scale == again
    assert all(torch.equal(whole[name], rest[name]) for name in whole)


def test_a_step_with_a_closure_is_refused() -> None:
    lite = Lite(accelerator="cpu", plugins=Float16Mixed())
    lite.launch()
    net = nn.Linear(4, 1)
    _, optimizer = lite.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(UserCodeError, match="precision='16-mixed' scales the loss, and a step wit"):
        optimizer.step(lambda: 1.0)


def test_16_mixed_refuses_the_cpu() -> None:
    expected = (
        r"precision='16-mixed' works on 'cuda', received accelerator='cpu': pass "
        r"precision='bf16-mixed', or another accelerator"
    )
    with pytest.raises(ConfigurationError, match=expected):
        Trainer(accelerator="cpu", precision="16-mixed", enable_checkpointing=False)
    with pytest.raises(ConfigurationError, match="expected '16-mixed'"):
        Float16Mixed("bf16-mixed")


def test_an_accelerator_without_autocast_to_float16_is_refused() -> None:
    from stratagem.accelerators import CPUAccelerator

    class NoFloat16(CPUAccelerator):
        def autocast(self, dtype: torch.dtype) -> Any:
            return None

    with pytest.raises(ConfigurationError, match="cannot autocast to float16"):
        Float16Mixed().bind(NoFloat16())
