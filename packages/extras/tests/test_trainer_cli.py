"""TrainerCLI and `stratagem fit`: a run that a command line and config files describe."""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer, Rprop
from torch.utils.data import DataLoader

from stratagem import DataModule, Module
from stratagem.callbacks import LearningRateMonitor
from stratagem.errors import ConfigurationError, MissingPackageError

yaml = pytest.importorskip("yaml", reason="`nox -s loggers` runs this: PyYAML is not installed")
pytest.importorskip(
    "jsonargparse", reason="`nox -s loggers` runs this: jsonargparse is not installed"
)

# After the look for jsonargparse.
from stratagem_extras.cli import parser as parsing  # noqa: E402
from stratagem_extras.cli.parser import OptimizerCallable  # noqa: E402
from stratagem_extras.cli.save_config import WITH_NONE, SaveConfigCallback  # noqa: E402
from stratagem_extras.cli.trainer_cli import TrainerCLI  # noqa: E402


class Line(Module):
    """Of some width."""

    def __init__(self, width: int = 2, rate: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(1, width)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.ones(4, 1), batch_size=2)  # type: ignore[arg-type]

    def configure_optimizers(self) -> Optimizer:
        return SGD(self.parameters(), lr=self.hparams.rate)


class Plain(Line):
    """Without an optimizer of its own."""

    configure_optimizers = Module.configure_optimizers


class Injected(Line):
    """Is given what makes its optimizer."""

    def __init__(self, optimizer: OptimizerCallable = SGD) -> None:
        super().__init__()
        self.make_optimizer = optimizer

    def configure_optimizers(self) -> Optimizer:
        return self.make_optimizer(self.parameters())


class Ones(DataModule):
    """So many samples."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.count = count

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.ones(self.count, 1), batch_size=2)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


QUIET = [
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
    "--trainer.max_epochs=1",
    "--trainer.enable_progress_bar=false",
]


def made(*args: str, **options: Any) -> TrainerCLI:
    """Return what arguments make, without a run."""
    return TrainerCLI(**{"model_class": Line, "run": False, **options}, args=[*QUIET, *args])


def test_options_go_before_files_and_later_files_before_earlier_ones() -> None:
    Path("one.yaml").write_text("model: {width: 3, rate: 0.5}\ntrainer: {max_steps: 7}\n")
    Path("two.yaml").write_text("model: {width: 4}\n")
    cli = made("--config=one.yaml", "--config=two.yaml", "--trainer.max_steps=9")
    assert (cli.model.layer.out_features, cli.model.hparams.rate) == (4, 0.5)
    assert cli.trainer.options.max_steps == 9
    assert cli.config_dump["model"] == {"width": 4, "rate": 0.5}
    assert cli.subcommand is None


def test_a_word_for_no_and_a_class_are_no_names() -> None:
    assert made("--trainer.logger=false").trainer.loggers == []
    assert type(made("--trainer.logger=csv").trainer.loggers[0]).__name__ == "CSVLogger"
    strategy = made("--trainer.strategy=stratagem.strategies.SingleDeviceStrategy").trainer.strategy
    assert type(strategy).__name__ == "SingleDeviceStrategy"
    named = made("--trainer.profiler=stratagem.profilers.SimpleProfiler").trainer
    assert type(named.profiler) is type(made("--trainer.profiler=simple").trainer.profiler)
    assert TrainerCLI.subcommands()["predict"] == {"model", "dataloaders", "datamodule"}


def test_classes_are_named_by_their_place() -> None:
    config = f"""
model:
  class_path: {__name__}.Line
  init_args: {{width: 5}}
data:
  class_path: {__name__}.Ones
trainer:
  callbacks:
    - class_path: LearningRateMonitor
      init_args: {{logging_interval: epoch}}
  logger:
    class_path: stratagem.loggers.CSVLogger
    init_args: {{save_dir: logs}}
