"""compile=...: the numbers of eager, names that stay, one graph where one is promised."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import run_file
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from stratagem import Callback, Lite, Module, Trainer
from stratagem.errors import ConfigurationError
from stratagem.strategies import DDPStrategy

SCRIPTS = Path(__file__).parents[1] / "scripts"
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
def test_compile_makes_one_graph_of_training_step(graphs: Graphs, calls_self: bool) -> None:
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


def test_trainer_without_compile_runs_a_compiled_model_eagerly(graphs: Graphs) -> None:
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


def test_lite_setup_compiles_the_model(graphs: Graphs) -> None:
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
        ("step", r"compile='step': a whole step is no longer compiled .*: pass compile=True or"),
        ({"step": True, "mode": "default"}, r"compile=\{'step': True, .* no longer compiled"),
        (3, "expected True, False, or a dict of torch.compile's arguments"),
        ({"modes": 1}, "has modes; expected some of backend, dynamic, fullgraph, mode, options"),
        ({"backend": "none"}, "there is no backend 'none'; expected one of"),
        ({"mode": "fastest"}, "torch.compile refuses it: .*fastest"),
        ({"mode": "default", "options": {"trace.enabled": True}}, "torch.compile refuses it"),
    ],
)
def test_bad_compile_argument_is_refused(given: Any, message: str) -> None:
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
    with pytest.raises(ConfigurationError, match="the strategy 'dp' cannot be compiled by torch"):
        trainer(strategy="dp", compile=True)
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
