"""What a strategy's author can build on, and what they get wrong: right, or refused by name."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import run_file
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader

from stratagem import Callback, Lite, Module, Trainer
from stratagem.accelerators import CPUAccelerator
from stratagem.checkpoint import CheckpointIO
from stratagem.discovery import Capabilities, StrategySpec
from stratagem.discovery.registry import get_registry
from stratagem.environments import ClusterEnvironment
from stratagem.errors import ConfigurationError, PluginError
from stratagem.launch import Launcher
from stratagem.precision import Precision
from stratagem.strategies import (
    Components,
    DDPStrategy,
    GradientClip,
    ParallelStrategy,
    PreparedModel,
    Ranks,
    SingleDeviceStrategy,
    StepOptions,
    TrainStep,
    make_optimizers,
    user_module,
)

SCRIPTS = Path(__file__).parents[1] / "scripts"


class Line(Module):
    """A linear model that remembers which batches it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False)
        nn.init.ones_(self.layer.weight)
        self.seen: list[tuple[int, ...]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(tuple(batch.shape))
        loss = self.layer(batch).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.layer(batch).square().mean())

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1)


def loader(samples: int = 8, batch_size: int = 2) -> DataLoader[Any]:
    data: Any = torch.arange(2.0 * samples).reshape(samples, 2) / samples
    return DataLoader(data, batch_size=batch_size)


def trainer(**arguments: Any) -> Trainer:
    arguments = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "num_sanity_val_steps": 0,
        **arguments,
    }
    return Trainer(**arguments)


def fitted(strategy: Any, **arguments: Any) -> Line:
    torch.manual_seed(0)
    model = Line()
    trainer(strategy=strategy, **arguments).fit(model, loader())
    return model


def refused(action: Callable[[], object], kind: type[Exception] = ConfigurationError) -> str:
    with pytest.raises(kind) as caught:
        action()
    return str(caught.value)


# ---------------------------------------------------------------- the pieces of a step


class InChunks(SingleDeviceStrategy):
    """Learns shapes before the first step, and computes each loss in two parts."""

    knows_shapes = False

    def accumulate(
        self, prepared: PreparedModel, step: TrainStep, micro_batch: Any, count: int
    ) -> bool:
        if not self.knows_shapes:
            self.knows_shapes = True
            with torch.no_grad():
                step.loss(micro_batch)
        batch = step.begin(micro_batch)
        for part in batch.chunk(2):
            loss = step.loss(part, converted=True)
            assert loss is not None
            step.before_backward(loss)
            self.backward(prepared, loss / (2 * count))
            step.after_backward()
        return True


class Told(Callback):
    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        self.told.append(("start", tuple(batch.shape), index))

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int
    ) -> None:
        self.told.append(("end", tuple(batch.shape), index, trainer.global_step))


def test_a_loss_in_parts_trains_and_logs_as_a_whole_one_and_calls_hooks_once() -> None:
    whole, parts = Told(), Told()
    reference = trainer(callbacks=whole, accumulate_grad_batches=2)
    torch.manual_seed(0)
    model = Line()
    reference.fit(model, loader())
    own = trainer(callbacks=parts, accumulate_grad_batches=2, strategy=InChunks())
    chunked = Line()
    own.fit(chunked, loader())
    torch.testing.assert_close(chunked.layer.weight, model.layer.weight)
    assert parts.told == whole.told
    assert chunked.seen == [(2, 2), *[(1, 2)] * 8]
    # What the first look at shapes logged does not count.
    assert own.callback_metrics["loss"] == pytest.approx(reference.callback_metrics["loss"].item())


def test_a_train_step_of_the_pieces_is_the_default_one() -> None:
    class Own(SingleDeviceStrategy):
        def train_step(self, prepared: PreparedModel, step: TrainStep, micro_batches: Any) -> None:
            if self.accumulate_all(prepared, step, micro_batches):
                self.finish_step(prepared, step)

    arguments = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
    expected = fitted(SingleDeviceStrategy(), **arguments)
    assert torch.equal(fitted(Own(), **arguments).layer.weight, expected.layer.weight)


def test_micro_batches_are_read_one_by_one_and_not_kept() -> None:
    class Lazy:
        """Four batches, made as they are asked for."""

        def __init__(self) -> None:
            self.alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
            self.most = 0

        def __len__(self) -> int:
            return 4

        def __contains__(self, _: object) -> bool:
            return False

        def __iter__(self) -> Iterator[Tensor]:
            for _ in range(4):
                gc.collect()
                self.most = max(self.most, len(self.alive))
                batch = torch.ones(4, 1)
                self.alive.add(batch)
                yield batch
                del batch

    lite = Lite(accelerator="cpu")
    lite.launch()
    net = nn.Linear(1, 1)
    prepared = lite.strategy.prepare(net, [SGD(net.parameters(), lr=0.1)])

    class Square(TrainStep):
        def loss(self, part: Any, *, converted: bool = False) -> Tensor:
            return prepared.module(part).square().mean()  # type: ignore[no-any-return]

    micro_batches = Lazy()
    before = net.weight.detach().clone()
    lite.strategy.train_step(prepared, Square(), micro_batches)
    assert micro_batches.most == 0
    assert not torch.equal(net.weight, before)