"""
    sys.modules.setdefault(__name__, sys.modules[Line.__module__])
    Path("config.yaml").write_text(config)
    cli = made("--config=config.yaml", model_class=None)
    assert isinstance(cli.model, Line)
    assert cli.model.layer.out_features == 5
    assert isinstance(cli.datamodule, Ones)
    assert any(isinstance(each, LearningRateMonitor) for each in cli.trainer.callbacks)
    assert cli.trainer.logger is not None
    assert str(cli.trainer.logger.save_dir) == "logs"


def test_trainer_cli_saves_its_config_without_overwriting() -> None:
    cli = TrainerCLI(Line, Ones, args=["fit", *QUIET, "--data.count=8", "--seed_everything=3"])
    folder = Path(cli.trainer.log_dir)
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert saved["data"] == {"count": 8}
    assert saved["seed_everything"] == 3
    assert saved["trainer"]["max_epochs"] == 1
    assert cli.trainer.global_step == 4
    assert list((folder / "checkpoints").iterdir())
    # The run is resumed, in its own folder: what is there stays.
    again = ["fit", *QUIET, "--trainer.max_epochs=2", "--data.count=8", "--seed_everything=3"]
    saver = cli.trainer.checkpoint_callback
    assert saver is not None
    resumed = TrainerCLI(Line, Ones, args=[*again, f"--ckpt_path={saver.best_model_path}"])
    assert resumed.trainer.log_dir == str(folder)
    assert yaml.safe_load((folder / "config.yaml").read_text()) == saved
    assert yaml.safe_load((folder / "config-v1.yaml").read_text())["trainer"]["max_epochs"] == 2


def test_a_config_that_was_saved_makes_the_same_run() -> None:
    cli = TrainerCLI(Line, args=["fit", *QUIET, "--model.width=3"])
    config = Path(cli.trainer.log_dir) / "config.yaml"
    again = TrainerCLI(Line, args=["fit", f"--config={config}"])
    assert again.model.layer.out_features == 3
    assert again.config_dump == cli.config_dump


def test_a_config_has_the_arguments_of_tensorboards_writer() -> None:
    pytest.importorskip("tensorboard", reason="`nox -s loggers` runs this: it is not installed")
    words = ["--trainer.logger=stratagem.loggers.TensorBoardLogger", "--trainer.logger.save_dir=tb"]
    (logger,) = made(*words, "--trainer.logger.flush_secs=7").trainer.loggers
    assert logger.experiment.flush_secs == 7
    logger.finalize("success")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", f"{__name__}.Nothing"], "has no attribute 'Nothing'"),
        (["--model", f"{__name__}.Line", "--model.widht=3"], "Option 'widht' is not accepted"),
        (["--trainer.max_epochs=three"], "Expected int"),
    ],
)
def test_an_error_has_a_few_lines_and_no_usage(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        TrainerCLI(args=["fit", *arguments])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) < 10
    for noise in ("usage:", "Subtypes", "NoneType", "<class"):
        assert noise not in error


def test_print_config_and_help_list_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        made("--print_config")
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["model"] == {"width": 2, "rate": 0.1}
    assert printed["trainer"]["max_epochs"] == 1
    with pytest.raises(SystemExit):
        TrainerCLI(Line, args=["--help"])
    assert "predict" in capsys.readouterr().out


def test_default_env_reads_environment_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STRATAGEM_MODEL__WIDTH", "6")
    assert made().model.layer.out_features == 2
    assert made(parser_kwargs={"default_env": True}).model.layer.out_features == 6
    monkeypatch.setenv("OURS_MODEL__WIDTH", "7")
    options = {"default_env": True, "env_prefix": "OURS"}
    assert made(parser_kwargs=options).model.layer.out_features == 7


def test_arguments_are_linked() -> None:
    class Linked(TrainerCLI):
        def add_arguments_to_parser(self, parser: Any) -> None:
            parser.link_arguments("data.count", "model.width")
            parser.add_component_args(LearningRateMonitor, "monitor")

    cli = Linked(
        Line, Ones, args=[*QUIET, "--data.count=6", "--monitor.logging_interval=step"], run=False
    )
    assert cli.model.layer.out_features == 6
    found = [each for each in cli.trainer.callbacks if isinstance(each, LearningRateMonitor)]
    assert [each.logging_interval for each in found] == ["step"]


def test_aliases_of_a_config_stand_for_a_bounded_number_of_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    levels = "".join(
        f"x{level}: &x{level} [{', '.join([f'*x{level - 1}'] * 10)}]\n" for level in range(1, 10)
    )
    for text in (f"x0: &x0 [1]\n{levels}", "model: &x [*x]\n"):
        config.write_text(text)
        with pytest.raises(SystemExit):
            TrainerCLI(Line, args=["fit", "--config", str(config)], run=True)
        assert "the config has more than 100000 values" in capsys.readouterr().err


def test_a_key_twice_in_a_config_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    for text, lines in (
        ("trainer:\n  max_epochs: 1\nmodel: {}\ntrainer:\n  devices: 1\n", "1 and 4"),
        ("trainer: {max_epochs: 1, max_epochs: 2}\n", "1 and 1"),
        ("trainer:\n  callbacks:\n  - class_path: A\n    class_path: B\n", "3 and 4"),
    ):
        config.write_text(text)
        with pytest.raises(SystemExit):
            TrainerCLI(Line, args=["fit", "--config", str(config)], run=True)
        assert f"twice in one mapping, in lines {lines}: write" in capsys.readouterr().err


def test_yaml_alias_of_a_config_is_resolved() -> None:
    text = "{model: {width: &n 3, rate: 0.5}, data: {count: *n}}"
    assert parsing._load_bounded(text) == {
        "model": {"width": 3, "rate": 0.5},
        "data": {"count": 3},
    }


def test_the_optimizer_of_a_config_is_the_models() -> None:
    args = ["--optimizer=torch.optim.Rprop", "--optimizer.lr=0.25", "--lr_scheduler=StepLR"]
    cli = made(*args, "--lr_scheduler.step_size=5", model_class=Plain)
    optimizers, schedulers = cli.model.configure_optimizers()
    assert isinstance(optimizers[0], Rprop)
    assert optimizers[0].param_groups[0]["lr"] == 0.25
    assert schedulers[0].step_size == 5
    cli.trainer.fit(cli.model)
    # What this fit steps through is no second class of that name. (bitsandbytes, which another test
    # of this process may have imported, has an Adam, but no Rprop.)
    alone = made("--optimizer=Rprop", "--optimizer.lr=0.5", model_class=Plain)
    assert type(alone.model.configure_optimizers()) is Rprop
    with pytest.warns(UserWarning, match="`Line.configure_optimizers` will be overridden by `"):
        made(*args, "--lr_scheduler.step_size=5")
    plateau = f"--lr_scheduler={parsing.__name__}.ReduceLROnPlateau"
    cli = made(args[0], plateau, "--lr_scheduler.monitor=loss", model_class=Plain)
    assert cli.model.configure_optimizers()["lr_scheduler"]["monitor"] == "loss"


def test_an_argument_that_makes_an_optimizer_is_given_one() -> None:
    args = ["--model.optimizer=torch.optim.Adam", "--model.optimizer.lr=0.125"]
    cli = made(*args, model_class=Injected, auto_configure_optimizers=False)
    optimizer = cli.model.configure_optimizers()
    assert isinstance(optimizer, Adam)
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_two_automatic_optimizers_are_refused() -> None:
    class Two(TrainerCLI):
        def add_arguments_to_parser(self, parser: Any) -> None:
            parser.add_optimizer_args((SGD,), "one")
            parser.add_optimizer_args((Adam,), "two")

    with pytest.raises(ConfigurationError, match=r"expected at most one of each .*one, two"):
        Two(Plain, args=[*QUIET, "--one=torch.optim.SGD", "--one.lr=0.1"], run=False)


def test_before_and_after_a_run_come_the_clis_own_methods() -> None:
    called: list[str] = []

    class Own(TrainerCLI):
        def before_fit(self) -> None:
            called.append("before")

        def fit(self, **arguments: Any) -> None:
            called.append(type(arguments["model"]).__name__)

        def after_fit(self) -> None:
            called.append("after")

    Own(Line, args=["fit", *QUIET])
    assert called == ["before", "Line", "after"]


def test_trainer_cli_refuses_a_useless_saver_and_unknown_classes() -> None:
    with pytest.raises(ConfigurationError, match=r"save_to_log_dir=False` only makes sense"):
        SaveConfigCallback(None, None, save_to_log_dir=False)
    with pytest.raises(ConfigurationError, match=r"expected a Trainer, Module, DataModule or Ca"):
        parsing.TrainerArgumentParser().add_component_args(dict, "x")


def test_missing_jsonargparse_names_the_pip_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from stratagem_extras.cli import commands as training

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert training.fit(["config.yaml"]) == 2
    assert "pip install 'stratagem-core[cli]'" in capsys.readouterr().err
    monkeypatch.delitem(sys.modules, "stratagem_extras.cli")
    with pytest.raises(MissingPackageError, match="TrainerCLI needs the package 'jsonargparse'"):
        importlib.import_module("stratagem_extras.cli")


MODEL = """
import torch
from stratagem import Module
class Net(Module):
    def __init__(self, width: int = 2):
        super().__init__()
        self.layer = torch.nn.Linear(1, width)
    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(8, 1), batch_size=2)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""


