"""Lite: a loop keeps its numbers, its models stay models and its optimizers optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fixtures import RunScript
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, TensorDataset

from stratagem import DataModule, Lite, Module, Trainer, seed_everything
from stratagem.discovery import Capabilities
from stratagem.environments import ClusterEnvironment
from stratagem.errors import CheckpointMismatchError, ConfigurationError
from stratagem.launch.process import print_hint_once
from stratagem.lite.module import LiteModule
from stratagem.loggers import CSVLogger
from stratagem.precision import TruePrecision
from stratagem.strategies import PreparedModel, SingleDeviceStrategy, StepModule


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).to(
            dtype
        )


def loader(samples: int = 24) -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 5, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True).sin()), batch_size=4)


def lite_on_cpu(**arguments: Any) -> Lite:
    lite = Lite(**{"accelerator": "cpu", "devices": 1, **arguments})
    lite.launch()
    return lite


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def assert_same_weights(model: nn.Module, expected: nn.Module) -> None:
    state = expected.state_dict()
    assert list(model.state_dict()) == list(state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name


# ---------------------------------------------------------------- the loop


@pytest.mark.parametrize(
    ("precision", "dtype", "autocast"),
    [
        ("32-true", torch.float32, False),
        ("64-true", torch.float64, False),
        ("bf16-true", torch.bfloat16, False),
        ("bf16-mixed", torch.float32, True),
    ],
)
def test_a_loop_ends_with_the_weights_of_the_raw_one(
    precision: str, dtype: torch.dtype, autocast: bool
) -> None:
    lite = lite_on_cpu(precision=precision)
    net = network()
    model, optimizer = lite.setup(net, sgd(net))
    data = lite.setup_dataloaders(loader())
    for _ in range(2):
        for inputs, targets in data:
            optimizer.zero_grad()
            output = model(inputs)
            assert output.dtype is torch.get_default_dtype()
            loss = mse_loss(output, targets)
            lite.backward(loss)
            optimizer.step()

    raw = network(dtype)
    raw_optimizer = sgd(raw)
    for _ in range(2):
        for inputs, targets in loader():
            raw_optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                output = raw(inputs.to(dtype))
            mse_loss(output.float(), targets).backward()  # type: ignore[no-untyped-call]
            raw_optimizer.step()
    assert_same_weights(net, raw)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_a_model_within_autocast_leaves_no_setting(precision: str) -> None:
    lite = lite_on_cpu(precision=precision)
    model = lite.setup(network())
    inputs, _ = next(iter(loader()))
    with lite.autocast():
        model(inputs)
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_default_dtype() is torch.float32


def test_accumulation_and_clipping_by_hand_equal_the_raw_ones() -> None:
    for clip in ({"max_norm": 0.3}, {"clip_val": 0.01}):
        lite = lite_on_cpu()
        net, raw = network(), network()
        model, optimizer = lite.setup(net, sgd(net))
        raw_optimizer = sgd(raw)
        for index, (inputs, targets) in enumerate(loader()):
            accumulating = index % 2 == 0
            with lite.no_backward_sync(model, enabled=accumulating):
                lite.backward(mse_loss(model(inputs), targets) / 2)
            (mse_loss(raw(inputs), targets) / 2).backward()  # type: ignore[no-untyped-call]
            if accumulating:
                continue
            norm = lite.clip_gradients(model, optimizer, **clip)  # type: ignore[arg-type]
            if "max_norm" in clip:
                wanted = nn.utils.clip_grad_norm_(raw.parameters(), 0.3)
                assert norm == wanted
                assert wanted > 0.3, "nothing was clipped, so nothing was tested"
            else:
                nn.utils.clip_grad_value_(raw.parameters(), 0.01)
                assert norm is None
            optimizer.step()
            optimizer.zero_grad()
            raw_optimizer.step()
            raw_optimizer.zero_grad()
        assert_same_weights(net, raw)


def test_clipping_may_take_another_norm_and_refuse_one_that_is_not_finite() -> None:
    lite = lite_on_cpu()
    net = network()
    model, optimizer = lite.setup(net, sgd(net))
    lite.backward(model(torch.randn(4, 5)).sum())
    norm = lite.clip_gradients(model, optimizer, max_norm=1e-3, norm_type=float("inf"))
    assert norm is not None
    largest = max(float(p.grad.abs().max()) for p in net.parameters() if p.grad is not None)
    assert largest == pytest.approx(1e-3, rel=1e-2)
    net[0].weight.grad.fill_(float("nan"))  # type: ignore[union-attr, operator]
    with pytest.raises(RuntimeError, match="non-finite"):
        lite.clip_gradients(model, optimizer, max_norm=1.0)
    lite.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)


def test_several_models_and_optimizers_train_side_by_side() -> None:
    lite = lite_on_cpu()
    one, two = network(), network()
    first, by_adam, by_sgd = lite.setup(
        one, Adam(one[:2].parameters(), lr=0.01), SGD(one[2:].parameters(), lr=0.1)
    )
    second, other = lite.setup(two, sgd(two))

    raw_one, raw_two = network(), network()
    raw = [
        Adam(raw_one[:2].parameters(), lr=0.01),
        SGD(raw_one[2:].parameters(), lr=0.1),
        sgd(raw_two),
    ]
    for inputs, targets in loader():
        for optimizer in (by_adam, by_sgd, other):
            optimizer.zero_grad()
        lite.backward(mse_loss(first(inputs), targets), model=first)
        lite.backward(mse_loss(second(inputs), targets))
        for optimizer in (by_adam, by_sgd, other):
            optimizer.step()
        for raw_optimizer in raw:
            raw_optimizer.zero_grad()
        mse_loss(raw_one(inputs), targets).backward()  # type: ignore[no-untyped-call]
        mse_loss(raw_two(inputs), targets).backward()  # type: ignore[no-untyped-call]
        for raw_optimizer in raw:
            raw_optimizer.step()
    assert_same_weights(one, raw_one)
    assert_same_weights(two, raw_two)


def test_backward_with_several_models_needs_a_model() -> None:
    reduced = []

    class Reduces(SingleDeviceStrategy):
        def backward(self, prepared: Any, loss: Any, *args: Any, **kwargs: Any) -> None:
            super().backward(prepared, loss, *args, **kwargs)
            reduced.append(prepared.original)

    lite = lite_on_cpu(strategy=Reduces())
    first = lite.setup(network())
    lite.backward(first(torch.randn(4, 5)).sum())
    second = lite.setup(network())
    lite.backward(first(torch.randn(4, 5)).sum(), model=first)
    assert reduced == [first.prepared.original] * 2
    with pytest.raises(
        ConfigurationError, match=r"with 2 models: the strategy .* Name it: lite.ba"
    ):
        lite.backward(second(torch.randn(4, 5)).sum())


def test_a_model_may_be_set_up_before_its_optimizer_is_made() -> None:
    lite = lite_on_cpu(precision="64-true")
    model = lite.setup(network())
    optimizer = lite.setup_optimizers(Adam(model.parameters(), lr=0.01))
    both = lite.setup_optimizers(sgd(model), sgd(model))
    assert isinstance(both, tuple)
    before = [p.clone() for p in model.parameters()]
    lite.backward(model(torch.randn(4, 5)).sum())
    optimizer.step()
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert parameter.dtype is torch.float64
        assert not torch.equal(parameter, old)


def test_backward_takes_the_arguments_of_tensor_backward() -> None:
    lite = lite_on_cpu()
    model = lite.setup(network())
    output = model(torch.randn(4, 5))
    lite.backward(output, torch.ones_like(output), retain_graph=True)
    once = model.module[0].weight.grad.clone()
    lite.backward(output, gradient=torch.ones_like(output))
    torch.testing.assert_close(model.module[0].weight.grad, 2 * once)


def test_autocast_covers_code_outside_of_a_model() -> None:
    weights = torch.randn(4, 4)
    with lite_on_cpu(precision="bf16-mixed").autocast():
        assert (weights @ weights).dtype is torch.bfloat16
    with lite_on_cpu().autocast():
        assert (weights @ weights).dtype is torch.float32
    with lite_on_cpu(precision="64-true").autocast():
        assert torch.ones(1).dtype is torch.float64


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("64-true", torch.float64), ("bf16-true", torch.bfloat16), ("32-true", torch.float32)],
)
def test_models_and_tensors_can_be_made_in_their_final_format(
    precision: str, dtype: torch.dtype
) -> None:
    lite = lite_on_cpu(precision=precision)
    with lite.init_module():
        model = nn.Linear(3, 2)
    with lite.device, lite.strategy.precision.init_context():
        tensor = torch.zeros(3)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert tensor.dtype is dtype
    assert tensor.device == model.weight.device == lite.device
    state = torch.get_rng_state()
    with lite.init_module(empty_init=True):
        assert nn.Linear(3, 2).weight.dtype is dtype
    assert torch.equal(torch.get_rng_state(), state)


# ---------------------------------------------------------------- run and launch


def test_run_launches_once_takes_arguments_and_returns() -> None:
    class Fit(Lite):
        def run(self, steps: int, *, rate: float) -> tuple[int, float, int]:
            return self.inner(steps), rate, self.world_size

        def inner(self, steps: int) -> int:
            return steps + 1

    class More(Fit):
        def run(self, steps: int, *, rate: float) -> Any:
            return ("more", super().run(steps, rate=rate))

    assert Fit(accelerator="cpu").run(2, rate=0.5) == (3, 0.5, 1)
    assert More(accelerator="cpu").run(2, rate=0.5) == ("more", (3, 0.5, 1))


def test_launch_calls_a_function_with_the_lite_object() -> None:
    lite = Lite(accelerator="cpu")
    assert lite.launch(lambda given, a, b: (given is lite, a + b), 1, b=2) == (True, 3)
    assert lite.launch() is None
    assert (lite.global_rank, lite.local_rank, lite.node_rank, lite.world_size) == (0, 0, 0, 1)
    assert lite.is_global_zero
    assert lite.device == torch.device("cpu")


@pytest.mark.parametrize("devices", [None, 0, 1, "1", "auto"])
def test_devices_may_be_given_in_the_documented_ways(devices: Any) -> None:
    assert Lite(accelerator="cpu", devices=devices).world_size == 1


def test_collectives_on_one_device_return_their_input() -> None:
    lite = lite_on_cpu()
    tensor = torch.arange(3.0)
    assert torch.equal(lite.all_gather(tensor), tensor.unsqueeze(0))
    assert torch.equal(lite.all_gather({"a": [tensor]})["a"][0], tensor.unsqueeze(0))
    assert lite.all_gather(2.0).tolist() == [2.0]
    for op in ("mean", "sum", "max", "min"):
        assert torch.equal(lite.all_reduce(tensor, op), tensor)
    assert lite.all_reduce(3) == 3
    assert lite.broadcast({"a": 1}) == {"a": 1}
    lite.barrier("here")
    with lite.ranks.rank_zero_first(), lite.ranks.rank_zero_first(local=True):
        pass


def test_print_log_and_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told: list[Any] = []

    class Hears:
        def on_epoch(self, number: int, *, last: bool) -> None:
            told.append((number, last))

    class Deaf:
        pass

    logger = CSVLogger(tmp_path)
    lite = lite_on_cpu(callbacks=[Hears(), Deaf()], loggers=logger)
    lite.print("seen", end="!")
    assert capsys.readouterr().out == "seen!"
    lite.call("on_epoch", 3, last=True)
    lite.call("on_nothing")
    assert told == [(3, True)]
    lite.log_dict({"loss": torch.tensor(0.5)}, step=1)
    lite.log_dict({"loss": 0.25, "acc": np.float32(0.75)}, step=2)
    with pytest.raises(ConfigurationError, match=r"'loss': expected a number.*shape \(2,\)"):
        lite.log_dict({"loss": torch.ones(2)})
    with pytest.raises(ConfigurationError, match=r"'loss': expected a number.*received 'low'"):
        lite.log_dict({"loss": "low"})
    logger.save()
    lines = (Path(logger.log_dir) / "metrics.csv").read_text().split()
    assert lines == ["step,loss,acc", "1,0.5,", "2,0.25,0.75"]


def test_logging_without_a_logger_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    print_hint_once.cache_clear()
    lite = lite_on_cpu()
    lite.log("loss", 0.5, 1)
    lite.log_dict({"loss": 0.25}, 2)
    assert capsys.readouterr().err == (
        "stratagem: Lite has no logger, so that log and log_dict write nothing: pass one, as in "
        "Lite(loggers='csv')\n"
    )


UNDIVIDED = """
import sys
import torch
from torch.utils.data import DataLoader
from stratagem import Lite