# ---------------------------------------------------------------- life cycle and own state


class Averaging(SingleDeviceStrategy):
    """Keeps an average of the weights, evaluates with it, and ends training with it."""

    def __init__(self, **components: Any) -> None:
        super().__init__(**components)
        self.calls: list[str] = []
        self.average: Tensor | None = None
        self.rounds = 0

    def prepare(self, *arguments: Any, **options: Any) -> PreparedModel:
        self.calls.append("prepare")
        return super().prepare(*arguments, **options)

    def optimizer_step(
        self, prepared: PreparedModel, optimizer: Optimizer, closure: Any = None
    ) -> Any:
        result = super().optimizer_step(prepared, optimizer, closure)
        weight = next(prepared.original.parameters()).detach()
        self.average = weight.clone() if self.average is None else (self.average + weight) / 2
        self.rounds += 1
        return result

    @contextmanager
    def evaluation(self, prepared: PreparedModel) -> Iterator[None]:
        self.calls.append("evaluation")
        yield
        self.calls.append("evaluated")

    def end_training(self, prepared: PreparedModel) -> None:
        self.calls.append("end_training")

    def release(self, prepared: PreparedModel) -> None:
        self.calls.append("release")

    def state(self, prepared: PreparedModel, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
        return {} if self.average is None else {"average": self.average, "rounds": self.rounds}

    def load_state(
        self, prepared: PreparedModel, optimizers: Sequence[Optimizer], state: Mapping[str, Any]
    ) -> None:
        # The weights are there already.
        self.calls.append(f"load_state at {next(prepared.original.parameters()).sum().item():.3f}")
        self.average, self.rounds = state["average"], state["rounds"]


def test_prepared_model_is_released_before_the_next_prepare() -> None:
    first, second = Averaging(), Averaging()
    model = Line()
    of_first = trainer(strategy=first)
    of_first.validate(model, loader(), verbose=False)
    assert first.calls == ["prepare", "evaluation", "evaluated"]
    of_first.fit(model, loader())
    assert first.calls[3:] == ["release", "prepare", "end_training"]
    trainer(strategy=second).fit(model, loader())
    # Once, though another Trainer begins and the model is prepared again.
    assert first.calls[6:] == ["release"]
    assert second.calls == ["prepare", "end_training"]


def test_on_train_end_sees_the_changes_of_end_training() -> None:
    class Ends(SingleDeviceStrategy):
        def end_training(self, prepared: PreparedModel) -> None:
            for parameter in prepared.original.parameters():
                nn.init.constant_(parameter, 7.0)

    class Sees(Callback):
        def on_train_end(self, trainer: Trainer, module: Module) -> None:
            self.seen = next(module.parameters()).flatten().tolist()

    sees = Sees()
    trainer(strategy=Ends(), callbacks=sees).fit(Line(), loader())
    assert sees.seen == [7.0, 7.0]


def test_a_model_is_released_when_its_trainer_runs_another_one() -> None:
    strategy, other, model = Averaging(), Averaging(), Line()
    running = trainer(strategy=strategy)
    running.fit(model, loader())
    running.validate(Line(), loader(), verbose=False)
    assert strategy.calls[2:] == ["release", "prepare", "evaluation", "evaluated"]
    # What another strategy has prepared since is left alone.
    running.fit(model, loader())
    del strategy.calls[:]
    trainer(strategy=other).fit(model, loader())
    assert strategy.calls == ["release"]
    running.validate(Line(), loader(), verbose=False)
    assert strategy.calls == ["release", "prepare", "evaluation", "evaluated"]


def test_an_evaluation_that_fails_ends_its_context() -> None:
    class Failing(Line):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            raise ValueError("of the user")

    class Noting(SingleDeviceStrategy):
        ended = False

        @contextmanager
        def evaluation(self, prepared: PreparedModel) -> Iterator[None]:
            try:
                yield
            finally:
                self.ended = True

    strategy = Noting()
    with pytest.raises(ValueError, match="of the user"):
        trainer(strategy=strategy).validate(Failing(), loader())
    assert strategy.ended


def test_a_strategys_own_state_is_in_the_trainers_checkpoint(tmp_path: Path) -> None:
    strategy, path = Averaging(), tmp_path / "last.ckpt"
    saving = trainer(strategy=strategy)
    saving.fit(Line(), loader())
    saving.save_checkpoint(path)
    resumed = Averaging()
    trainer(strategy=resumed, max_epochs=2).fit(Line(), loader(), ckpt_path=path)
    weight = saving.run.module.layer.weight.sum().item()  # type: ignore[operator, union-attr]
    assert f"load_state at {weight:.3f}" in resumed.calls
    assert resumed.rounds == 8
    # Another strategy leaves it out.
    other = trainer(max_epochs=2)
    other.fit(Line(), loader(), ckpt_path=path)
    assert other.global_step == 8


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_lite_loads_models_then_optimizers_then_the_strategys_state(
    tmp_path: Path, order: str
) -> None:
    class Ordered(Averaging):
        def load_model_state(self, *arguments: Any, **options: Any) -> None:
            self.calls.append("model")
            super().load_model_state(*arguments, **options)

        def load_optimizer_state(self, *arguments: Any) -> None:
            self.calls.append("optimizer")
            super().load_optimizer_state(*arguments)

    def set_up() -> tuple[Lite, dict[str, Any]]:
        lite = Lite(accelerator="cpu", strategy=Ordered())
        lite.launch()
        net = nn.Linear(2, 1, bias=False)
        model, optimizer = lite.setup(net, SGD(net.parameters(), lr=0.1, momentum=0.9))
        both = {"step": 3, "optimizer": optimizer, "model": model}
        return lite, dict(reversed(both.items())) if order == "model first" else both

    lite, state = set_up()
    lite.backward(state["model"](torch.ones(1, 2)).sum())
    state["optimizer"].step()
    lite.save(tmp_path / "lite.ckpt", state)
    again, restored = set_up()
    restored["step"] = 0
    assert again.load(tmp_path / "lite.ckpt", restored) == {}
    calls: list[str] = vars(again.strategy)["calls"]
    assert [call.partition(" ")[0] for call in calls[1:]] == ["model", "optimizer", "load_state"]
    assert restored["step"] == 3
    plain = Lite(accelerator="cpu")
    plain.launch()
    assert set(plain.load(tmp_path / "lite.ckpt")) == {"step", "optimizer", "model"}


# ---------------------------------------------------------------- mistakes


def _accumulates_only(self: Any, prepared: Any, step: Any, micro_batches: Any) -> None:
    self.accumulate_all(prepared, step, micro_batches)


def _ends_no_batch(self: Any, prepared: Any, step: Any, micro_batches: Any) -> None:
    for micro_batch in micro_batches:
        self.accumulate(prepared, step, micro_batch, len(micro_batches))
    self.finish_step(prepared, step)


def _begins_no_batch(self: Any, prepared: Any, step: Any, micro_batches: Any) -> None:
    for micro_batch in micro_batches:
        self.backward(prepared, step.loss(micro_batch))
        step.end(micro_batch)
    self.finish_step(prepared, step)


def _steps_each_batch(self: Any, prepared: Any, step: Any, micro_batches: Any) -> None:
    for micro_batch in micro_batches:
        self.accumulate(prepared, step, micro_batch, 1)
        step.end(micro_batch)
        self.finish_step(prepared, step)


def _keeps_gradients(self: Any, prepared: Any, step: Any, micro_batches: Any) -> None:
    self.accumulate_all(prepared, step, micro_batches)
    if step.clip is not None:
        self.clip_gradients(prepared, prepared.optimizers[0], step.clip)
    self.optimizer_step(prepared, prepared.optimizers[0])
    step.after_optimizer_step(prepared.optimizers[0])


def _never_clips(self: Any, prepared: Any, step: Any, micro_batches: Any) -> None:
    self.accumulate_all(prepared, step, micro_batches)
    self.optimizer_step(prepared, prepared.optimizers[0])
    step.after_optimizer_step(prepared.optimizers[0])
    prepared.clear_gradients[0]()


@pytest.mark.parametrize(
    ("train_step", "arguments", "expected"),
    [
        (
            _accumulates_only,
            {"max_steps": 4},
            "Own.train_step has returned, but the step was not counted, so that training would "
            "never reach max_steps: expected a call of step.after_optimizer_step(optimizer) once, "
            "as Strategy.finish_step does, or a loss of None for every micro-batch",
        ),
        (
            _ends_no_batch,
            {},
            "Own.train_step has ended 0 of 1 micro-batches; expected a call of "
            "step.end(micro_batch) for each, as Strategy.accumulate_all does",
        ),
        (
            _begins_no_batch,
            {},
            "Own.train_step has begun 0 of 1 micro-batches; expected a call of "
            "step.begin(micro_batch) for each, before its loss, as Strategy.accumulate does",
        ),
        (
            _steps_each_batch,
            {"accumulate_grad_batches": 2},
            "Own.train_step has counted one step twice: expected one call of "
            "step.after_optimizer_step(optimizer) for all its micro-batches, as "
            "Strategy.finish_step does",
        ),
        (
            _keeps_gradients,
            {},
            "Own.train_step has left gradients after the step, which the next one would add to: "
            "call prepared.clear_gradients[0]() after step.after_optimizer_step(optimizer), as "
            "Strategy.finish_step does",
        ),
        (
            _never_clips,
            {"gradient_clip_val": 0.5},
            "Own.train_step has not read step.clip, so that gradient_clip_val=0.5 does nothing: "
            "call self.clip_gradients(prepared, optimizer, step.clip) where it is not None, as "
            "Strategy.finish_step does, or set Capabilities.engine_clips where the engine clips "
            "by self.components.step.clip",
        ),
    ],
)
def test_a_train_step_that_leaves_something_out_is_refused_after_its_first_step(
    train_step: Any, arguments: dict[str, Any], expected: str
) -> None:
    strategy = type("Own", (SingleDeviceStrategy,), {"train_step": train_step})()
    assert refused(lambda: fitted(strategy, **arguments), PluginError) == expected


@pytest.mark.filterwarnings("ignore:.*training_step returned None for")
def test_a_step_that_every_batch_skips_needs_no_end() -> None:
    class Skipping(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

    strategy = type("Own", (SingleDeviceStrategy,), {"train_step": _accumulates_only})()
    own = trainer(strategy=strategy)
    own.fit(Skipping(), loader())
    assert own.global_step == 0


def test_steps_that_user_code_takes_itself_are_not_the_strategys_to_end() -> None:
    class Manual(Line):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.manual_backward(self.layer(batch).square().mean())
            self.optimizers().step()  # and keeps the gradients

    strategy = type("Own", (SingleDeviceStrategy,), {"train_step": _accumulates_only})()
    own = trainer(strategy=strategy)
    own.fit(Manual(), loader())
    assert own.global_step == 4


def test_a_prepare_or_wrap_that_returns_something_else_is_named() -> None:
    class Bare(SingleDeviceStrategy):
        def prepare(self, module: Any, optimizers: Any = (), *, move_to_device: bool = True) -> Any:
            return module

    class Nothing(SingleDeviceStrategy):
        def wrap(self, module: Any) -> Any:
            self.wrapped = module

    assert refused(lambda: fitted(Bare()), PluginError) == (
        "Bare.prepare returned a StepModule; expected a PreparedModel(module, original, "
        "optimizers, evaluation_module), as super().prepare returns: what is to be called instead "
        "of the model belongs into its `module`"
    )
    assert refused(lambda: fitted(Nothing())) == (
        "Nothing.wrap(module) returned None; expected an nn.Module, what training calls: return "
        "the module itself where there is nothing to wrap"
    )


def test_a_prepare_that_never_calls_wrap_is_named() -> None:
    class Wrapping(SingleDeviceStrategy):
        def wrap(self, module: nn.Module) -> nn.Module:
            return module

    class Forgets(Wrapping):
        def prepare(self, module: Any, optimizers: Any = (), *, move_to_device: bool = True) -> Any:
            return PreparedModel(module, module, make_optimizers(optimizers), module)

    class Calls(Forgets):
        def prepare(self, module: Any, optimizers: Any = (), *, move_to_device: bool = True) -> Any:
            return super().prepare(self.wrap(module), optimizers)

    assert refused(lambda: fitted(Forgets()), PluginError) == (
        "Forgets.prepare has not called wrap, so that "
        "test_a_prepare_that_never_calls_wrap_is_named.<locals>.Wrapping.wrap does nothing: call "
        "super().prepare(...) or self.wrap(module) there, or override wrap to return the module"
    )
    strategy = Calls()
    assert fitted(strategy).seen
    assert "wrap" not in vars(strategy)


def test_an_init_that_does_not_call_its_base_is_named() -> None:
    class Forgets(SingleDeviceStrategy):
        def __init__(self, every: int = 4) -> None:
            self.every = every

    assert refused(lambda: trainer(strategy=Forgets())) == (
        "Forgets.__init__ does not call super().__init__(**components): call it first"
    )


def test_a_setup_that_does_not_call_its_base_is_named() -> None:
    class Forgets(SingleDeviceStrategy):
        def setup_environment(self) -> None:
            """Joins nothing."""

    lite = Lite(accelerator="cpu", strategy=Forgets())
    assert refused(lite.launch, PluginError) == (
        "Forgets.setup_environment does not call super().setup_environment(), which sets up the "
        "device and joins the other ranks: call it"
    )


def test_a_factory_in_the_place_of_the_optimizers_is_named() -> None:
    class NoMake(SingleDeviceStrategy):
        def prepare(self, module: Any, optimizers: Any = (), *, move_to_device: bool = True) -> Any:
            return PreparedModel(module, module, optimizers, module)

    text = refused(lambda: fitted(NoMake()), PluginError)
    assert text.startswith("PreparedModel(optimizers=<")
    assert text.endswith(
        "expected a list of optimizers; call make_optimizers(optimizers) after wrapping, and pass "
        "what it returns"
    )


@pytest.mark.parametrize("method", ["evaluation", "backward_in_forward", "model_context"])
def test_a_method_that_returns_no_context_is_named(method: str) -> None:
    strategy = type("Own", (SingleDeviceStrategy,), {method: _returns_none})()
    model = Line()
    model.automatic_optimization = method != "backward_in_forward"
    calls: dict[str, Callable[[], Any]] = {
        "evaluation": lambda: trainer(strategy=strategy).predict(model, loader()),
        "backward_in_forward": lambda: trainer(strategy=strategy).fit(model, loader()),
        "model_context": lambda: Lite(strategy=strategy).init_module().__enter__(),
    }
    assert refused(calls[method], PluginError) == (
        "_returns_none returned None; expected a context manager: decorate it with "
        "contextlib.contextmanager and yield once, or return contextlib.nullcontext()"
    )


def _returns_none(self: Any, prepared: Any = None) -> Any:
    """What a method without a return statement does."""


def test_a_micro_batch_begins_after_the_one_before_has_ended() -> None:
    class AllAtOnce(SingleDeviceStrategy):
        def train_step(self, prepared: Any, step: Any, micro_batches: Any) -> None:
            batches = [(each, step.begin(each)) for each in micro_batches]
            for each, batch in batches:
                self.backward(prepared, step.loss(batch, converted=True))
                step.end(each)
            self.finish_step(prepared, step)

    text = refused(lambda: fitted(AllAtOnce(), accumulate_grad_batches=2), PluginError)
    assert text.startswith(
        "AllAtOnce.train_step has begun a micro-batch before it ended the one before"
    )
    assert "call step.end(micro_batch) first" in text


def test_the_users_module_is_known_to_a_strategy() -> None:
    class Looks(SingleDeviceStrategy):
        def wrap(self, module: nn.Module) -> nn.Module:
            self.in_wrap = user_module(module)
            return module

    strategy, model = Looks(), Line()
    the_trainer = trainer(strategy=strategy, max_steps=1)
    the_trainer.fit(model, loader())
    assert strategy.in_wrap is model
    assert user_module(the_trainer.run.require_prepared().original) is model
    assert user_module(model) is model


def test_capabilities_of_parallel_strategies_and_of_their_parameters() -> None:
    assert Capabilities.parallel(precisions=("32-true",), multi_node=False) == Capabilities(
        launchers=None, one_process=False, many_devices=True, precisions=("32-true",)
    )
    with pytest.raises(PluginError) as caught:
        Capabilities.parallel(parameters="other")
    assert str(caught.value) == (
        "Capabilities has parameters='other'; expected 'same', 'drift' or 'divided'"
    )


def test_unknown_strategy_argument_lists_the_known_ones() -> None:
    text = refused(lambda: DDPStrategy(find_unused=True))
    assert text.startswith("DDPStrategy(find_unused=True): unknown; expected some of accelerator, ")
    assert "find_unused_parameters" in text
    assert "self" not in text.split()


@pytest.mark.parametrize(
    ("name", "method", "expected"),
    [
        (
            "optimizer_step",
            lambda self, prepared, optimizer: None,
            "Own.optimizer_step(self, prepared, optimizer) cannot be called as "
            "Strategy.optimizer_step(self, prepared: 'PreparedModel', optimizer: 'Optimizer', "
            "closure: 'Callable[[], Any] | None' = None) -> 'Any' is (too many positional "
            "arguments): give it the same parameters",
        ),
        (
            "prepare",
            lambda self, module, optimizers=(): None,
            "Own.prepare(self, module, optimizers=()) cannot be called as "
            "Strategy.prepare(self, module: 'nn.Module', optimizers: 'Optimizers' = (), *, "
            "move_to_device: 'bool' = True) -> 'PreparedModel' is (got an unexpected keyword "
            "argument 'move_to_device'): give it the same parameters",
        ),
        (
            "wrap",
            3,
            "Own.wrap is a int; expected a method, wrap(self, module: 'nn.Module') -> 'nn.Module'",
        ),
    ],
)
def test_a_method_with_another_signature_is_refused_when_the_trainer_is_made(
    name: str, method: Any, expected: str
) -> None:
    strategy = type("Own", (SingleDeviceStrategy,), {name: method})()
    assert refused(lambda: trainer(strategy=strategy)) == expected


def test_a_final_method_is_not_overridden() -> None:
    ranks = type("Own", (Ranks,), {"by_data_group": lambda self, gathered: gathered})()
    strategy = type("Mine", (SingleDeviceStrategy,), {"make_ranks": lambda self: ranks})()
    assert refused(lambda: trainer(strategy=strategy)) == (
        "Own.by_data_group takes the place of Ranks.by_data_group, which is final: it is called "
        "as it is; give yours another name"
    )


def test_methods_of_components_and_ranks_are_compared_with_their_base_too() -> None:
    class Half(Precision):
        name = "half"

        def convert_module(self) -> Any:  # type: ignore[override]
            """Takes no module."""

    class Elsewhere(ClusterEnvironment):
        def requeue(self, why: str) -> bool:  # type: ignore[override]
            return False

    class Memory(CheckpointIO):
        def save_checkpoint(self, checkpoint: Any) -> None:  # type: ignore[override]
            """Takes no path."""

        def load_checkpoint(self, path: Any) -> dict[str, Any]:
            return {}

        def remove_checkpoint(self, path: Any) -> None:
            """Nothing is kept."""

    class Mine(CPUAccelerator):
        def setup_device(self) -> None:  # type: ignore[override]
            """Takes no device."""

    class Alone(Ranks):
        def gather_objects(self) -> Any:  # type: ignore[override]
            """Takes no data."""

    class Strategist(SingleDeviceStrategy):
        def make_ranks(self) -> Ranks:
            return Alone()

    class Starting(Launcher):
        def launch(self, plan: Any) -> Any:  # type: ignore[override]
            """Takes no function."""

    expected = "cannot be called as {} is"
    for options, method in (
        ({"plugins": Half()}, "Precision.convert_module(self, module: 'nn.Module') -> 'nn.Module'"),
        ({"plugins": Elsewhere()}, "ClusterEnvironment.requeue(self) -> 'bool'"),
        ({"plugins": Memory()}, "CheckpointIO.save_checkpoint(self, "),
        ({"accelerator": Mine()}, "Accelerator.setup_device(self, device: 'torch.device')"),
        ({"strategy": Strategist()}, "Ranks.gather_objects(self, data: 'Any') -> 'list[Any]'"),
    ):
        text = refused(lambda options=options: trainer(**options))  # type: ignore[misc]
        assert expected.format(method).removesuffix(" is") in text
    lite = Lite(accelerator="cpu", devices=2, strategy="ddp", plugins=Starting())
    assert "Starting.launch(self, plan: 'Any') -> 'Any' cannot be called as Launcher.launch(" in (
        refused(lambda: lite.launch(print))
    )


class Contradicting(SingleDeviceStrategy):
    """Its spec, below, says something else."""


def not_a_strategy() -> object:
    return object()


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (
            Contradicting,
            "the spec's capabilities and those of Contradicting differ (parameters='drift' and "
            "'same'): let both",
        ),
        (not_a_strategy, "returned a object; expected a subclass of stratagem.strategies.Strategy"),
    ],
)
def test_class_that_contradicts_its_spec_is_refused_by_name(target: Any, expected: str) -> None:
    spec = StrategySpec(
        name="contradicting",
        target=target,
        api_version=1,
        capabilities=Capabilities(parameters="drift"),
    )
    get_registry().add(spec)
    try:
        text = refused(lambda: trainer(strategy="contradicting"), PluginError)
    finally:
        get_registry().remove("strategy", "contradicting")
    assert text.startswith("the target of the strategy 'contradicting'")
    assert expected in text


