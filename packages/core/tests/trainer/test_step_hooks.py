"""What a Module does of an optimizer step itself: in which order, and with which numbers."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader

from stratagem import Callback, Module, Trainer
from stratagem.errors import ConfigurationError, PluginError, UserCodeError
from stratagem.strategies import SingleDeviceStrategy

RunScript = Callable[..., Any]
SCRIPT = Path(__file__).parents[1] / "scripts/step_hooks.py"


def data(samples: int = 12) -> Tensor:
    return torch.randn(samples, 3, generator=torch.Generator().manual_seed(1))


def loader(batch_size: int = 2) -> DataLoader[Tensor]:
    return DataLoader(data(), batch_size=batch_size)  # type: ignore[arg-type]


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def loss_of(net: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = (net(batch) - batch.sum(1, keepdim=True).sin()).square().mean()
    return loss


class Line(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = loss_of(self.net, batch)
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1, momentum=0.9)


def quiet(**arguments: Any) -> Trainer:
    defaults = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(accelerator="cpu", devices=1, **{"max_epochs": 1, **defaults, **arguments})


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def raw(
    step: Callable[[nn.Module, Optimizer, Tensor, int], None],
    make: Callable[[Any], Optimizer] = lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
) -> Tensor:
    """Train without a Trainer; return the weights."""
    net = network()
    optimizer = make(net.parameters())
    for index, batch in enumerate(loader()):
        step(net, optimizer, batch, index)
    return weights(net)


def raw_step(net: nn.Module, optimizer: Optimizer, batch: Tensor, index: int) -> None:
    optimizer.zero_grad()
    loss_of(net, batch).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


# ---------------------------------------------------------------- in which order


def test_the_hooks_of_a_step_come_in_the_order_of_the_2x_line() -> None:
    called: list[str] = []

    def noting(hook: str) -> Any:
        def override(self: Any, *args: Any, **kwargs: Any) -> Any:
            called.append(hook)
            result = getattr(super(Noting, self), hook)(*args, **kwargs)
            if hook == "optimizer_step":
                called.append("end of optimizer_step")
            return result

        return override

    class Scheduled(Line):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            called.append("training_step")
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [{"scheduler": StepLR(optimizer, 1), "interval": "step"}]

    names = (
        *("on_train_batch_start", "optimizer_step", "on_before_zero_grad", "optimizer_zero_grad"),
        *("on_before_backward", "backward", "on_after_backward", "on_before_optimizer_step"),
        *("configure_gradient_clipping", "lr_scheduler_step", "on_train_batch_end"),
    )
    Noting: Any = type("Noting", (Scheduled,), {name: noting(name) for name in names})
    trainer = quiet(limit_train_batches=2, accumulate_grad_batches=2, gradient_clip_val=0.1)
    trainer.fit(Noting(), loader())
    # As lightning 2.6.6 calls them.
    assert called == [
        "on_train_batch_start",
        *("training_step", "on_before_zero_grad", "optimizer_zero_grad"),
        *("on_before_backward", "backward", "on_after_backward"),
        "on_train_batch_end",
        *("on_train_batch_start", "optimizer_step", "training_step"),
        *("on_before_backward", "backward", "on_after_backward"),
        *("on_before_optimizer_step", "configure_gradient_clipping", "end of optimizer_step"),
        *("lr_scheduler_step", "on_train_batch_end"),
    ]
    assert trainer.global_step == 1


def test_overrides_that_call_the_base_change_no_number() -> None:
    class Cooperating(Line):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)

        def optimizer_zero_grad(self, *args: Any) -> None:
            super().optimizer_zero_grad(*args)

        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            super().backward(loss, *args, **kwargs)

        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
            super().configure_gradient_clipping(*args, **kwargs)

    trained = []
    for kind in (Line, Cooperating):
        model = kind()
        trainer = quiet(max_epochs=3, accumulate_grad_batches=4, gradient_clip_val=0.2)
        trainer.fit(model, loader())
        assert trainer.global_step == 6
        trained.append((weights(model), trainer.callback_metrics))
    assert torch.equal(trained[0][0], trained[1][0])
    assert trained[0][1] == trained[1][1]


# ---------------------------------------------------------------- optimizer_step


def test_a_learning_rate_may_be_warmed_up_in_optimizer_step() -> None:
    class Warms(Line):
        def optimizer_step(  # type: ignore[override]
            self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any
        ) -> None:
            assert isinstance(optimizer, SGD)
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (self.trainer.global_step + 1)
            optimizer.step(closure=optimizer_closure)

    def step(net: nn.Module, optimizer: Optimizer, batch: Tensor, index: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.01 * (index + 1)
        raw_step(net, optimizer, batch, index)

    model = Warms()
    quiet().fit(model, loader())
    assert torch.equal(weights(model), raw(step))


def test_optimizer_step_may_step_every_other_time_and_each_call_counts() -> None:
    class Every(Line):
        def optimizer_step(  # type: ignore[override]
            self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any
        ) -> None:
            if batch_idx % 2 == 0:
                optimizer.step(closure=optimizer_closure)
            else:
                optimizer_closure()

    def step(net: nn.Module, optimizer: Optimizer, batch: Tensor, index: int) -> None:
        if index % 2 == 0:
            raw_step(net, optimizer, batch, index)

    model, trainer = Every(), quiet()
    trainer.fit(model, loader())
    assert torch.equal(weights(model), raw(step))
    assert trainer.global_step == 6


def test_optimizer_step_may_take_several_steps_of_a_batch() -> None:
    class Repeats(Line):
        steps = 0

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            self.steps += 1
            return super().training_step(batch, batch_idx)

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            for _ in range(3):
                super().optimizer_step(*args, **kwargs)

    def step(net: nn.Module, optimizer: Optimizer, batch: Tensor, index: int) -> None:
        for _ in range(3):
            raw_step(net, optimizer, batch, index)

    model, trainer = Repeats(), quiet()
    trainer.fit(model, loader())
    assert torch.equal(weights(model), raw(step))
    assert (trainer.global_step, model.steps) == (6, 18)
    with pytest.raises(UserCodeError, match="optimizer_step computes the loss again, and 2 batch"):
        quiet(accumulate_grad_batches=2).fit(Repeats(), loader())


def test_a_closure_that_is_not_called_or_called_late_is_an_error() -> None:
    class Forgets(Line):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            args[2].step()

    with pytest.raises(UserCodeError, match=r"Forgets\.optimizer_step did not call its closure"):
        quiet().fit(Forgets(), loader())

    class Late(Line):
        kept: Any = None

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            if self.kept is not None:
                self.kept = None
            super().optimizer_step(*args, **kwargs)
            self.kept = args[3]

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.kept()

    with pytest.raises(UserCodeError, match="was called after the step that it belongs to"):
        quiet().fit(Late(), loader())


@pytest.mark.filterwarnings("ignore:.*training_step returned None for the first batch")
def test_a_batch_without_a_loss_steps_nothing() -> None:
    class Skips(Line):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) if batch_idx % 2 else None

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)

    def step(net: nn.Module, optimizer: Optimizer, batch: Tensor, index: int) -> None:
        if index % 2:
            raw_step(net, optimizer, batch, index)

    model, trainer = Skips(), quiet()
    trainer.fit(model, loader())
    assert torch.equal(weights(model), raw(step))
    assert trainer.global_step == 3


def test_a_run_with_own_steps_goes_on_exactly_from_the_middle_of_an_epoch(tmp_path: Path) -> None:
    class Own(Line):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)

    class Saves(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    whole, again = Own(), Own()
    quiet(callbacks=Saves()).fit(whole, loader())
    quiet().fit(again, loader(), ckpt_path=tmp_path / "middle.ckpt")
    assert torch.equal(weights(whole), weights(again))


# ---------------------------------------------------------------- gradients


def test_gradients_may_be_left_to_grow_by_optimizer_zero_grad() -> None:
    class Keeps(Line):
        def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
            if batch_idx % 3 == 0:
                optimizer.zero_grad(set_to_none=False)

    def step(net: nn.Module, optimizer: Optimizer, batch: Tensor, index: int) -> None:
        if index % 3 == 0:
            optimizer.zero_grad()
        loss_of(net, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    model = Keeps()
    quiet().fit(model, loader())
    assert torch.equal(weights(model), raw(step))


def test_a_module_runs_backward_itself_in_automatic_and_manual_optimization() -> None:
    class Twice(Line):
        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
            loss.backward()  # type: ignore[no-untyped-call]

    class Manual(Twice):
        automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    def step(net: nn.Module, optimizer: Optimizer, batch: Tensor, index: int) -> None:
        optimizer.zero_grad()
        (2 * loss_of(net, batch)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    for model in (Twice(), Manual()):
        trainer = quiet()
        trainer.fit(model, loader())
        assert torch.allclose(weights(model), raw(step), rtol=0, atol=1e-6)
        assert trainer.global_step == 6


def test_a_module_clips_its_gradients_itself() -> None:
    given = []

    class Clips(Line):
        def configure_gradient_clipping(
            self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
        ) -> None:
            given.append((gradient_clip_val, gradient_clip_algorithm))
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="value")

    class Manual(Line):
        automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            self.clip_gradients(optimizer, 0.05, "value")
            self.clip_gradients(optimizer)  # by no value: nothing happens
            optimizer.step()

    def step(net: nn.Module, optimizer: Optimizer, batch: Tensor, index: int) -> None:
        optimizer.zero_grad()
        loss_of(net, batch).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_value_(net.parameters(), 0.05)
        optimizer.step()

    for model in (Clips(), Manual()):
        quiet().fit(model, loader())
        assert torch.equal(weights(model), raw(step))
    quiet(gradient_clip_val=0.05, gradient_clip_algorithm="value").fit(Clips(), loader())
    assert given[0] == (None, None)
    assert given[-1] == (0.05, "value")
    with pytest.raises(UserCodeError) as raised:
        quiet(gradient_clip_val=1.0).fit(Clips(), loader())
    assert str(raised.value) == (
        "self.clip_gradients(gradient_clip_val=0.05) and Trainer(gradient_clip_val=1.0) differ: "
        "pass it to one of them only"
    )


def test_toggling_leaves_gradients_to_one_optimizer() -> None:
    class Two(Line):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.net[0].bias.requires_grad_(False)

        def required(self) -> list[bool]:
            return [parameter.requires_grad for parameter in self.net.parameters()]

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            first, second = self.optimizers()
            with self.toggled_optimizer(first):
                assert self.required() == [True, False, False, False]
            assert self.required() == [True, False, True, True]
            self.toggle_optimizer(first)
            self.toggle_optimizer(second)
            assert self.required() == [False, False, True, True]
            self.manual_backward(super().training_step(batch, batch_idx))
            assert self.net[0].weight.grad is None
            self.untoggle_optimizer(second)
            assert self.required() == [True, False, True, True]
            second.step()

        def configure_optimizers(self) -> Any:
            return [SGD(self.net[0].parameters(), lr=0.1), SGD(self.net[2].parameters(), lr=0.1)]

    trainer = quiet()
    trainer.fit(Two(), loader())
    assert trainer.global_step == 6


# ---------------------------------------------------------------- closures


class Searches(Line):
    def configure_optimizers(self) -> Any:
        return LBFGS(self.parameters(), max_iter=5, line_search_fn="strong_wolfe")


def test_lbfgs_has_the_numbers_of_a_loop_with_a_closure() -> None:
    losses = []

    def step(net: nn.Module, optimizer: Optimizer, batch: Tensor, index: int) -> None:
        def closure() -> Any:
            optimizer.zero_grad()
            loss = loss_of(net, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(net.parameters(), 5.0)
            return loss

        losses.append(loss_of(net, batch).item())
        optimizer.step(closure)

    expected = raw(
        step,
        lambda parameters: LBFGS(parameters, max_iter=5, line_search_fn="strong_wolfe"),
    )
    model, trainer = Searches(), quiet(gradient_clip_val=5.0)
    trainer.fit(model, loader())
    assert torch.equal(weights(model), expected)
    assert trainer.global_step == 6
    # Of each batch the loss before its step, however often the closure was called.
    assert trainer.callback_metrics["loss_epoch"].item() == pytest.approx(sum(losses) / 6)


def test_lbfgs_is_refused_where_the_loss_cannot_be_computed_again() -> None:
    text = "accumulate_grad_batches has several batches in a step"
    with pytest.raises(ConfigurationError, match=f"LBFGS computes the loss several .*{text}"):
        quiet(accumulate_grad_batches=2).fit(Searches(), loader())


def test_an_optimizer_of_ones_own_is_handed_the_closure() -> None:
    class Sharpness(SGD):
        """Steps by the gradient at a point nearby; its signature does not say that it needs one."""

        def step(self, closure: Any = None) -> Any:
            assert closure is not None
            loss = closure()
            parameters = self.param_groups[0]["params"]
            before = [p.detach().clone() for p in parameters]
            with torch.no_grad():
                for p in parameters:
                    p.add_(p.grad, alpha=0.01)
            closure()
            with torch.no_grad():
                for p, old in zip(parameters, before, strict=True):
                    p.copy_(old)
            super().step()
            return loss

    class Hands(Line):
        def configure_optimizers(self) -> Any:
            return Sharpness(self.parameters(), lr=0.1)

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)

    def step(net: nn.Module, optimizer: Any, batch: Tensor, index: int) -> None:
        def closure() -> Any:
            optimizer.zero_grad()
            loss = loss_of(net, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)

    model = Hands()
    quiet().fit(model, loader())
    assert torch.equal(weights(model), raw(step, lambda parameters: Sharpness(parameters, lr=0.1)))


@pytest.mark.parametrize(("strategy", "kinds"), [("ddp", ("own", "searches")), ("fsdp", ("own",))])
def test_several_ranks_have_the_numbers_of_one_process(
    strategy: str, kinds: tuple[str, ...], run_script: RunScript, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    of_one = runpy.run_path(str(SCRIPT))["trained"]
    of_two = json.loads(run_script(SCRIPT.read_text(), strategy, "2", *kinds, timeout=300).stdout)
    for kind, weights_of_two in zip(kinds, of_two, strict=True):
        assert weights_of_two == pytest.approx(of_one("single_device", 1, kind), abs=1e-9)


# ---------------------------------------------------------------- schedulers


def test_a_module_steps_its_schedulers_itself() -> None:
    given: list[float] = []

    class ByEpoch:
        """A scheduler that wants to know the epoch, as timm's do."""

        def step(self, epoch: int) -> None:
            given.append(epoch)

        def state_dict(self) -> dict[str, Any]:
            return {}

    class Steps(Line):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            plateau = ReduceLROnPlateau(optimizer)
            return [optimizer], [ByEpoch(), {"scheduler": plateau, "monitor": "loss_epoch"}]

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            if metric is None:
                scheduler.step(epoch=self.current_epoch)
            else:
                given.append(float(metric))

    trainer = quiet(max_epochs=2)
    trainer.fit(Steps(), loader())
    assert given[::2] == [0, 1]
    assert given[3] == trainer.callback_metrics["loss_epoch"].item()