for sets_up in (True, False):
    lite = Lite(accelerator="cpu", devices=2)
    lite.launch()
    model = torch.nn.Linear(1, 1)
    model, optimizer = lite.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = DataLoader(torch.ones(4, 1))
    if sets_up:
        loader = lite.setup_dataloaders(loader, use_distributed_sampler=False)
    for batch in loader:
        lite.backward(model(batch).sum())
        optimizer.step()
    lite.print(f"{sets_up=}", file=sys.stderr, flush=True)
"""


def test_a_loader_that_is_not_set_up_on_two_ranks_is_named_once(run_script: RunScript) -> None:
    done = run_script(UNDIVIDED)
    lines = [line for line in done.stderr.splitlines() if line.startswith(("sets_up", "stratagem"))]
    assert lines == [
        "sets_up=True",
        "stratagem: several ranks train, and no loader of lite.setup_dataloaders() has yielded a "
        "batch: a loader that is not set up gives each rank the same samples. Pass it to "
        "setup_dataloaders(), with use_distributed_sampler=False if your own sampler divides the "
        "data",
        "sets_up=False",
    ]


def test_seed_everything_seeds_python_numpy_and_torch() -> None:
    import random

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    assert Lite.seed_everything(7) == 7
    first = draw()
    assert draw() != first
    assert seed_everything(7) == 7
    assert draw() == first
    assert seed_everything() == 7, "the seed that was set before"


def test_workers_of_loaders_draw_numbers_of_their_own() -> None:
    lite = lite_on_cpu()
    lite.seed_everything(3, workers=True)
    data = lite.setup_dataloaders(DataLoader(Draws(), batch_size=1, num_workers=2))
    drawn = [tuple(batch.tolist()) for batch in data]
    assert len(set(drawn)) == 4


class Draws(Dataset[Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(())


# ---------------------------------------------------------------- what setup returns


def test_a_model_that_was_set_up_is_the_users_model_to_look_at() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()
            self.note = "kept"
            self.register_buffer("counter", torch.zeros(1))

        def forward(self, inputs: Tensor, scale: float = 1.0) -> Tensor:
            return self.net(inputs) * scale  # type: ignore[no-any-return]

        def training_step(self, inputs: Tensor) -> Tensor:
            return self(inputs, scale=2.0).sum()  # type: ignore[no-any-return]

        def embed(self, inputs: Tensor) -> Tensor:
            return self.net[0](inputs)  # type: ignore[no-any-return]

    own = Own()
    lite = lite_on_cpu(precision="bf16-mixed")
    model = lite.setup(own)
    assert isinstance(model, LiteModule)
    assert isinstance(model, nn.Module)
    assert model.module is own
    assert model.note == "kept"
    model.note = "changed"
    assert own.note == "changed"
    for listing in ("named_parameters", "named_buffers", "named_modules", "named_children"):
        mine, theirs = dict(getattr(model, listing)()), dict(getattr(own, listing)())
        assert list(mine) == list(theirs), listing
        assert all(mine[name] is theirs[name] for name in mine), listing
    assert len(list(model.parameters())) == len(list(own.parameters()))
    assert len(list(model.buffers())) == len(list(own.buffers())) > 0
    assert len(list(model.modules())) == len(list(own.modules()))
    assert list(model.state_dict()) == list(own.state_dict())

    seen: list[type] = []
    model.apply(lambda part: seen.append(type(part)))
    assert seen[-1] is Own
    model.eval()
    assert not any(part.training for part in own.modules())
    assert not model.training
    model.train()
    assert all(part.training for part in own.modules())
    model.requires_grad_(False)
    assert not any(p.requires_grad for p in own.parameters())
    model.requires_grad_(True)
    model.register_buffer("late", torch.ones(1))
    assert "late" in own.state_dict()

    inputs = torch.randn(4, 5)
    torch.testing.assert_close(model(inputs, scale=2.0), 2 * model(inputs))
    # Steps go through the strategy and its precision; other methods do after being marked.
    assert model.training_step(inputs).dtype is torch.float32
    assert model.embed(inputs).dtype is torch.float32
    model.mark_forward_method("embed")
    with torch.autocast("cpu", torch.bfloat16):
        expected = own.embed(inputs)
    assert torch.equal(model.embed(inputs), expected.float())
    with pytest.raises(AttributeError, match="nothing_there"):
        _ = model.nothing_there
    with pytest.raises(AttributeError, match="validation_step"):
        model.validation_step(inputs)


def test_optimizer_after_setup_keeps_its_class() -> None:
    lite = lite_on_cpu()
    net = network()
    optimizer = Adam(net.parameters(), lr=0.1)
    before = StepLR(optimizer, 1, gamma=0.5)
    _, wrapped = lite.setup(net, optimizer)
    assert isinstance(wrapped, Adam)
    assert getattr(wrapped, "optimizer") is optimizer  # noqa: B009 - Adam's type lacks it
    assert wrapped.defaults == optimizer.defaults
    assert wrapped.param_groups is optimizer.param_groups
    after = StepLR(wrapped, 1, gamma=0.5)
    lite.backward(net(torch.randn(4, 5)).sum())
    wrapped.step()
    assert wrapped.state[next(net.parameters())]["step"] == 1
    before.step()
    assert wrapped.param_groups[0]["lr"] == pytest.approx(0.05)
    after.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)
    wrapped.param_groups[0]["lr"] = 0.7
    assert optimizer.param_groups[0]["lr"] == 0.7
    assert type(wrapped).__name__ == "Adam"
    assert repr(wrapped) == repr(optimizer)


def test_a_step_with_a_closure_returns_its_loss() -> None:
    lite = lite_on_cpu()
    net = network()
    model, optimizer = lite.setup(net, sgd(net))
    inputs = torch.randn(4, 5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(inputs).square().mean()
        lite.backward(loss)
        return loss

    first = optimizer.step(closure)
    assert optimizer.step(closure) < first


def test_loaders_that_were_set_up_pass_for_the_users_own() -> None:
    lite = lite_on_cpu()
    own = loader()
    data = lite.setup_dataloaders(own)
    assert len(data) == 6
    assert data.batch_size == 4
    assert data.dataset is own.dataset
    for mine, theirs in zip(data, own, strict=True):
        assert torch.equal(mine[0], theirs[0])
    several = lite.setup_dataloaders(own, [1, 2], move_to_device=False, replace_sampler=False)
    assert isinstance(several, list)
    assert list(several[1]) == [1, 2]


def test_to_device_takes_models_tensors_and_collections() -> None:
    lite = lite_on_cpu()
    batch = {"a": torch.ones(2), "b": [torch.zeros(1), "text"], "c": SimpleNamespace(x=1)}
    moved = lite.to_device(batch)
    assert torch.equal(moved["a"], batch["a"])  # type: ignore[arg-type]
    assert moved["b"][1] == "text"
    assert moved["c"] is batch["c"]
    net = network()
    assert lite.to_device(net) is net


# ---------------------------------------------------------------- saving and loading


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_state_is_saved_and_filled_back_in(tmp_path: Path) -> None:
    lite = lite_on_cpu()
    net = network()
    model, optimizer = lite.setup(net, sgd(net))
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    counter = Counter()
    for inputs, targets in loader():
        optimizer.zero_grad()
        lite.backward(mse_loss(model(inputs), targets))
        optimizer.step()
        counter.count += 1
    scheduler.step()
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "counter": counter,
        "epoch": 3,
    }
    lite.save(tmp_path / "a.ckpt", state)
    lite.save(state, str(tmp_path / "b.ckpt"))  # document 004 gives the state first

    for name in ("a.ckpt", "b.ckpt"):
        other = lite_on_cpu()
        fresh = network()
        nn.init.zeros_(fresh[0].weight)  # type: ignore[arg-type]
        new_model, new_optimizer = other.setup(fresh, sgd(fresh))
        target: dict[str, Any] = {
            "model": new_model,
            "optimizer": new_optimizer,
            "scheduler": StepLR(new_optimizer, 1, gamma=0.5),
            "counter": Counter(),
            "epoch": 0,
        }
        assert other.load(tmp_path / name, target) == {}
        assert_same_weights(fresh, net)
        assert target["epoch"] == 3
        assert target["counter"].count == 6
        assert target["scheduler"].last_epoch == 1
        assert new_optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
        for parameter, original in zip(fresh.parameters(), net.parameters(), strict=True):
            assert torch.equal(
                new_optimizer.state[parameter]["momentum_buffer"],
                optimizer.state[original]["momentum_buffer"],
            )
        partly = {"epoch": 0}
        rest = other.load(tmp_path / name, partly)
        assert partly == {"epoch": 3}
        assert sorted(rest) == ["counter", "model", "optimizer", "scheduler"]


def test_load_without_state_returns_everything(tmp_path: Path) -> None:
    lite = lite_on_cpu()
    net = network()
    model = lite.setup(net)
    lite.save(model.state_dict(), tmp_path / "weights.ckpt")
    loaded = lite.load(tmp_path / "weights.ckpt")
    assert list(loaded) == list(net.state_dict())
    model.load_state_dict(loaded)
    fresh = network()
    fresh.load_state_dict(loaded)
    assert_same_weights(fresh, net)


def test_an_optimizers_state_is_kept_by_parameter_name() -> None:
    lite = lite_on_cpu()
    net = network()
    model, optimizer = lite.setup(net, Adam(net.parameters(), lr=0.1))
    lite.backward(model(torch.randn(4, 5)).sum())
    optimizer.step()
    state = optimizer.state_dict()
    assert sorted(state["state"]) == sorted(name for name, _ in net.named_parameters())
    other_net = network()
    _, other = lite.setup(other_net, Adam(other_net.parameters(), lr=0.5))
    other.load_state_dict(state)
    assert other.param_groups[0]["lr"] == 0.1
    # Loading replaces the state's object; the wrapper shows the new one.
    assert other.state is other.optimizer.state
    assert torch.equal(
        other.state[other_net[0].weight]["exp_avg"], optimizer.state[net[0].weight]["exp_avg"]
    )


def test_a_checkpoint_that_does_not_fit_is_refused_unless_strict_is_false(tmp_path: Path) -> None:
    lite = lite_on_cpu()
    model = lite.setup(network())
    path = tmp_path / "a.ckpt"
    lite.save(path, {"model": model, "epoch": 1})
    with pytest.raises(CheckpointMismatchError) as caught:
        lite.load(path, {"model": model, "step": 0, "best": 0})
    assert str(caught.value) == (
        f"'{path}' lacks the entries step, best; it has model, epoch. Pass strict=False to leave "
        "them as they are"
    )
    smaller = lite.setup(nn.Sequential(nn.Linear(5, 8)))
    with pytest.raises(CheckpointMismatchError, match="which the model lacks"):
        lite.load(path, {"model": smaller})
    state: dict[str, Any] = {"model": smaller, "step": 7}
    lite.load(path, state, strict=False)
    assert state["step"] == 7
    assert torch.equal(smaller.module[0].weight, model.module[0].weight)


# ---------------------------------------------------------------- document 004


class MyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()  # type: ignore[no-any-return]


class MyDataset(Dataset[Tensor]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((32,), index / 16)


def test_the_documents_first_conversion_runs_with_changed_imports() -> None:
    losses: list[float] = []

    class L(Lite):
        def run(self, args: Any) -> None:
            model = MyModel()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            model, optimizer = self.setup(model, optimizer)  # Scale your model / optimizers

            dataloader = DataLoader(MyDataset(), batch_size=4)
            dataloader = self.setup_dataloaders(dataloader)  # Scale your dataloaders

            model.train()
            for _ in range(args.num_epochs):
                for batch in dataloader:
                    optimizer.zero_grad()
                    loss = model(batch)
                    self.backward(loss)  # instead of loss.backward()
                    optimizer.step()
                    losses.append(float(loss.detach()))

    L(accelerator="cpu").run(SimpleNamespace(num_epochs=3))
    assert losses[-1] < losses[3]
    L(devices="auto", accelerator="auto", precision="bf16").run(SimpleNamespace(num_epochs=1))
    assert len(losses) == 16


def test_the_documents_stepping_stone_runs_with_changed_imports() -> None:
    class L(Lite):
        # 1. This would becomes the LightningModule `__init__` function.
        def run(self, args: Any) -> Any:
            self.args = args
            self.model = MyModel()
            self.fit()  # This would be automated by Lightning Trainer.
            return self.model

        # 2. This can be fully removed as Lightning handles the FitLoop
        def fit(self) -> None:
            # setting everything
            optimizer = self.configure_optimizers()
            self.model, optimizer = self.setup(self.model, optimizer)
            dataloader = self.setup_dataloaders(self.train_dataloader())

            # start fitting
            self.model.train()
            for _ in range(2):
                for batch_idx, batch in enumerate(dataloader):
                    optimizer.zero_grad()
                    loss = self.training_step(batch, batch_idx)
                    self.backward(loss)
                    optimizer.step()

        # 3. This stays here as it belongs to the LightningModule.
        def forward(self, x: Tensor) -> Any:
            return self.model(x)

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            return self.forward(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.model.parameters(), lr=0.001)

        # 4. [Optionally] This can stay here or be extracted within a LightningDataModule
        def train_dataloader(self) -> Any:
            return DataLoader(MyDataset(), batch_size=4)

    class LightningModel(Module):
        def __init__(self, args: Any) -> None:
            super().__init__()
            self.model = MyModel()

        def forward(self, x: Tensor) -> Any:
            return self.model(x)

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            loss = self(batch)
            self.log("train_loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.001)

    class BoringDataModule(DataModule):
        def train_dataloader(self) -> Any:
            return DataLoader(MyDataset(), batch_size=4)

    torch.manual_seed(0)
    by_lite = L(accelerator="cpu").run(None)
    torch.manual_seed(0)
    model = LightningModel(None)
    trainer = Trainer(
        max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(model, datamodule=BoringDataModule())
    assert_same_weights(by_lite.module, model.model)


def test_the_documents_methods_run_with_changed_imports(tmp_path: Path) -> None:
    class L(Lite):
        def run(self) -> None:
            self.seed_everything(1234)
            tensor = torch.ones(2)
            assert self.all_gather(tensor).shape == (1, 2)
            assert self.broadcast(7, src=0) == 7
            assert (self.world_size, self.global_rank, self.local_rank) == (1, 0, 0)
            assert self.node_rank == 0
            assert self.is_global_zero
            self.barrier()

            model = nn.Linear(32, 64)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
            model, optimizer = self.setup(model, optimizer, move_to_device=False)
            train_data, _ = self.setup_dataloaders(
                DataLoader(MyDataset()), DataLoader(MyDataset()), move_to_device=False
            )
            data = self.to_device(next(iter(train_data)))
            output = model(data)
            with self.autocast():  # optional
                loss = output.square().mean()
            self.backward(loss)
            self.print(f"{0}/{1}| Train Epoch Loss: {loss.detach()}")
            # Instead of `torch.save(...)`, call:
            self.save(model.state_dict(), tmp_path / "checkpoint.ckpt")
            # Instead of `torch.load(...)`, call:
            assert list(self.load(tmp_path / "checkpoint.ckpt")) == ["weight", "bias"]

    L(accelerator="cpu").run()


def test_the_documents_own_cluster_runs_with_changed_imports() -> None:
    class MyCluster(ClusterEnvironment):
        @property
        def main_address(self) -> str:
            return "127.0.0.1"

        @property
        def main_port(self) -> int:
            return 29501

        def world_size(self) -> int:
            return 1

    cluster = MyCluster()
    lite = Lite(plugins=[cluster], accelerator="cpu", devices=1)
    assert lite.strategy.cluster_environment is cluster


def test_lite_model_without_grad_calls_evaluation_module() -> None:
    class Counting(StepModule):
        calls = 0

        def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return self.module(method, *args, **kwargs)

    class Engine(SingleDeviceStrategy):
        def prepare(self, *args: Any, **kwargs: Any) -> PreparedModel:
            prepared = super().prepare(*args, **kwargs)
            prepared.evaluation_module = Counting(prepared.evaluation_module)
            return prepared

    module = lite_on_cpu(strategy=Engine()).setup(network())
    counting = module.prepared.evaluation_module
    module(torch.ones(2, 5))
    assert counting.calls == 0
    with torch.no_grad():
        module(torch.ones(2, 5))
    assert counting.calls == 1


# ---------------------------------------------------------------- what is refused


class Particular(SingleDeviceStrategy):
    """An engine that clips by itself and makes its optimizers after sharding."""

    capabilities = Capabilities(accepts_existing_optimizers=False, engine_clips=True)

    def clip_gradients(self, *_: Any) -> None:
        """The engine's affair."""