def test_a_property_that_fails_shows_its_own_error() -> None:
    class Misspelt(SingleDeviceStrategy):
        @property
        def makes_optimizers(self) -> bool:
            return bool(self.enigne)  # type: ignore[attr-defined]

    strategy = Misspelt()
    with pytest.raises(AttributeError, match="no attribute 'enigne'"):
        _ = strategy.makes_optimizers


def test_capabilities_that_the_class_contradicts_are_refused() -> None:
    class Clips(SingleDeviceStrategy):
        capabilities = Capabilities(engine_clips=True)

    class Backward(SingleDeviceStrategy):
        capabilities = Capabilities(manual_backward=False)

    class Following(SingleDeviceStrategy):
        capabilities = Capabilities(follows_evaluation=True)

    class OneProcess(ParallelStrategy):
        capabilities = Capabilities(many_devices=True, launchers=("script",))

    assert "Clips.capabilities has engine_clips=True, but" in refused(
        lambda: trainer(strategy=Clips())
    )
    assert "Backward.capabilities has manual_backward=False, but" in refused(
        lambda: trainer(strategy=Backward())
    )
    assert "Following.capabilities has follows_evaluation=True, but" in refused(
        lambda: trainer(strategy=Following())
    )
    assert refused(lambda: trainer(strategy=OneProcess(), devices=2)) == (
        "OneProcess.capabilities has one_process=True, so that one process was to drive 2 devices, "
        "but a ParallelStrategy has a process for each: set one_process=False"
    )