def test_fit_command_trains_from_a_config_file_on_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    (tmp_path / "run.yaml").write_text(
        "model: {class_path: net.Net, init_args: {width: 3}}\n"
        "trainer: {accelerator: cpu, devices: 2, strategy: ddp, enable_progress_bar: false}\n"
    )
    program = [sys.executable, "-m", "stratagem", "fit", "run.yaml", "--trainer.max_steps=2"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=280, env=os.environ)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "stratagem_logs" / "version_0"
    assert yaml.safe_load((folder / "config.yaml").read_text())["trainer"]["devices"] == 2
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["epoch=0-step=2.ckpt"]


def test_a_config_may_be_of_namespaces_and_describe_callbacks_that_are_always_there() -> None:
    monitor = {"class_path": "stratagem.callbacks.LearningRateMonitor"}
    cli = TrainerCLI(
        Line,
        args=argparse.Namespace(model=argparse.Namespace(rate=0.5), trainer={"logger": False}),  # type: ignore[arg-type]
        trainer_defaults={"callbacks": [monitor, LearningRateMonitor("epoch")]},
        save_config_callback=None,
        run=False,
    )
    assert cli.config["model"]["rate"] == 0.5
    found = [c for c in cli.trainer.callbacks if isinstance(c, LearningRateMonitor)]
    assert [callback.logging_interval for callback in found] == [None, "epoch"]


