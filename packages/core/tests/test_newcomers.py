"""Mistakes of newcomers: each error says what was expected, what was received, and what to do."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from fixtures import RunScript
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, Dataset, TensorDataset

from stratagem import Callback, DataModule, Lite, Module, Trainer
from stratagem.callbacks import EarlyStopping, ModelCheckpoint
from stratagem.discovery import hints
from stratagem.discovery.entry_points import CORE, installed_entries
from stratagem.discovery.registry import Registry, get_registry
from stratagem.errors import ConfigurationError, UserCodeError
from stratagem.plan.plan import RunRequest
from stratagem.plan.resolution import resolve
from stratagem.runtime import runtime
from stratagem.strategies import DDPStrategy

DATA = torch.linspace(-1, 1, 8).reshape(-1, 1)


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.1)


class Wide(Net):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(1, width)


class Validates(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch).square().mean())


class NoStep(Module):
    def configure_optimizers(self) -> Any:
        return None


class MisspelledStep(NoStep):
    def train_step(self, batch: Any, batch_idx: int) -> Any:
        return None


class NoOptimizer(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return batch.sum()


class Unsized(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return torch.ones(1)


class Data(DataModule):
    def train_dataloader(self) -> Any:
        return loader()


class ForgetsReturn(DataModule):
    def train_dataloader(self) -> Any:
        loader()


def loader() -> DataLoader[Any]:
    return DataLoader(DATA, 2)  # type: ignore[arg-type]


def trainer(**arguments: Any) -> Trainer:
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
    }
    return Trainer(**{**defaults, **arguments})


def any_of(made: Any, *args: Any, **kwargs: Any) -> Any:
    """Return an object, with arguments that a type checker refuses."""
    return made(*args, **kwargs)


def on_cpu(**arguments: Any) -> Any:
    return Trainer(**{"accelerator": "cpu", **arguments})


def fit(model: Any, *data: Any, **arguments: Any) -> None:
    """Fit a model with a loader, unless `data` has others."""
    trainer().fit(model, *(data or (loader(),)), **arguments)


def steps(step: Callable[[Any, Any], Any]) -> None:
    """Fit a model with this training step."""

    class Model(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return step(self, batch)

    fit(Model())


def configures(make: Callable[[Any], Any]) -> None:
    """Fit a model whose `configure_optimizers` returns this of an optimizer."""

    class Model(Net):
        def configure_optimizers(self) -> Any:
            return make(SGD(self.parameters(), lr=0.1))

    fit(Model())


def takes_optimizer_idx() -> None:
    class Model(Net):
        def training_step(  # type: ignore[override]
            self, batch: Any, batch_idx: int, optimizer_idx: int
        ) -> Any:
            return self.layer(batch).sum()

    fit(Model())


def saved(folder: Path, model: Module) -> Path:
    made = trainer()
    made.fit(model, loader())
    made.save_checkpoint(folder / "saved.ckpt")
    return folder / "saved.ckpt"


def a_file(folder: Path) -> Path:
    (folder / "file").touch()
    return folder / "file"


def nested() -> None:
    class Model(Net):
        def on_train_epoch_end(self) -> None:
            self.trainer.fit(Net(), loader())

    fit(Model())


class Mistake(NamedTuple):
    """What a newcomer does, and what the error has to say: received, expected, what to do."""

    name: str
    make: Callable[[Path], object]
    says: tuple[str, ...]


def monitored(callback: Callback) -> None:
    trainer(callbacks=callback, enable_checkpointing=True).fit(Validates(), loader(), loader())


MISTAKES = [
    # arguments
    Mistake("misspelled", lambda _: Trainer(max_epoch=3), ("'max_epoch'", "mean 'max_epochs'?")),  # type: ignore[call-arg]
    Mistake("lite misspelled", lambda _: Lite(device=2), ("'device'", "mean 'devices'?")),  # type: ignore[call-arg]
    Mistake("epochs", lambda _: Trainer(epochs=3), ("'epochs'", "Write max_epochs=... instead")),  # type: ignore[call-arg]
    Mistake("gpus", lambda _: Trainer(gpus=2), ("'gpus'", "accelerator='gpu', devices=...")),  # type: ignore[call-arg]
    Mistake(
        "old name",
        lambda _: Trainer(checkpoint_callback=False),  # type: ignore[call-arg]
        ("'checkpoint_callback'", "Write enable_checkpointing=... instead"),
    ),
    Mistake(
        "positional",
        lambda _: any_of(Trainer, 3),
        ("too many positional arguments", "pass arguments by name", "max_epochs"),
    ),
    Mistake("no model", lambda _: trainer().fit(), ("missing", "'model'", "train_dataloaders")),  # type: ignore[call-arg]
    Mistake("a string", lambda _: on_cpu(max_epochs="3"), ("max_epochs='3'", "whole number")),
    Mistake("a float", lambda _: on_cpu(max_epochs=3.5), ("max_epochs=3.5", "whole number")),
    Mistake(
        "devices in words",
        lambda _: on_cpu(devices="two"),
        ("devices='two'", "expected a number of devices", "'auto'"),
    ),
    Mistake("devices below 0", lambda _: on_cpu(devices=-3), ("devices=-3", "-1 for all")),
    Mistake("nodes", lambda _: on_cpu(num_nodes=0), ("num_nodes=0", "at least 1")),
    Mistake("strategy", lambda _: on_cpu(strategy="dpp"), ("'dpp'", "Did you mean 'ddp'?")),
    Mistake(
        "strategy class",
        lambda _: on_cpu(strategy=DDPStrategy),
        ("DDPStrategy", "expected a name or an instance", "received a class: call it"),
    ),
    Mistake(
        "one device",
        lambda _: on_cpu(strategy="single_device", devices=2),
        ("uses one device", "devices=2", "pass devices=1", "'ddp'"),
    ),
    Mistake(
        "dp", lambda _: on_cpu(strategy="dp", devices=2), ("'dp'", "2 devices", "strategy='ddp'")
    ),
    Mistake("accelerator", lambda _: Trainer(accelerator="cppu"), ("'cppu'", "mean 'cpu'?")),
    Mistake(
        "a device of torch",
        lambda _: Trainer(accelerator="cuda:0"),
        ("'cuda:0'", "expected a name", "accelerator='cuda', devices=[0]"),
    ),
    Mistake(
        "an object of torch",
        lambda _: Trainer(accelerator=torch.device("cpu")),  # type: ignore[arg-type]
        ("type='cpu'", "expected a name", "write accelerator='cpu'"),
    ),
    Mistake("precision", lambda _: on_cpu(precision="fp16"), ("'fp16'", "mean '16-mixed'?")),
    Mistake(
        "dtype",
        lambda _: on_cpu(precision=torch.float16),
        ("torch.float16", "expected a name, 64, 32, 16, 'bf16'"),
    ),
    Mistake("logger", lambda _: on_cpu(logger="csvv"), ("'csvv'", "Did you mean 'csv'?")),
    Mistake("plugin", lambda _: on_cpu(plugins="slrum"), ("'slrum'", "stratagem doctor")),
    Mistake(
        "callback by name",
        lambda _: on_cpu(callbacks="model_chekpoint"),
        ("'model_chekpoint'", "Did you mean 'model_checkpoint'?"),
    ),
    Mistake(
        "callback class",
        lambda _: on_cpu(callbacks=[EarlyStopping]),
        ("EarlyStopping", "expected instances", "call the class"),
    ),
    Mistake(
        "no callback",
        lambda _: on_cpu(callbacks=[object()]),
        ("<object object", "expected instances of stratagem.Callback"),
    ),
    Mistake(
        "limit",
        lambda _: on_cpu(limit_train_batches=1.5),
        ("limit_train_batches=1.5", "expected a number of batches", "from 0.0 to 1.0"),
    ),
    Mistake(
        "clipping",
        lambda _: on_cpu(gradient_clip_val="big"),
        ("'big'", "a number above 0, or None"),
    ),
    Mistake("time", lambda _: on_cpu(max_time="1 hour"), ("'1 hour'", "DD:HH:MM:SS")),
    Mistake("fast_dev_run", lambda _: on_cpu(fast_dev_run="yes"), ("'yes'", "True, False")),
    Mistake(
        "mode", lambda _: any_of(EarlyStopping, "loss", mode="lower"), ("'lower'", "'min' or 'max'")
    ),
    Mistake(
        "monitor of EarlyStopping",
        lambda _: monitored(EarlyStopping("val_los")),
        ("monitor='val_los'", "there is val_loss", "Did you mean 'val_loss'?", "self.log("),
    ),
    Mistake(
        "monitor of ModelCheckpoint",
        lambda folder: monitored(ModelCheckpoint(folder, monitor="val_los")),
        ("monitor='val_los'", "there is val_loss", "Did you mean 'val_loss'?", "self.log("),
    ),
    Mistake(
        "a root folder that is a file",
        lambda folder: trainer(default_root_dir=a_file(folder), enable_checkpointing=True).fit(
            Net(), loader()
        ),
        ("file'", "no folder that can be written to", "pass one that can"),
    ),
    # the model
    Mistake(
        "swapped",
        lambda _: trainer().fit(loader(), Net()),  # type: ignore[arg-type]
        ("expected a stratagem.Module", "DataLoader", "swapped: call trainer.fit(model, data)"),
    ),
    Mistake(
        "swapped with two devices",
        lambda _: trainer(devices=2).fit(loader(), Net()),  # type: ignore[arg-type]
        ("expected a stratagem.Module", "DataLoader", "swapped: call trainer.fit(model, data)"),
    ),
    Mistake(
        "swapped in validate",
        lambda _: trainer().validate(loader(), Validates()),  # type: ignore[arg-type]
        ("DataLoader", "swapped: call trainer.validate(model, data)"),
    ),
    Mistake(
        "class",
        lambda _: fit(Net),
        ("expected a stratagem.Module", "received the class Net", "pass an instance: Net()"),
    ),
    Mistake(
        "nn.Module",
        lambda _: fit(nn.Linear(1, 1)),
        ("expected a stratagem.Module", "received Linear", "Lite", "training_step"),
    ),
    Mistake("function", lambda _: fit(len), ("stratagem.Module", "builtin_function", "instance")),
    Mistake("no step", lambda _: fit(NoStep()), ("NoStep does not define training_step", "fit")),
    Mistake(
        "misspelled step",
        lambda _: fit(MisspelledStep()),
        ("does not define training_step", "rename train_step to training_step"),
    ),
    Mistake(
        "no optimizer",
        lambda _: fit(NoOptimizer()),
        ("does not define configure_optimizers", "trainer.fit needs"),
    ),
    Mistake("optimizer_idx", lambda _: takes_optimizer_idx(), ("optimizer_idx", "remove the arg")),
    Mistake(
        "no validation step",
        lambda _: trainer().validate(Net(), loader()),
        ("Net does not define validation_step", "trainer.validate needs"),
    ),
    Mistake(
        "nothing to test",
        lambda _: trainer().test(dataloaders=loader()),
        ("there is no model", "pass one"),
    ),
    Mistake("optimizer None", lambda _: configures(lambda o: None), ("None", "an optimizer, a")),
    Mistake("optimizer class", lambda _: configures(lambda o: SGD), ("SGD", "expected an opti")),
    Mistake(
        "optimizer key",
        lambda _: configures(lambda o: {"optimiser": o}),
        ("optimiser", "'optimizer'"),
    ),
    Mistake(
        "scheduler alone",
        lambda _: configures(lambda o: StepLR(o, 1)),
        ("StepLR", "(optimizers, schedulers)"),
    ),
    Mistake(
        "scheduler without monitor",
        lambda _: configures(lambda o: {"optimizer": o, "lr_scheduler": ReduceLROnPlateau(o)}),
        ("ReduceLROnPlateau without 'monitor'", "'monitor': 'val_loss'"),
    ),
    Mistake(
        "two optimizers",
        lambda _: configures(lambda o: [o, o]),
        ("2 optimizers", "takes one", "automatic_optimization = False"),
    ),
    Mistake(
        "loss of shape",
        lambda _: steps(lambda m, batch: m.layer(batch)),
        ("shape (2, 1)", "expected a scalar", ".mean()"),
    ),
    Mistake(
        "loss as a float",
        lambda _: steps(lambda m, batch: m.layer(batch).sum().item()),
        ("a float", "a scalar tensor"),
    ),
    Mistake(
        "loss detached",
        lambda _: steps(lambda m, batch: m.layer(batch).sum().detach()),
        ("without a gradient", "do not detach it"),
    ),
    Mistake(
        "loss under another key",
        lambda _: steps(lambda m, batch: {"los": m.layer(batch).sum()}),
        ("['los']", "the key 'loss'"),
    ),
    Mistake(
        "loss in a tuple",
        lambda _: steps(lambda m, batch: (m.layer(batch).sum(), 1)),
        ("a tuple", "a scalar tensor"),
    ),
    Mistake(
        "log of a list",
        lambda _: steps(lambda m, batch: m.log("x", [1, 2])),
        ("self.log('x', ...)", "expected a number", "received list"),
    ),
    Mistake(
        "log of a dict",
        lambda _: steps(lambda m, batch: m.log({"x": 1}, 2)),
        ("expected a name and a value", "a dict as name", "self.log_dict()"),
    ),
    Mistake(
        "log of a vector",
        lambda _: steps(lambda m, batch: m.log("x", batch)),
        ("expected a single number", "shape (2, 1)", ".mean()"),
    ),
    Mistake("log in no run", lambda _: Net().log("x", 1.0), ("self.log('x', ...)", "while a Tr")),
    Mistake("fit in fit", lambda _: nested(), ("while fit()", "call it after fit() has returned")),
    Mistake(
        "option set later",
        lambda _: setattr(trainer(), "max_epochs", 5),
        ("Trainer.max_epochs is read-only", "Pass max_epochs= to the Trainer"),
    ),
    # data
    Mistake("no data", lambda _: trainer().fit(Net()), ("no data", "define train_dataloader()")),
    Mistake("loader class", lambda _: fit(Net(), DataLoader), ("class DataLoader", "an instance")),
    Mistake("a path", lambda _: fit(Net(), "data/train"), ("'data/train' (str)", "a DataLoader")),
    Mistake("a number", lambda _: fit(Net(), 32), ("32 (int)", "expected a DataLoader")),
    Mistake("a function", lambda _: fit(Net(), loader), ("(function)", "expected a DataLoader")),
    Mistake(
        "a generator",
        lambda _: trainer(max_epochs=2).fit(Net(), (batch for batch in [torch.ones(2, 1)])),
        ("yielded no batch", "at least one in each epoch", "pass a DataLoader or a list"),
    ),
    Mistake(
        "no samples",
        lambda _: fit(Net(), DataLoader(TensorDataset(DATA[:0]), 2)),
        ("is empty", "at least one batch", "0 samples"),
    ),
    Mistake(
        "all dropped",
        lambda _: fit(Net(), DataLoader(DATA, 99, drop_last=True)),  # type: ignore[arg-type]
        ("is empty", "8 samples", "batch_size=99", "drop_last=True"),
    ),
    Mistake(
        "no length",
        lambda _: fit(Net(), DataLoader(Unsized(), 2)),
        ("Unsized, which has no __len__", "define __len__"),
    ),
    Mistake(
        "loaders as a datamodule",
        lambda _: trainer().fit(Net(), datamodule=loader()),  # type: ignore[arg-type]
        ("expected a stratagem.DataModule", "a DataLoader", "after the model"),
    ),
    Mistake(
        "datamodule class",
        lambda _: trainer().fit(Net(), datamodule=Data),  # type: ignore[arg-type]
        ("received the class Data", "pass an instance: Data(...)"),
    ),
    Mistake("datamodule class first", lambda _: fit(Net(), Data), ("class Data", "Data(...)")),
    Mistake(
        "no return",
        lambda _: trainer().fit(Net(), datamodule=ForgetsReturn()),
        ("ForgetsReturn.train_dataloader() returned None", "return it"),
    ),
    Mistake("both", lambda _: fit(Net(), loader(), datamodule=Data()), ("both", "pass one of")),
    # checkpoints
    Mistake(
        "no checkpoint",
        lambda folder: fit(Net(), ckpt_path=folder / "nothere.ckpt"),
        ("no checkpoint", "nothere.ckpt'", "contains no checkpoints"),
    ),
    Mistake("ckpt_path", lambda _: fit(Net(), ckpt_path=3), ("ckpt_path=3", "expected a path")),
    Mistake(
        "best without a callback",
        lambda _: trainer().validate(Validates(), loader(), ckpt_path="best"),
        ("ckpt_path='best'", "needs a ModelCheckpoint", "pass a path"),
    ),
    Mistake(
        "another model",
        lambda folder: fit(Wide(3), ckpt_path=saved(folder, nn_in_a_list())),
        ("belongs to another model", "it lacks layer.weight", "strict=False"),
    ),
    Mistake(
        "arguments that were not saved",
        lambda folder: Wide.load_from_checkpoint(saved(folder, Wide(3))),
        ("no value of width", "as in width=...", "save_hyperparameters()"),
    ),
    Mistake(
        "loading into an instance",
        lambda folder: Net().load_from_checkpoint(saved(folder, Net())),
        ("called on an instance", "model = Net.load_from_checkpoint(path)"),
    ),
    Mistake(
        "saving before a run",
        lambda folder: trainer().save_checkpoint(folder / "early.ckpt"),
        ("needs a model that was fitted", "there was none yet"),
    ),
]


def nn_in_a_list() -> Module:
    class Other(Net):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layer = self.layer, nn.Identity()  # type: ignore[assignment]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.first(batch).sum()

    return Other()


def failure(mistake: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any; the test reads it
        mistake()
    return caught.value


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda each: each.name)
def test_a_mistake_is_explained(mistake: Mistake, tmp_path: Path) -> None:
    text = str(failure(lambda: mistake.make(tmp_path)))
    assert {part: part in text for part in mistake.says} == dict.fromkeys(mistake.says, True), text
    assert "\n" not in text.partition("\nFor an explanation: ")[0]


def frames_of_ours(error: BaseException) -> int:
    frames = traceback.extract_tb(error.__traceback__)
    return sum("/src/stratagem" in frame.filename for frame in frames)


@pytest.mark.parametrize(
    "mistake",
    [
        lambda: Trainer(max_epoch=3),  # type: ignore[call-arg]
        lambda: Lite(accelerator="cppu"),
        lambda: on_cpu(strategy="dpp"),
        lambda: on_cpu(limit_train_batches=1.5),
        lambda: trainer().fit(loader(), Net()),  # type: ignore[arg-type]
        lambda: trainer().validate(Net(), loader()),
        lambda: configures(lambda o: None),
        lambda: steps(lambda m, batch: m.layer(batch)),
        lambda: monitored(EarlyStopping("val_los")),
        lambda: fit(Net(), ckpt_path="nothere.ckpt"),
    ],
)
def test_an_error_is_raised_where_the_user_called(mistake: Callable[[], object]) -> None:
    assert frames_of_ours(failure(mistake)) == 1


def test_the_frames_of_the_users_methods_stay() -> None:
    error = failure(lambda: steps(lambda m, batch: m.log("x", [1, 2])))
    assert isinstance(error, UserCodeError)
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert names[-2:] == ["training_step", "<lambda>"]
    assert frames_of_ours(error) == 1


def test_an_error_of_the_users_code_keeps_its_traceback() -> None:
    error = failure(lambda: steps(lambda m, batch: batch.nothing))
    assert isinstance(error, AttributeError)
    assert frames_of_ours(error) > 5


def test_a_variable_shows_all_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATAGEM_FULL_TRACEBACKS", "1")
    error = failure(lambda: on_cpu(strategy="dpp"))
    assert isinstance(error, ConfigurationError)
    assert frames_of_ours(error) > 4


def test_silent_mistakes_print_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    class Misspells(Validates):
        def on_train_epoch_ends(self) -> None:
            """Never called."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch[0], batch_idx)

    trainer(enable_progress_bar=True).fit(Misspells(), TensorDataset(DATA))
    said = capsys.readouterr().err
    assert "Misspells.on_train_epoch_ends overrides nothing, and nothing calls it. Did you" in said
    assert "Did you mean on_train_epoch_end?" in said
    assert "Misspells has validation_step, but there is no loader for validation: pass" in said
    assert "a TensorDataset was passed instead of a loader, so that each sample is a batch" in said