def test_make_ranks_with_another_number_of_ranks_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Alone(SingleDeviceStrategy):
        capabilities = Capabilities(one_process=False, many_devices=True)

    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    lite = Lite(accelerator="cpu", devices=2, strategy=Alone())
    assert refused(lite.launch, PluginError) == (
        "Alone was launched as 2 rank(s), and its ranks are 1: its capabilities say "
        "one_process=False, and its make_ranks() returned something else; subclass "
        "ParallelStrategy for one process a device"
    )


def test_an_engine_that_owns_backward_is_refused_under_lite() -> None:
    class Engine(SingleDeviceStrategy):
        capabilities = Capabilities(manual_backward=False)

        def train_step(self, prepared: Any, step: Any, micro_batches: Any) -> None:
            """The engine's affair."""

    lite = Lite(accelerator="cpu", strategy=Engine())
    lite.launch()
    net = nn.Linear(1, 1)
    expected = (
        "the strategy 'Engine' runs backward itself (manual_backward=False in its capabilities), "
        "so that a loop of your own cannot train with it: use the Trainer, or another strategy"
    )
    assert refused(lambda: lite.setup(net, SGD(net.parameters(), lr=0.1))) == expected
    model = lite.setup(net)
    optimizer = SGD(model.parameters(), lr=0.1)
    assert refused(lambda: lite.setup_optimizers(optimizer)) == expected
    assert refused(lambda: lite.backward(model(torch.ones(1, 1)).sum())) == expected