# ---------------------------------------------------------------- where not


@pytest.mark.parametrize(
    "hook", ["optimizer_step", "optimizer_zero_grad", "backward", "configure_gradient_clipping"]
)
def test_a_hook_that_could_not_be_called_is_refused_before_training(
    hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Whole(SingleDeviceStrategy):
        def train_step(self, prepared: Any, step: Any, micro_batches: Any) -> None:
            raise AssertionError("nothing is trained")

    def override(self: Any, *args: Any, **kwargs: Any) -> None: ...

    model = type("Own", (Line,), {hook: override})()
    with pytest.raises(ConfigurationError) as raised:
        quiet(strategy=Whole()).fit(model, loader())
    assert str(raised.value) == (
        f"Own overrides {hook}, and the strategy 'Whole' takes each step as a whole, so that it "
        "would not be called: leave out one of the two"
    )


def test_a_strategy_that_forgets_a_modules_backward_is_named() -> None:
    class Forgets(SingleDeviceStrategy):
        def backward(self, prepared: Any, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            loss.backward()  # type: ignore[no-untyped-call]

    class Own(Line):
        def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
            raise AssertionError("never called")

    with pytest.raises(
        PluginError, match=r"Forgets\.backward has run without a call of Own\.backward"
    ):
        quiet(strategy=Forgets()).fit(Own(), loader())


def test_hooks_of_automatic_optimization_are_named_in_manual_optimization() -> None:
    class Manual(Line):
        automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> Any: ...

        def optimizer_step(self, *args: Any, **kwargs: Any) -> None: ...

    with pytest.warns(UserWarning, match="Manual overrides optimizer_step, which nobody calls"):
        quiet().fit(Manual(), loader())


# ---------------------------------------------------------------- the end of an epoch


@pytest.mark.parametrize("accumulate", [1, 2])
def test_minus_one_from_on_train_batch_start_ends_the_epoch(accumulate: int) -> None:
    called: list[str] = []

    class Ends(Line):
        def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> int | None:
            return -1 if batch_idx == 3 else None

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            called.append(f"{self.current_epoch}.{batch_idx}")
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            called.append("validation")

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            called.append("end")

        def on_train_epoch_end(self) -> None:
            called.append("end of epoch")

    trainer = quiet(max_epochs=2, accumulate_grad_batches=accumulate, num_sanity_val_steps=0)
    model = Ends()
    trainer.fit(model, loader(), loader())
    of_epoch = [["0.0", "end", "0.1", "end", "0.2", "end", "end of epoch"]]
    of_epoch.append([name.replace("0.", "1.", 1) for name in of_epoch[0]])
    assert called == of_epoch[0] + of_epoch[1]
    assert trainer.global_step == (6 if accumulate == 1 else 2)
    assert trainer.current_epoch == 2
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not trainer.is_within_step