def _with_methods(base: type, names: str) -> Any:
    """Return an object of a subclass with methods that do nothing."""
    return type(f"Old{base.__name__}", (base,), {name: lambda *_: None for name in names.split()})()


def test_methods_with_an_old_or_a_misspelled_name_get_a_hint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = _with_methods(
        Validates, "eval_step validaton_step test_steps configure_optimizer on_epoch_end"
    )
    callback = _with_methods(Callback, "on_batch_end on_keyboard_interrupt")
    datamodule = _with_methods(Data, "prepare_datas validation_dataloader")
    trainer(callbacks=callback).fit(module, datamodule)
    said = re.findall(
        r"(\S+) overrides nothing, and nothing calls it. (.*)", capsys.readouterr().err
    )
    assert dict(said) == {
        "OldValidates.eval_step": "Override validation_step",
        "OldValidates.validaton_step": "Did you mean validation_step?",
        "OldValidates.test_steps": "Did you mean test_step?",
        "OldValidates.configure_optimizer": "Did you mean configure_optimizers?",
        "OldValidates.on_epoch_end": "Override on_train_epoch_end or on_validation_epoch_end",
        "OldData.prepare_datas": "Did you mean prepare_data?",
        "OldData.validation_dataloader": "Override val_dataloader",
        "OldCallback.on_batch_end": "Override on_train_batch_end",
        "OldCallback.on_keyboard_interrupt": "Override on_exception",
    }