def refused(action: Callable[[], object]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        action()
    return str(caught.value)


def test_one_rank_needs_no_launch(tmp_path: Path) -> None:
    lite = Lite(accelerator="cpu", devices=1)
    assert lite.device == torch.device("cpu")
    model, optimizer = lite.setup(net := network(), torch.optim.SGD(net.parameters(), lr=0.1))
    lite.save(tmp_path / "saved.ckpt", {"model": model, "optimizer": optimizer})
    other = Lite(accelerator="cpu", devices=1)
    assert set(other.load(tmp_path / "saved.ckpt")) == {"model", "optimizer"}
    Lite(accelerator="cpu", devices=1).save(tmp_path / "plain.ckpt", {"step": 3})
    assert lite.all_reduce(2.0).item() == 2.0


def test_lite_before_launch_raises() -> None:
    lite = Lite(accelerator="cpu", strategy="ddp", devices=2)
    for action in (
        lambda: lite.device,
        lambda: lite.setup(network()),
        lambda: lite.setup_dataloaders(loader()),
        lambda: lite.init_module().__enter__(),
    ):
        assert refused(action) == (
            "nothing was launched yet: call lite.launch() first, or put the code into a "
            "subclass's run() and call that"
        )


def test_setup_refuses_models_twice_and_foreign_optimizers() -> None:
    lite = lite_on_cpu()
    model = lite.setup(network())
    assert refused(lambda: lite.setup(model)) == (
        "setup() received a model that was set up before; call it once for each model"
    )
    assert refused(lambda: lite.setup(network(), sgd(network()))) == (
        "setup() received a SGD that holds none of the model's parameters, so its steps would "
        "change nothing: make it from model.parameters()"
    )
    assert refused(lambda: lite.setup_optimizers(sgd(network()))) == (
        "setup_optimizers() received an optimizer without any parameter of a model that was set "
        "up: call setup(model) first, and make the optimizer from its parameters"
    )
    assert refused(lambda: lite_on_cpu().backward(torch.ones(1))) == (
        "backward() needs a model that was set up: call setup() first"
    )


def test_an_engines_own_ways_are_respected() -> None:
    lite = lite_on_cpu(strategy=Particular())
    net = network()
    assert refused(lambda: lite.setup(net, sgd(net))) == (
        "the strategy 'Particular' cannot take an optimizer that was made before the model is "
        "sharded: call setup(model), make the optimizer from its parameters, then "
        "setup_optimizers(optimizer)"
    )
    model = lite.setup(net)
    optimizer = lite.setup_optimizers(sgd(model))
    assert refused(lambda: lite.clip_gradients(model, optimizer, max_norm=1.0)) == (
        "the strategy 'Particular' clips gradients itself: configure it there in place of calling "
        "clip_gradients()"
    )


def test_arguments_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    lite = lite_on_cpu()
    net = network()
    model, optimizer = lite.setup(net, sgd(net))
    for arguments in ({}, {"clip_val": 1.0, "max_norm": 1.0}):
        assert refused(lambda a=arguments: lite.clip_gradients(model, optimizer, **a)) == (  # type: ignore[misc]
            f"expected either clip_val or max_norm, received clip_val={arguments.get('clip_val')} "
            f"and max_norm={arguments.get('max_norm')}"
        )
    assert refused(lambda: lite.save(tmp_path / "x", [1, 2])) == (
        f"save() expects a path and a dict of state, received {type(tmp_path).__name__} and list"
    )
    assert refused(lambda: lite.save({"a": 1})) == (
        "save() expects a path and a dict of state, received dict and NoneType"
    )
    assert refused(lambda: lite.load(tmp_path / "x", model)) == (
        "load() expects a path and a dict of state, received a LiteModule: "
        'lite.load(path, {"model": model})'
    )
    assert refused(lambda: lite.backward(1.0)) == (  # type: ignore[arg-type]
        "backward() expects the loss as a tensor, received a float"
    )
    assert refused(lambda: lite.setup_optimizers(optimizer)) == (
        "setup() received an optimizer that was set up before: pass the optimizer itself"
    )
    named = lite_on_cpu(callbacks=SimpleNamespace(on_epoch=3))
    assert refused(lambda: named.call("on_epoch")) == (
        "call('on_epoch'): SimpleNamespace.on_epoch is a int; expected a method"
    )


def test_plugins_and_shorthands_are_given_once_and_are_plugins() -> None:
    no_plugins: Any = [3]
    assert refused(lambda: Lite(accelerator="cpu", plugins=no_plugins)) == (
        "plugins has 3; expected a CheckpointIO, a ClusterEnvironment, a Launcher or a Precision, "
        "or the name of one (`stratagem doctor` lists them)"
    )
    assert refused(lambda: Lite(accelerator="cpu", plugins="nothing_like_it")) == (
        "plugins has 'nothing_like_it'; expected a CheckpointIO, a ClusterEnvironment, a "
        "Launcher or a Precision, or the name of one (`stratagem doctor` lists them)"
    )
    qualified = Lite(accelerator="cpu", plugins="stratagem-backend-torch:directory")
    assert qualified.plan.checkpoint_io.name == "directory"
    twice = TruePrecision("64-true")
    assert refused(
        lambda: Lite(accelerator="cpu", precision="bf16-mixed", plugins=twice)
    ).startswith("precision was given twice: 'bf16-mixed' and <")
    named = Lite(accelerator="cpu", plugins=["TorchElastic", "single_file", "64"])
    assert named.plan.precision.name == "64-true"


def test_set_epoch_of_the_user_is_kept() -> None:
    lite = lite_on_cpu()
    data = list(range(8))
    sampler: Any = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0)  # type: ignore[arg-type]
    loader = lite.setup_dataloaders(DataLoader(data, batch_size=8, sampler=sampler))  # type: ignore[arg-type]

    def order(epoch: int) -> list[int]:
        sampler.set_epoch(epoch)
        return list(sampler)

    sampler.set_epoch(0)
    assert next(iter(loader)).tolist() == order(0)
    sampler.set_epoch(0)
    assert next(iter(loader)).tolist() == order(1)
    sampler.set_epoch(5)
    assert next(iter(loader)).tolist() == order(5)


