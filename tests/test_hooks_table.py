"""The tables of hooks in docs/guides/callbacks.md have a row for each hook of the code."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from stratagem import Callback, Module
from stratagem.trainer.hooks import HOOKS

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs" / "tools"))

hooks: Any = import_module("hooks")


def test_the_rows_are_the_hooks_of_the_code() -> None:
    tables = hooks.fragments()
    rows = tables["callback-hooks"].splitlines()[2:]
    assert len(rows) == len(HOOKS) == 37
    assert all(f"Callback.{name}>`" in row for name, row in zip(HOOKS, rows, strict=True))
    batch_end = rows[HOOKS.index("on_train_batch_end")]
    assert "`outputs`, `batch`, `batch_idx` | each | yes |" in batch_end
    assert "| no |" in rows[HOOKS.index("on_validation_end")]
    for name in ("prepare_data", "on_after_batch_transfer", "optimizer_step"):
        assert f"| `{name}`" in tables["module-hooks"]


def test_a_hook_without_a_row_fails_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(hooks.CHANGES, "on_fit_end")
    with pytest.raises(ValueError, match=r"docs/tools/hooks.py: CHANGES lacks rows .*on_fit_end"):
        hooks.callback_table()
    monkeypatch.setitem(hooks.MODULE_CHANGES, "on_gone", "-")
    with pytest.raises(ValueError, match=r"rows for \['on_gone'\], which are no hooks"):
        hooks.module_table()


def test_hooks_table_has_time_and_arguments() -> None:
    assert hooks.when(Callback.on_fit_end) == "When fit ends without an exception"
    assert hooks.arguments(Callback.on_before_optimizer_step, 3) == "`optimizer`"
    assert hooks.arguments(Module.transfer_batch_to_device, 1).startswith("`batch`, `device`")