def test_methods_that_the_users_code_calls_and_helpers_get_no_hint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Helps(Validates):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.train_step(batch)

        def train_step(self, batch: Any) -> Any:
            return super().training_step(batch, 0)

        def sample_images_1(self) -> None:
            """Like the next one, and called by another program."""

        def sample_images_2(self) -> None:
            """Like the one before."""

    trainer().fit(Helps(), loader())
    assert "nothing calls it" not in capsys.readouterr().err


# -- what is installed

SPAWNS = """
import torch
from torch.utils.data import DataLoader
from stratagem import Module, Trainer

class Net(Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def main(strategy="ddp_spawn", **options):
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False)
    trainer.fit(Net(), DataLoader(torch.ones(8, 1), 2, **options))
"""


def test_unused_gpu_is_hinted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "0000:01:00.0").mkdir(parents=True)
    (tmp_path / "0000:01:00.0/class").write_text("0x030200\n")
    (tmp_path / "0000:01:00.0/vendor").write_text("0x10de\n")
    registry = Registry.discover([e for e in installed_entries() if e.distribution == CORE])
    monkeypatch.setattr(hints, "PCI", str(tmp_path))
    said = (
        "this machine has a GPU that needs stratagem-backend-cuda: pip install "
        "stratagem-backend-cuda"
    )
    installed = registry.names("accelerator")
    assert hints.missing_backend("auto", installed) == said
    assert hints.missing_backend("cpu", installed) == ""
    assert hints.missing_backend("auto", get_registry().names("accelerator")) == ""
    assert resolve(RunRequest(), registry).accelerator.why.endswith(f"; {said}")
    monkeypatch.setattr(runtime, "get_registry", lambda: registry)
    for _ in range(2):
        trainer(accelerator="auto").fit(Net(), loader())
    assert capsys.readouterr().err.count(f"stratagem: {said}\n") == 1


