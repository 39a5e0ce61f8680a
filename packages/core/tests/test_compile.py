"""compile=...: the numbers of eager, names that stay, one graph where one is promised."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import run_file
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Callback, Lite, Module, Trainer, compile as compiling
from stratagem.errors import ConfigurationError, UserCodeError
from stratagem.strategies import DDPStrategy, SingleDeviceStrategy

SCRIPTS = Path(__file__).parent / "scripts"
TOLERANCE = 1e-5
"""Of losses compiled by inductor against eager, over some steps of small models."""


class Graphs:
    """A backend that runs graphs as they are, and keeps them."""

    def __init__(self) -> None:
        self.made: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.made.append(graph)
        return graph.forward

    @property
    def operations(self) -> list[int]:
        """How many operations each graph has."""
        return [sum(n.op.startswith("call") for n in g.graph.nodes) for g in self.made]


@pytest.fixture
def graphs() -> Graphs:
    return Graphs()


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Net(Module):
    """Calls its network directly, as training steps do."""

    def __init__(self, momentum: float = 0.9, calls_self: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
        self.momentum, self.calls_self = momentum, calls_self
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = mse_loss((self if self.calls_self else self.net)(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=self.momentum)


class Losses(Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.values.append(outputs["loss"].item())


def data(samples: int = 16) -> TensorDataset:
    x = torch.randn(samples, 5, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.prod(1, keepdim=True))


def loader(samples: int = 16, batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(data(samples), batch_size)


def trainer(**arguments: Any) -> Trainer:
    return Trainer(
        **{
            "accelerator": "cpu",
            "max_epochs": 2,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            **arguments,
        }
    )


def fit(net: Module | None = None, ckpt_path: Any = None, **arguments: Any) -> Any:
    net = Net() if net is None else net
    losses = Losses()
    runs = trainer(callbacks=[losses, *arguments.pop("callbacks", [])], **arguments)
    runs.fit(net, loader(), ckpt_path=ckpt_path)
    return runs, net, losses.values


def close(values: list[float], expected: list[float]) -> bool:
    return torch.allclose(torch.tensor(values), torch.tensor(expected), rtol=0, atol=TOLERANCE)


# ---------------------------------------------------------------- the model


def test_inductor_has_the_losses_of_eager() -> None:
    _, _, expected = fit()
    _, _, losses = fit(compile=True)
    assert len(expected) == 8
    assert close(losses, expected)


@pytest.mark.parametrize("calls_self", [False, True])
def test_what_training_step_calls_is_one_graph(graphs: Graphs, calls_self: bool) -> None:
    _, _, expected = fit(Net(calls_self=calls_self))
    _, net, losses = fit(Net(calls_self=calls_self), compile={"backend": graphs})
    assert close(losses, expected)
    assert graphs.operations == [3]
    assert list(net.state_dict()) == list(Net().state_dict())


def test_evaluation_is_compiled_once_with_the_sanity_check(graphs: Graphs) -> None:
    runs = trainer(compile={"backend": graphs}, max_epochs=3)
    net = Net()
    runs.fit(net, loader(), loader())
    assert len(graphs.made) == 2  # one without gradients, one with
    runs.validate(net, loader(), verbose=False)  # under inference mode
    runs.fit(net, loader(), loader())
    assert len(graphs.made) == 3


def test_a_trainer_without_compile_runs_the_same_model_as_it_is(graphs: Graphs) -> None:
    net = Net()
    fit(net, compile={"backend": graphs})
    torch.compiler.reset()
    graphs.made.clear()
    fit(net)
    assert graphs.made == []


def test_checkpoints_go_from_compiled_to_eager_and_back_and_resume_exactly(tmp_path: Path) -> None:
    compiled: dict[str, Any] = {"compile": {"backend": "aot_eager"}}
    plain: dict[str, Any] = {}
    for first, second in ((plain, compiled), (compiled, plain), (compiled, compiled)):
        runs, whole, expected = fit(**first)
        runs, _, _ = fit(max_epochs=1, **first)
        path = tmp_path / "half.ckpt"
        runs.save_checkpoint(path)
        _, net, losses = fit(ckpt_path=path, **second)
        assert losses == expected[4:]
        assert all(map(torch.equal, net.state_dict().values(), whole.state_dict().values()))


class Whole(Net):
    """Calls itself, and is no module of torch's: its own call is compiled."""

    def __init__(self) -> None:
        super().__init__(calls_self=True)