def test_an_engine_with_lite_step_trains_under_lite_by_it_alone() -> None:
    class Engine(SingleDeviceStrategy):
        capabilities = Capabilities(manual_backward=False, lite_step=True)

        def accumulate(self, prepared: Any, step: Any, micro_batch: Any, count: int) -> bool:
            return super().accumulate(prepared, step, micro_batch, count)

    lite = Lite(accelerator="cpu", strategy=Engine())
    lite.launch()
    net = nn.Linear(1, 1)
    model, _ = lite.setup(net, SGD(net.parameters(), lr=0.1))
    first, second = (
        lite.step(model, [torch.ones(1, 1)], lambda x: model(x).square()) for _ in range(2)
    )
    assert first is not None
    assert second is not None
    assert first > second
    assert refused(lambda: lite.backward(model(torch.ones(1, 1)).sum())) == (
        "the strategy 'Engine' runs backward itself (manual_backward=False in its capabilities), "
        "so that a loop of your own cannot train with it: use lite.step, the Trainer, or another "
        "strategy"
    )


def test_divergence_is_not_looked_for_where_ranks_hold_different_parameters() -> None:
    class Stages(SingleDeviceStrategy):
        capabilities = Capabilities(parameters="drift")

    assert refused(lambda: trainer(strategy=Stages(), detect_divergence=5)) == (
        "detect_divergence=5 compares the parameters of all ranks, which the strategy 'Stages' "
        "lets differ (parameters='drift' in its capabilities): leave detect_divergence out"
    )


