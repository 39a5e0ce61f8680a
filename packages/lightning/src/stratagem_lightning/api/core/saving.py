"""Hyperparameters in files of YAML, which scripts write and read by themselves."""

from __future__ import annotations

import importlib
import importlib.util
import json
from enum import Enum
from pathlib import Path
from typing import Any

from stratagem.errors import ConfigurationError
from stratagem.launch import rank_zero_warn
from stratagem.loggers import as_mapping, as_plain


def save_hparams_to_yaml(config_yaml: str | Path, hparams: Any, use_omegaconf: bool = True) -> None:
    """Write hyperparameters as YAML; an enum member is written as its name.

    Values that are not weights-only-safe data are omitted, with a warning: they could not be read
    back.

    Args:
        config_yaml: the file, in an existing folder.
        hparams: a mapping (also of OmegaConf), an argparse.Namespace or a dataclass.
        use_omegaconf: ignored: interpolations are written as their resolved values.

    Raises:
        ConfigurationError: the folder does not exist, or `hparams` has another type.
    """
    path = Path(config_yaml)
    if not path.parent.is_dir():
        raise ConfigurationError(
            f"save_hparams_to_yaml({str(path)!r}): there is no folder {str(path.parent)!r}: make it"
        )
    yaml = importlib.import_module("yaml")
    kept = {}
    for name, value in as_mapping(hparams).items():
        plain = value.name if isinstance(value, Enum) else as_plain(value)
        if _is_text_of_an_object(value, plain):
            rank_zero_warn(
                f"Skipping {name!r} parameter in {str(path)!r}: a {type(value).__name__} cannot be "
                "read back from YAML; pass it to the model again when it is loaded"
            )
        else:
            kept[name] = plain
    with path.open("w", encoding="utf-8") as stream:
        yaml.safe_dump(json.loads(json.dumps(kept)), stream)


def load_hparams_from_yaml(config_yaml: str | Path, use_omegaconf: bool = True) -> Any:
    """Return the hyperparameters of a YAML file; {} and a warning without the file.

    Args:
        config_yaml: the file.
        use_omegaconf: return a DictConfig, where omegaconf is installed.

    Raises:
        ConfigurationError: it holds objects, which would have to be executed.
    """
    hparams = of_file(config_yaml)
    if use_omegaconf and importlib.util.find_spec("omegaconf") is not None:
        return importlib.import_module("omegaconf").OmegaConf.create(hparams)
    return hparams


def of_file(path: str | Path | None) -> dict[str, Any]:
    """Return the hyperparameters of a YAML file; no values and a warning without the file.

    Raises:
        ConfigurationError: it holds objects, which would have to be executed.
    """
    if path is None:
        return {}
    if not Path(path).exists():
        rank_zero_warn(f"there is no file {str(path)!r}, so that no hyperparameters are read")
        return {}
    yaml = importlib.import_module("yaml")
    with Path(path).open(encoding="utf-8") as stream:
        try:
            kept: dict[str, Any] = yaml.safe_load(stream) or {}
        except yaml.constructor.ConstructorError as error:
            raise ConfigurationError(
                f"{str(path)!r} holds more than plain values, and nothing in it is executed "
                f"({error.problem}): take that line out, and pass its value as an argument"
            ) from error
    return kept


def _is_text_of_an_object(value: Any, plain: Any) -> bool:
    return isinstance(plain, str) and not isinstance(value, (str, Enum))


def load_from_checkpoint(
    cls: type[Any],
    checkpoint_path: str | Path,
    map_location: Any = None,
    hparams_file: str | Path | None = None,
    strict: bool | None = None,
    weights_only: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Make a model of a class from a checkpoint, without an override of `load_from_checkpoint`.

    Args:
        cls: a LightningModule's or a LightningDataModule's class.
        checkpoint_path, map_location, hparams_file, strict, weights_only, **kwargs: of
            `load_from_checkpoint`.
    """
    ours = (kind for kind in cls.__mro__ if kind.__module__.startswith("stratagem_lightning."))
    method: Any = next(vars(kind)[_LOAD] for kind in ours if _LOAD in vars(kind))
    named = {"map_location": map_location, "hparams_file": hparams_file, "strict": strict}
    given = {name: value for name, value in named.items() if value is not None}
    return method.__func__(cls, checkpoint_path, weights_only=weights_only, **given, **kwargs)


_LOAD = "load_from_checkpoint"