class Copied(Callback):
    """Copies the model, and sets the copy's weights to zero, while it is compiled."""

    def __init__(self) -> None:
        self.outputs: list[float] = []

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            with torch.no_grad():
                for parameter in copied.parameters():
                    parameter.zero_()
                self.outputs.append(copied(batch[0]).abs().max().item())


def test_a_copy_of_a_compiled_model_has_its_own_weights(graphs: Graphs) -> None:
    copied = Copied()
    _, net, _ = fit(Whole(), compile={"backend": graphs}, callbacks=[copied])
    assert graphs.made
    assert set(copied.outputs) == {0.0}
    lite = Lite(accelerator="cpu")
    model = copy.deepcopy(lite.setup(net, compile={"backend": graphs}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert model(torch.ones(2, 5)).abs().max() == 0


def test_modules_without_parameters_are_not_compiled(graphs: Graphs) -> None:
    class Counts(nn.Module):
        seen = 0

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return x

    net = Net()
    net.metric = Counts()
    step = net.training_step
    net.training_step = lambda batch, batch_idx: step(net.metric(batch), batch_idx)  # type: ignore[method-assign, operator]
    fit(net, compile={"backend": graphs})
    assert net.metric.seen == 8
    assert graphs.operations == [3]


def test_lite_compiles_what_it_sets_up(graphs: Graphs) -> None:
    lite = Lite(accelerator="cpu")
    lite.launch()
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    model = lite.setup(net, compile={"backend": graphs})
    x = torch.ones(2, 5)
    assert torch.equal(model(x), net(x))
    assert graphs.operations == [3]
    assert list(model.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    for _ in range(2):
        lite.backward(model(x).sum())
    assert len(graphs.made) == 1


def test_lite_has_no_step_to_compile() -> None:
    lite = Lite(accelerator="cpu")
    lite.launch()
    with pytest.raises(ConfigurationError, match=r"the step is yours: pass compile=True"):
        lite.setup(nn.Linear(1, 1), compile={"step": True})


# ---------------------------------------------------------------- what the user has compiled


def test_a_compiled_model_handed_over_keeps_its_names(graphs: Graphs, tmp_path: Path) -> None:
    _, _, expected = fit()
    net = Net(calls_self=True)
    compiled: Any = torch.compile(net, backend=graphs)
    runs, _, losses = fit(compiled)
    assert losses == expected
    assert graphs.operations == [3]
    runs.save_checkpoint(tmp_path / "own.ckpt")
    loaded = Net.load_from_checkpoint(tmp_path / "own.ckpt")
    assert list(loaded.state_dict()) == list(net.state_dict())
    assert runs.predict(ckpt_path=tmp_path / "own.ckpt", dataloaders=[torch.ones(2, 5)])


def test_a_compiled_part_keeps_its_names(graphs: Graphs) -> None:
    _, plain, expected = fit()
    net = Net()
    net.net = torch.compile(net.net, backend=graphs)  # type: ignore[assignment]
    _, _, losses = fit(net)
    assert losses == expected
    assert graphs.operations == [3]
    assert list(net.state_dict()) == list(plain.state_dict())


SPAWNED = """
import torch
from torch import nn
from torch.utils.data import DataLoader
from stratagem import Module, Trainer

class Net(Module):
    def __init__(self):
        super().__init__()
        self.net = torch.compile(nn.Linear(1, 1), backend="eager")
    def training_step(self, batch, batch_idx):
        return self.net(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    net = Net()
    before = net.net.bias.item()
    trainer = Trainer(accelerator="cpu", strategy="ddp_spawn", devices=2, max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(net, DataLoader(torch.ones(4, 1), batch_size=1))
    print(list(net.state_dict()), round(before - net.state_dict()["net.bias"].item(), 4))
"""


def test_a_compiled_part_comes_back_from_processes_of_their_own(
    run_script: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    finished = run_script(SPAWNED, timeout=240)
    assert finished.stdout == "['net.weight', 'net.bias'] 0.2\n"


def test_a_checkpoint_with_the_names_of_a_wrapper_loads(tmp_path: Path) -> None:
    class Wrapped(Net):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.compile(self.net, backend="eager")  # type: ignore[assignment]

    _, net, expected = fit(Wrapped())
    half, _, _ = fit(Wrapped(), max_epochs=1)
    half.save_checkpoint(tmp_path / "new.ckpt")
    saved = torch.load(tmp_path / "new.ckpt", weights_only=True)
    renamed = {name: name.replace("net.", "net._orig_mod.") for name in saved["state_dict"]}
    saved["state_dict"] = {renamed[name]: value for name, value in saved["state_dict"].items()}
    (optimizer,) = saved["optimizer_states"]
    optimizer["state"] = {renamed[name]: value for name, value in optimizer["state"].items()}
    for group in optimizer["param_groups"]:
        group["params"] = [renamed[name] for name in group["params"]]
    torch.save(saved, tmp_path / "old.ckpt")
    _, _, losses = fit(Wrapped(), ckpt_path=tmp_path / "old.ckpt")
    assert losses == expected[4:]
    loaded = Wrapped.load_from_checkpoint(tmp_path / "old.ckpt")
    assert list(loaded.state_dict()) == list(net.state_dict())


def test_a_compiled_training_step_runs(graphs: Graphs) -> None:
    class Own(Net):
        @torch.compile(backend=graphs)
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return mse_loss(self.net(batch[0]), batch[1])

    _, _, expected = fit()
    _, _, losses = fit(Own())
    assert losses == expected
    assert graphs.operations == [4]


def test_lite_takes_a_compiled_model(graphs: Graphs) -> None:
    lite = Lite(accelerator="cpu")
    lite.launch()
    compiled: Any = torch.compile(nn.Linear(2, 1), backend=graphs)
    model = lite.setup(compiled)
    model(torch.ones(1, 2))
    assert list(model.state_dict()) == ["weight", "bias"]
    assert len(graphs.made) == 1


# ---------------------------------------------------------------- recompilations


SMALLER_LAST_BATCH = """
import torch
from torch.utils.data import DataLoader
from stratagem import Module, Trainer

class Net(Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

Trainer(
    accelerator="cpu",
    max_epochs=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    compile={"backend": "eager"},
).fit(Net(), DataLoader(torch.ones(6, 2), batch_size=4))
"""


def test_torch_logs_why_a_smaller_last_batch_is_compiled_again(tmp_path: Path) -> None:
    """As docs/guides/compiling.md says."""
    finished = subprocess.run(
        [sys.executable, "-c", SMALLER_LAST_BATCH],
        cwd=tmp_path,
        env={**os.environ, "TORCH_LOGS": "recompiles"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr
    assert "Recompiling function forward" in finished.stderr
    assert re.search(r"size mismatch at index 0. expected 4, actual 2", finished.stderr)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("reduce-overhead", r"did you mean compile=\{'mode': 'reduce-overhead'\}"),
        ("inductor", r"did you mean compile=\{'backend': 'inductor'\}"),
        ("steps", "did you mean compile='step'"),
        (3, "expected True, False, 'step', or a dict of torch.compile's arguments"),
        ({"modes": 1}, "has modes; expected some of backend, dynamic, fullgraph, mode, options"),
        ({"backend": "none"}, "there is no backend 'none'; expected one of"),
        ({"mode": "fastest"}, "torch.compile refuses it: .*fastest"),
        ({"mode": "default", "options": {"trace.enabled": True}}, "torch.compile refuses it"),
        ({"step": 1}, "expected True or False"),
    ],
)
def test_what_is_no_request_is_refused_at_once(given: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        trainer(compile=given)


def test_inductor_without_a_compiler_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigurationError, match="there is no C\\+\\+ compiler: install g\\+\\+"):
        trainer(compile=True)
    trainer(compile={"backend": "aot_eager"})


def test_strategies_that_cannot_are_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="which the strategy 'ddp' does not allow"):
        trainer(strategy="ddp", devices=2, compile="step")
    small = DDPStrategy(bucket_cap_mb=0.5)
    with pytest.raises(ConfigurationError, match=r"received bucket_cap_mb=0\.5: pass 1 or more"):
        trainer(strategy=small, devices=2, compile=True)
    with pytest.raises(ConfigurationError, match="under the strategy 'deepspeed' cannot be"):
        trainer(strategy="deepspeed", devices=2, compile=True)


# ---------------------------------------------------------------- several ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 0 of the script's two found."""
    folder = tmp_path_factory.mktemp("compiling")
    one = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    run_file(SCRIPTS / "compiling.py", folder=folder, env=one, timeout=500)
    found: dict[str, Any] = json.loads((folder / "out0.json").read_text())
    return found


STRATEGIES = {
    "ddp": 1,
    "ddp, small buckets": 3,
    "ddp_sharded": 1,
    "fsdp, root alone": 1,
    "fsdp": 2,
    "fsdp, checkpointed": 2,
    "model_parallel": 1,
}
"""Of each, the least number of graphs."""


@pytest.mark.parametrize("name", STRATEGIES)
def test_ranks_have_the_losses_of_eager(ranks: dict[str, Any], name: str) -> None:
    found = ranks[name]
    assert close(found["losses"], found["expected"])
    assert len(found["graphs"]) >= STRATEGIES[name]
    assert found["none"] == []


def test_ddp_cuts_the_graph_at_its_buckets(ranks: dict[str, Any]) -> None:
    assert len(ranks["ddp, small buckets"]["graphs"]) > len(ranks["ddp"]["graphs"])


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_ranks_compiled_in_other_ways(ranks: dict[str, Any], name: str) -> None:
    found = ranks[name]
    assert found["resumed"] == found["losses"][4:]
    assert close(found["resumed eagerly"], found["losses"][4:])
    assert close(found["inductor"], found["expected"][:4])
    assert close(found["own"], found["expected"])
    assert found["own graphs"]
    assert found["names"]
    assert close(found["handed over"], found["expected"])


# ---------------------------------------------------------------- the whole step

needs_whole_steps = pytest.mark.skipif(
    not compiling.takes_whole_steps(), reason="this torch.compile takes no backward into the graph"
)


def test_a_torch_that_takes_no_whole_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "takes_whole_steps", lambda: False)
    needs = f"into the graph (2.11 does), received {torch.__version__}: pass compile=True, or"
    with pytest.raises(ConfigurationError, match=re.escape(needs)):
        fit(compile="step")


class AdamNet(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


@needs_whole_steps
def test_what_a_backend_has_raised_is_said() -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        raise ValueError("this graph has no code")

    with pytest.raises(UserCodeError, match=r"raised: ValueError: this graph has no code"):
        fit(compile={"step": True, "backend": backend})


def step_of(graphs: Any) -> dict[str, Any]:
    return {"compile": {"step": True, "backend": graphs}}


OPTIONS = [
    {},
    {"gradient_clip_val": 0.1},
    {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    {"accumulate_grad_batches": 2},
]


@needs_whole_steps
@pytest.mark.parametrize("kind", [Net, AdamNet])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_whole_step_has_the_numbers_of_eager(
    graphs: Graphs, kind: type[Net], options: dict[str, Any]
) -> None:
    eager, expected_net, expected = fit(kind(), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runs, net, losses = fit(kind(), **options, **step_of(graphs))
    assert len(graphs.made) == 1
    targets = {str(node.target) for node in graphs.made[0].graph.nodes}
    assert any("function grad" in target for target in targets)
    assert close(losses, expected)
    for name, value in expected_net.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], value, rtol=0, atol=TOLERANCE)
    assert runs.global_step == eager.global_step
    for name, value in eager.callback_metrics.items():
        torch.testing.assert_close(runs.callback_metrics[name], value, rtol=0, atol=TOLERANCE)
    assert all(p.grad is None for p in net.parameters())
    (group,), (expected_group,) = (r.optimizers[0].param_groups for r in (runs, eager))
    assert group["lr"] == expected_group["lr"]
    assert isinstance(group["lr"], float)


@needs_whole_steps
def test_inductor_takes_a_whole_step() -> None:
    _, _, expected = fit(AdamNet(), precision="bf16-mixed")
    _, _, losses = fit(AdamNet(), precision="bf16-mixed", compile="step")
    assert torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=0, atol=1e-2)


@needs_whole_steps
def test_whole_steps_resume_exactly_and_their_checkpoints_load_in_eager(tmp_path: Path) -> None:
    compiled = step_of("aot_eager")
    _, whole, expected = fit(AdamNet(), **compiled)
    runs, _, _ = fit(AdamNet(), max_epochs=1, **compiled)
    runs.save_checkpoint(tmp_path / "half.ckpt")
    _, net, losses = fit(AdamNet(), ckpt_path=tmp_path / "half.ckpt", **compiled)
    assert losses == expected[4:]
    assert all(map(torch.equal, net.state_dict().values(), whole.state_dict().values()))
    _, _, losses = fit(AdamNet(), ckpt_path=tmp_path / "half.ckpt")
    assert close(losses, expected[4:])


@needs_whole_steps
def test_a_whole_step_calls_hooks_and_logs_in_order(graphs: Graphs) -> None:
    class Notes(Callback):
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            self.calls.append(("start", index))

        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int
        ) -> None:
            logged = float(trainer.callback_metrics["loss_step"])
            assert logged == outputs["loss"].item()
            self.calls.append(("end", index, trainer.global_step))

    notes = Notes()
    fit(max_epochs=1, accumulate_grad_batches=2, callbacks=[notes], **step_of(graphs))
    # The first step runs as it is; in the graph, all batches of a step begin together.
    assert notes.calls == [
        *[("start", 0), ("end", 0, 0), ("start", 1), ("end", 1, 1)],
        *[("start", 2), ("start", 3), ("end", 2, 1), ("end", 3, 2)],
    ]


@needs_whole_steps
def test_a_whole_step_stays_one_graph_with_validation_and_dropout(graphs: Graphs) -> None:
    net = Net()
    net.net.append(nn.Dropout(0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer(**step_of(graphs)).fit(net, loader(), loader())
    assert len(graphs.made) == 1


@needs_whole_steps
def test_the_compilers_setting_for_whole_steps_ends_with_the_steps_of_an_epoch(
    graphs: Graphs,
) -> None:
    class Looks(Callback):
        def __init__(self) -> None:
            self.seen: dict[str, set[bool]] = {}

        def look(self, where: str) -> None:
            found = self.seen.setdefault(where, set())
            found.add(torch._dynamo.config.trace_autograd_ops)

        def on_train_batch_end(self, *arguments: Any) -> None:
            self.look("step")

        def on_train_epoch_start(self, *arguments: Any) -> None:
            self.look("before")

        def on_train_epoch_end(self, *arguments: Any) -> None:
            self.look("after")

    looks = Looks()
    trainer(callbacks=[looks], **step_of(graphs)).fit(Net(), loader())
    assert looks.seen == {"before": {False}, "step": {True}, "after": {False}}
    assert len(graphs.made) == 1


@needs_whole_steps
def test_whole_steps_of_ever_new_shapes_go_on_uncompiled(graphs: Graphs) -> None:
    sizes = [torch.ones(n, 5) for n in (2, 2, 3, 4, 5, 6)]
    batches = [(x, x[:, :1]) for x in sizes]
    eager, net = trainer(), AdamNet()
    eager.fit(net, batches)
    runs, compiled = trainer(compile={"step": True, "backend": graphs, "dynamic": False}), AdamNet()
    with torch._dynamo.config.patch(recompile_limit=2):
        runs.fit(compiled, batches)
    assert runs.global_step == 12
    for name, value in net.state_dict().items():
        torch.testing.assert_close(compiled.state_dict()[name], value, rtol=0, atol=TOLERANCE)


class OneCycle(AdamNet):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@needs_whole_steps
def test_whole_steps_whose_optimizer_changes_go_on_quietly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with torch._dynamo.config.patch(recompile_limit=2):
        fit(OneCycle(), **step_of("aot_eager"))
    limits = [r for r in caplog.records if "hit config.recompile_limit" in r.getMessage()]
    assert len(limits) <= 1, "once, and not in every step after it"


class Hooked(Callback):
    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        pass


class Manual(Net):
    automatic_optimization = False


class Fused(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), fused=True)


class Breaks(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() > -1 else None


class Skips(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if batch_idx == 0 else None


class Counting(SingleDeviceStrategy):
    def optimizer_step(self, prepared: Any, optimizer: Any, closure: Any = None) -> Any:
        return super().optimizer_step(prepared, optimizer, closure)


@needs_whole_steps
@pytest.mark.parametrize(
    ("net", "arguments", "message"),
    [
        (Net, {"callbacks": [Hooked()]}, "on_before_optimizer_step would be called in the middle"),
        (Net, {"strategy": Counting()}, "Counting has optimizer_step of its own"),
        (Net, {"detect_anomaly": True}, "detect_anomaly=True looks at each loss"),
        (Net, {"precision": "bf16-true"}, "'bf16-true' changes torch's default dtype within it"),
        (Manual, {}, "there is no step that compile="),
        (Fused, {}, r"AdamW\(fused=True\) is a kernel that is not traced"),
        (Breaks, {}, "cannot take this step of Breaks with SGD into one graph: .*data-dependent"),
        (Skips, {}, "return a loss for every batch"),
    ],
)
def test_what_a_whole_step_leaves_no_place_for_is_refused(
    graphs: Graphs, net: type[Net], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigurationError, UserCodeError), match=message):
        fit(net(), **step_of(graphs), **arguments)