def test_parts_of_the_data_that_do_not_fit_together_are_refused() -> None:
    assert refused(lambda: Ranks(world_size=2, data_splits=[(0, 3), (1, 3)])) == (
        "data_split is rank 0: (0, 3), rank 1: (1, 3) for 2 rank(s); expected (index, count) for "
        "each rank, one count on all of them, and each index from 0 to count - 1 on at least one "
        "rank, so that all of the data is read"
    )
    # Groups need not be of one size, nor neighbours.
    uneven = Ranks(world_size=3, data_splits=[(0, 2), (1, 2), (0, 2)])
    assert uneven.data_groups == ((0, 2), (1,))


def test_the_trainers_options_of_a_step_are_there_when_the_strategy_is_bound() -> None:
    class Noting(SingleDeviceStrategy):
        def bind(self, components: Components) -> None:
            super().bind(components)
            self.told = components.step

    made = trainer(strategy=Noting(), gradient_clip_val=0.5, accumulate_grad_batches={0: 1, 4: 8})
    told: Any = vars(made.strategy)["told"]
    assert told == StepOptions(clip=GradientClip(0.5), accumulation={0: 1, 4: 8})
    assert told.most_micro_batches == 8
    under_lite: Any = Lite(accelerator="cpu", strategy=Noting()).strategy
    assert under_lite.told is None


