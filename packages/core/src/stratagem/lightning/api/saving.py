"""Hyperparameters in files: YAML, and the table of names and values of older versions."""

from __future__ import annotations

import ast
import csv
import importlib
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stratagem.launch.rank_zero import rank_zero_warn
from stratagem.loggers.parameters import as_mapping, as_plain


def load_hparams_from_yaml(config_yaml: str | Path, use_omegaconf: bool = True) -> dict[str, Any]:
    """Return what a YAML file of hyperparameters holds; nothing in it is executed.

    Args:
        config_yaml: the file; where there is none, a warning says so, and there are none.
        use_omegaconf: not needed here: they come as a dict.
    """
    if not _is_there(config_yaml):
        return {}
    with Path(config_yaml).open(encoding="utf-8") as stream:
        kept: dict[str, Any] = importlib.import_module("yaml").safe_load(stream) or {}
    return kept


def save_hparams_to_yaml(config_yaml: str | Path, hparams: Any, use_omegaconf: bool = True) -> None:
    """Write hyperparameters to a YAML file, objects among them as their texts.

    Args:
        config_yaml: the file, in a folder that is there.
        hparams: a mapping, an argparse.Namespace or a dataclass.
        use_omegaconf: not needed here.
    """
    with Path(config_yaml).open("w", encoding="utf-8") as stream:
        importlib.import_module("yaml").safe_dump(as_plain(as_mapping(hparams)), stream)


def load_hparams_from_tags_csv(tags_csv: str | Path) -> dict[str, Any]:
    """Return the hyperparameters of a table with the columns key and value.

    Args:
        tags_csv: the file; where there is none, a warning says so, and there are none.
    """
    if not _is_there(tags_csv):
        return {}
    with Path(tags_csv).open(encoding="utf-8", newline="") as stream:
        return {row["key"]: _read(row["value"]) for row in csv.DictReader(stream)}


def save_hparams_to_tags_csv(tags_csv: str | Path, hparams: Mapping[str, Any] | Namespace) -> None:
    """Write hyperparameters as a table with the columns key and value."""
    with Path(tags_csv).open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerows([("key", "value"), *as_mapping(hparams).items()])


def _is_there(path: str | Path) -> bool:
    there = Path(path).is_file()
    if not there:
        rank_zero_warn(f"there is no {str(path)!r}, so that no hyperparameters are read from it")
    return there


def _read(text: str) -> Any:
    """Return the number, bool, None or collection that a text is, or else the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