class Noted(Line):
    """Is given the path of the checkpoint that a run continues from."""

    def __init__(self, width: int = 2, rate: float = 0.1, note: str | None = None) -> None:
        super().__init__(width, rate)
        self.note = note


class Linked(TrainerCLI):
    def add_arguments_to_parser(self, parser: parsing.TrainerArgumentParser) -> None:
        parser.link_arguments("ckpt_path", "model.note")


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_a_config_of_a_subcommand_is_read_without_subcommands(command: str, tmp_path: Path) -> None:
    class NotRun(TrainerCLI):
        def _run_subcommand(self, subcommand: str) -> None:
            text = self._parser().dump(self._of_subcommand(self.config), *WITH_NONE)
            (tmp_path / "config.yaml").write_text(text)

    NotRun(Line, args=[command, *QUIET, "--model.rate=0.5"])
    saved = tmp_path / "config.yaml"
    assert "ckpt_path" in yaml.safe_load(saved.read_text())
    cli = TrainerCLI(Line, args=["--config", str(saved)], run=False)
    assert cli.model.hparams.rate == 0.5
    assert "ckpt_path" not in cli.config


def test_ckpt_path_may_be_linked_to_an_argument_of_the_model() -> None:
    cli = Linked(Noted, args=[*QUIET, "--ckpt_path=a.ckpt"], run=False)
    assert (cli.model.note, cli.config["ckpt_path"]) == ("a.ckpt", "a.ckpt")

    class NotRun(Linked):
        def _run_subcommand(self, subcommand: str) -> None:
            pass

    assert NotRun(Noted, args=["fit", *QUIET, "--ckpt_path=b.ckpt"]).model.note == "b.ckpt"


def test_a_program_without_subcommands_may_have_a_ckpt_path_of_its_own() -> None:
    class Own(TrainerCLI):
        def add_arguments_to_parser(self, parser: parsing.TrainerArgumentParser) -> None:
            parser.add_argument("--ckpt_path", type=str, default="last")

    assert Own(Line, args=QUIET, run=False).config["ckpt_path"] == "last"