def test_an_optimizer_that_needs_a_closure_steps_as_in_a_raw_loop() -> None:
    def run(model: nn.Module, optimizer: Any) -> list[Tensor]:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = (model(torch.ones(2, 3)) - 1).square().sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        for _ in range(3):
            optimizer.step(closure)
        return [p.detach().clone() for p in model.parameters()]

    torch.manual_seed(1)
    raw = nn.Linear(3, 1)
    ours = copy.deepcopy(raw)
    expected = run(raw, torch.optim.LBFGS(raw.parameters(), max_iter=4))
    model, optimizer = lite_on_cpu().setup(ours, torch.optim.LBFGS(ours.parameters(), max_iter=4))
    for own, other in zip(run(model, optimizer), expected, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=0)


class EvaluatesElsewhere(SingleDeviceStrategy):
    """Has something else called where no gradient is wanted."""

    def prepare(self, module: Any, optimizers: Any = (), *, move_to_device: bool = True) -> Any:
        prepared = super().prepare(module, optimizers, move_to_device=move_to_device)
        prepared.evaluation_module = Doubled(prepared.evaluation_module)
        return prepared


class Doubled(nn.Module):
    """Returns twice what a module does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return 2 * self.module(*args)


def test_without_gradients_the_strategys_evaluation_module_is_called() -> None:
    lite = Lite(accelerator="cpu", strategy=EvaluatesElsewhere())
    lite.launch()
    module = lite.setup(nn.Linear(2, 1))
    trained = module(torch.ones(2))
    with torch.no_grad():
        assert module(torch.ones(2)).item() == 2 * trained.item()
