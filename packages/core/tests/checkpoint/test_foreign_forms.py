"""Checkpoints and scripts of other libraries: plugins read them, or an error says what to install.

The plugins of this file are made in the process; test_names.py of stratagem-lightning and
tests/test_wheels.py have real ones.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stratagem.one_device.plugin
from stratagem import Module, Trainer
from stratagem.discovery import PluginEntry, Registry, hookimpl, registry
from stratagem.errors import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    ConfigurationError,
    PluginError,
)
from stratagem_extras.checkpoints.weights import convert
from stratagem_torch.launch import run

INSTALL = "pip install stratagem-lightning"
Read = Callable[[dict[str, Any], str], Any]


class Line(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1, bias=False)


def entry(distribution: str, plugin: object, requires_core: str = "") -> PluginEntry:
    return PluginEntry("entry", "nowhere", distribution, "1.0", requires_core, lambda: plugin)


def reader(distribution: str, read: Read) -> PluginEntry:
    """A plugin that reads checkpoints by a function."""
    module = types.ModuleType("plugin")

    def stratagem_read_checkpoint(contents: dict[str, Any], path: str) -> Any:
        return read(contents, path)

    module.stratagem_read_checkpoint = hookimpl(stratagem_read_checkpoint)  # type: ignore[attr-defined]
    return entry(distribution, module)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Registry]:
    """Leave this process with core and the given plugins."""

    def install(*entries: PluginEntry) -> Registry:
        core = entry("stratagem-core", stratagem.one_device.plugin)
        found = Registry.discover((core, *entries), {})
        monkeypatch.setattr(registry, "_registry", found)
        return found

    return install


def saved(folder: Path, **contents: Any) -> Path:
    path = folder / "theirs.ckpt"
    torch.save(contents, path)
    return path


def read_weights(contents: dict[str, Any], path: str) -> dict[str, Any] | None:
    weight = contents.get("weight")
    return None if weight is None else {"state_dict": {"layer.weight": weight}}


def test_a_plugin_reads_a_checkpoint_of_another_form(
    installed: Callable[..., Registry], tmp_path: Path
) -> None:
    installed(reader("reads", read_weights))
    path = saved(tmp_path, weight=torch.full((1, 1), 5.0))
    model = Line.load_from_checkpoint(path)
    assert model.layer.weight.item() == 5.0
    model.layer.weight.data.zero_()
    model.validation_step = lambda batch: None  # type: ignore[method-assign, assignment, misc]
    trainer = Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    trainer.validate(model, [torch.ones(1, 1)], ckpt_path=path, verbose=False)
    assert model.layer.weight.item() == 5.0


def test_the_first_of_two_plugins_that_knows_the_form_answers(
    installed: Callable[..., Registry], tmp_path: Path
) -> None:
    asked: list[str] = []

    def knows_nothing(contents: dict[str, Any], path: str) -> None:
        asked.append(path)

    path = saved(tmp_path, weight=torch.full((1, 1), 5.0))
    for entries in (
        (reader("a-knows", read_weights), reader("b-knows-nothing", knows_nothing)),
        (reader("a-knows-nothing", knows_nothing), reader("b-knows", read_weights)),
    ):
        installed(*entries)
        assert Line.load_from_checkpoint(path).layer.weight.item() == 5.0
    # The plugin that was registered later is asked first.
    assert asked == [str(path)]


def test_the_plugin_that_fails_is_named(installed: Callable[..., Registry], tmp_path: Path) -> None:
    def fails(contents: dict[str, Any], path: str) -> Any:
        return contents["no such key"]

    def refuses(contents: dict[str, Any], path: str) -> Any:
        raise CheckpointCorruptError(f"{path!r} is damaged")

    path = saved(tmp_path, weight=torch.ones(1, 1))
    installed(reader("reads", read_weights), reader("strange", fails))
    with pytest.raises(PluginError, match="the plugin strange:entry failed in stratagem_read_ch"):
        Line.load_from_checkpoint(path)
    installed(reader("strange", lambda contents, path: [contents]))
    with pytest.raises(PluginError, match=r"the plugin strange:entry returned a list .* a dict"):
        Line.load_from_checkpoint(path)
    installed(reader("strange", refuses))
    with pytest.raises(CheckpointCorruptError, match=r"theirs\.ckpt' is damaged"):
        Line.load_from_checkpoint(path)


def test_no_plugin_is_asked_about_a_trainers_own_checkpoint(
    installed: Callable[..., Registry], tmp_path: Path
) -> None:
    def fails(contents: dict[str, Any], path: str) -> Any:
        raise AssertionError

    installed(reader("strange", fails))
    path = saved(tmp_path, format_version=2, state_dict=Line().state_dict())
    Line.load_from_checkpoint(path)


def one_line(error: BaseException) -> str:
    assert "\n" not in str(error)
    return str(error)


def test_lightning_checkpoint_without_plugin_names_the_package(
    installed: Callable[..., Registry], tmp_path: Path
) -> None:
    installed()
    path = saved(tmp_path, **{"pytorch-lightning_version": "2.6.6", "state_dict": {}})
    with pytest.raises(CheckpointMismatchError) as caught:
        Line.load_from_checkpoint(path)
    said = one_line(caught.value)
    assert "theirs.ckpt' is a checkpoint of Lightning '2.6.6'" in said
    assert INSTALL in said
    with pytest.raises(ConfigurationError) as refused:
        convert(path, tmp_path / "written.ckpt", to="lightning")
    assert INSTALL in one_line(refused.value)
    with pytest.raises(ConfigurationError, match=INSTALL):
        Trainer(accelerator="cpu", logger=False, plugins="lightning")
    with pytest.raises(ImportError, match=INSTALL):
        from stratagem.checkpoint import LightningCheckpointIO  # type: ignore[attr-defined] # noqa: F401


def test_as_lightning_without_plugin_names_the_package(
    installed: Callable[..., Registry], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    installed()
    with pytest.raises(SystemExit) as caught:
        run.run(["--as-lightning", str(script)])
    (line,) = capsys.readouterr().err.splitlines()
    assert (caught.value.code, INSTALL in line) == (2, True)
    assert line.startswith("stratagem run: error: --as-lightning cannot be used.")
    # Installed, and made for another release of core.
    installed(entry("stratagem-lightning", None, requires_core=">=9,<10"))
    with pytest.raises(SystemExit) as caught:
        run.run(["--as-lightning", str(script), "--devices", "2"])
    (line,) = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2
    assert "is incompatible: requires stratagem-core>=9,<10" in line
    assert "pip install --upgrade stratagem-lightning stratagem-core" in line
    with pytest.raises(SystemExit):
        run.run(["--help"])
    assert "--as-lightning" in capsys.readouterr().out