WITHOUT_NUMPY = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = classmethod(
    lambda cls, name, *rest: None if name.partition(".")[0] == "numpy" else find(name, *rest)
)
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_without_numpy_torch_warns_once_and_not_on_every_rank(
    strategy: str, run_script: RunScript, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_NUMPY)
    text = f"{SPAWNS}\nif __name__ == '__main__':\n    main(strategy='{strategy}')"
    done = run_script(text, env={"PYTHONPATH": str(tmp_path)}, fresh=True)
    assert done.stderr.count("Failed to initialize NumPy") == 1


# -- in processes of their own


@pytest.mark.slow
def test_spawn_without_main_guard_is_explained(run_script: RunScript) -> None:
    done = run_script(f"{SPAWNS}\nmain()", expect=1)
    assert done.stderr.splitlines()[-1] == (
        "stratagem.errors.ConfigurationError: strategy='ddp_spawn' starts new interpreters, each "
        "of which imports the script, and the script trains when it is imported: put the code "
        "that trains under `if __name__ == '__main__':`, or pass strategy='ddp', which needs no "
        "such line"
    )
    assert done.stderr.count("Traceback") == 1
    assert "bootstrapping" not in done.stderr


@pytest.mark.slow
def test_spawned_worker_without_main_guard_is_explained(
    run_script: RunScript,
) -> None:
    call = "main('auto', num_workers=1, multiprocessing_context='spawn')"
    done = run_script(f"{SPAWNS.replace('devices=2', 'devices=1')}\n{call}", expect=1)
    assert (
        "ConfigurationError: 'SpawnProcess-1', a process such as a DataLoader's worker, imports "
        "the script, which trains when it is imported: put that code under "
        "`if __name__ == '__main__':`\n"
    ) in done.stderr


@pytest.mark.slow
def test_a_lambda_under_spawn_is_named(run_script: RunScript) -> None:
    done = run_script(
        f"{SPAWNS}\nif __name__ == '__main__':\n    main(collate_fn=lambda x: x)", expect=1
    )
    last = done.stderr.splitlines()[-1]
    assert "strategy='ddp_spawn' pickles your objects (launcher 'spawn')" in last
    assert "loaders.collate_fn (a lambda) cannot be pickled" in last
    assert "use strategy='ddp'" in last