@pytest.mark.parametrize(
    ("model_state", "expected"),
    [
        (
            lambda self, prepared: None,
            "Partial.model_state returned a NoneType; expected a dict of tensors by name ({} on "
            "ranks that leave saving to rank 0)",
        ),
        (
            lambda self, prepared: {"module.layer.weight": torch.ones(1, 2)},
            "Partial.model_state lacks 1 of the model's names on every rank, such as "
            "'layer.weight': return all of them, under the names of prepared.original.state_dict()",
        ),
        (
            lambda self, prepared: {"layer.weight": torch.ones(1, 1)},
            "Partial.model_state returned 'layer.weight' with the shape (1, 1), and the model's "
            "has (1, 2): return whole tensors, or Shards of what a rank holds a part of",
        ),
    ],
)
def test_a_state_that_is_not_the_whole_model_is_refused_at_the_save(
    model_state: Any, expected: str, tmp_path: Path
) -> None:
    strategy = type("Partial", (SingleDeviceStrategy,), {"model_state": model_state})()
    made = trainer(strategy=strategy)
    made.fit(Line(), loader())
    path = tmp_path / "partial.ckpt"
    assert refused(lambda: made.save_checkpoint(path), PluginError) == expected
    assert not path.exists()


def test_a_strategy_of_divided_parameters_may_save_more_than_this_ranks_part(
    tmp_path: Path,
) -> None:
    class Gathering(SingleDeviceStrategy):
        capabilities = replace(SingleDeviceStrategy.capabilities, parameters="divided")

        def model_state(self, prepared: PreparedModel) -> dict[str, Any]:
            return {"layer.weight": torch.ones(2, 2)}

    saving = trainer(strategy=Gathering())
    saving.fit(Line(), loader())
    saving.save_checkpoint(tmp_path / "whole.ckpt")
    saved = torch.load(tmp_path / "whole.ckpt")["state_dict"]
    assert saved["layer.weight"].shape == (2, 2)


def test_an_author_finds_all_that_signatures_name() -> None:
    names: dict[str, Any] = {}
    exec("from stratagem.strategies import *", names)
    for name in ("Components", "GradientClip", "StepModule", "TrainStep", "Ranks", "DDPStrategy"):
        assert name in names
    for module in ("accelerators", "checkpoint", "environments", "precision"):
        exec(f"from stratagem.{module} import *", names)
    assert {"Shards", "LazyTensor", "CPUAccelerator", "MixedPrecision"} <= names.keys()


# ---------------------------------------------------------------- several ranks

STAGES = (SCRIPTS / "strategy_authors_stages.py").read_text()


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Four ranks in two pipelines."""
    folder = tmp_path_factory.mktemp("stages")
    script = folder / "script.py"
    script.write_text(STAGES)
    run_file(script, folder=folder)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.slow
def test_metrics_of_ranks_with_shared_data_count_once(
    stages: list[dict[str, Any]],
) -> None:
    for of_rank in stages:
        assert of_rank["part"] == 0.5
        assert of_rank["now"] == 0.5
        assert of_rank["sum"] == 4.0
        assert of_rank["batches"] == 2


@pytest.mark.slow
def test_a_value_that_only_the_last_stages_log_is_known_to_all(
    stages: list[dict[str, Any]],
) -> None:
    assert [of_rank["last"] for of_rank in stages] == [2.5] * 4


@pytest.mark.slow
def test_ranks_that_would_save_different_names_are_refused(stages: list[dict[str, Any]]) -> None:
    for of_rank in stages:
        assert not of_rank["saved"]
        assert of_rank["state"].startswith(
            "Stages.model_state returned 2 whole tensors on rank 0 and 3 others on rank 2 ('of the "
            "second stage' is on one of them only), and rank 0's alone would be saved"
        )


@pytest.mark.slow
def test_ranks_with_different_parameter_counts_raise(
    stages: list[dict[str, Any]],
) -> None:
    for of_rank in stages:
        assert of_rank["divergence"].startswith(
            "ranks differ in how many parameters they hold (rank 0: 2, rank 1: 2, rank 2: 4, "
            "rank 3: 4)"
        )


def test_a_backend_may_be_registered_after_the_strategy_was_made(
    run_script: Callable[..., Any],
) -> None:
    finished = run_script(
        """
        import torch.distributed as dist
        from stratagem import Lite
        from stratagem.strategies import DDPStrategy

        strategy = DDPStrategy(process_group_backend="of_an_accelerator")
        dist.Backend.register_backend("of_an_accelerator", lambda *_: None, devices=["cpu"])
        lite = Lite(accelerator="cpu", devices=2, strategy=strategy)
        print(lite.strategy.communication_backend)
        """
    )
    assert finished.stdout == "of_an_accelerator\n"


THREE = """
import gc
import threading
import torch.distributed as dist
from stratagem import Lite, Trainer
from stratagem.strategies import DDPStrategy

downs = []

class Grouped(DDPStrategy):
    def setup_environment(self):
        super().setup_environment()
        self.trainer = None
        self.group = dist.new_group(list(range(self.ranks.world_size)))

    def setup(self, trainer):
        self.trainer = trainer  # a cycle, and the model in it

    def teardown(self):
        downs.append(self.name)
        dist.destroy_process_group(self.group)
        super().teardown()

def groups():
    return len(dist.distributed_c10d._world.pg_map)

before = None
for number in range(3):
    strategy = Grouped()
    strategy.name = number
    lite = Lite(accelerator="cpu", devices=2, strategy=strategy)
    strategy.setup(lite)
    lite.launch()
    if number == 0:
        before = groups(), threading.active_count()
        shared = strategy
    del strategy, lite
assert downs == [1], downs  # the first is still there
assert groups() == before[0] + 1, (groups(), before)
again = Lite(accelerator="cpu", devices=2, strategy=shared)
again.launch()
assert downs == [1, 2], downs
assert groups() == before[0] + 1, (groups(), before)
import stratagem.launch.rank as rank
if again.is_global_zero:
    rank.this_rank.at_end.insert(0, lambda: print(downs))  # when all else is done
"""


def test_each_strategy_that_was_set_up_is_torn_down_once(run_script: Callable[..., Any]) -> None:
    finished = run_script(THREE)
    assert finished.stdout == "[1, 2, 0]\n"


def test_a_teardown_of_a_strategy_that_is_gone_may_fail_by_name() -> None:
    class Fails(SingleDeviceStrategy):
        def teardown(self) -> None:
            raise ValueError("the engine is gone")

    Lite(accelerator="cpu", strategy=Fails()).launch()
    with pytest.raises(PluginError, match=r"^Fails.teardown\(\) failed: the engine is gone$"):
        Lite(accelerator="cpu").launch()
    Lite(accelerator="cpu").launch()  # once


def test_a_teardown_that_raises_ends_the_program_with_an_error(
    run_script: Callable[..., Any],
) -> None:
    finished = run_script(
        """
        from stratagem import Lite
        from stratagem.strategies import SingleDeviceStrategy

        class Broken(SingleDeviceStrategy):
            def teardown(self):
                super().teardown()
                raise ValueError("the engine is gone")

        lite = Lite(accelerator="cpu", strategy=Broken())
        lite.launch()
        print("done")
        """,
        expect=1,
    )
    assert finished.stdout == "done\n"
    assert "stratagem: Broken.teardown() failed after the run was done:" in finished.stderr
    assert "ValueError: the engine is gone" in finished.stderr
