"""Hyperparameters of models and DataModules: kept, saved, given back, and handed to loggers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from stratagem import DataModule, Module, Trainer
from stratagem.errors import CheckpointMismatchError, UserCodeError
from stratagem.loggers import Logger


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = (self.layer(batch[0]) - batch[1]).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def quiet(folder: Path, **options: Any) -> Trainer:
    options = {"logger": False, "max_epochs": 1, **options}
    return Trainer(
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_progress_bar=False,
        **options,
    )


class Rows(DataModule):
    """Has hyperparameters, as one dict, and a state."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.save_hyperparameters(options)
        self.seen = 0

    def train_dataloader(self) -> Any:
        self.seen += 1
        return DataLoader(TensorDataset(torch.randn(8, 4), torch.randn(8, 1)), self.hparams.size)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(8, 4), torch.randn(8, 1)), self.hparams.size)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Configured(Net):
    """Is made from one dict of options."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.save_hyperparameters(options)


class Other(DataModule):
    def __init__(self, other: int) -> None:
        super().__init__()


def test_dict_argument_round_trips_through_hyperparameters(
    tmp_path: Path,
) -> None:
    model, data = Configured({"rate": 0.5}), Rows({"size": 4})
    trainer = quiet(tmp_path)
    trainer.fit(model, datamodule=data)
    path = tmp_path / "both.ckpt"
    trainer.save_checkpoint(path)
    again = Configured.load_from_checkpoint(path)
    assert again.hparams == {"rate": 0.5}
    assert Configured.load_from_checkpoint(path, rate=1.5).hparams.rate == 1.5
    rows = Rows.load_from_checkpoint(path)
    assert (rows.hparams.size, rows.seen) == (4, 1)
    with pytest.raises(
        CheckpointMismatchError, match=r"both\.ckpt.*holds no value of other, which"
    ):
        Other.load_from_checkpoint(path)


def test_loggers_are_given_the_hyperparameters_of_model_and_data(tmp_path: Path) -> None:
    class Listening(Logger):
        given: dict[str, Any] | None = None

        def log_metrics(self, metrics: Any, step: int | None = None) -> None: ...

        def log_hyperparams(self, params: Any) -> None:
            self.given = dict(params)

    logger = Listening()
    model = Configured({"rate": 0.5})
    model.hparams.rate = 0.1
    quiet(tmp_path, logger=logger).fit(model, datamodule=Rows({"size": 4}))
    assert logger.given == {"rate": 0.5, "size": 4}
    logger.given = None

    class Validated(Configured):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            """Nothing."""

    again = Validated({"rate": 0.5})
    quiet(tmp_path, logger=logger).validate(again, datamodule=Rows({"size": 4}), verbose=False)
    assert logger.given == {"rate": 0.5, "size": 4}
    logger.given = None
    quiet(tmp_path, logger=logger, enable_autolog_hparams=False).fit(
        model, datamodule=Rows({"size": 4})
    )
    assert logger.given is None
    with pytest.raises(UserCodeError, match=r"both have the hyperparameter\(s\) size, with diff"):
        quiet(tmp_path).fit(Configured({"size": 3}), datamodule=Rows({"size": 4}))


def logged(function: Callable[..., None]) -> Callable[..., None]:
    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> None:
        function(*args, **kwargs)

    return called


def test_a_decorated_init_is_one_too() -> None:
    class Decorated(DataModule):
        @logged
        def __init__(self, width: int, depth: int = 2) -> None:
            super().__init__()
            self.save_hyperparameters(ignore="width")

    assert Decorated(3).hparams == {"depth": 2}


def test_save_hyperparameters_ignore_of_a_subclass_wins() -> None:
    class Base(Net):
        def __init__(self, width: int, depth: int) -> None:
            super().__init__()
            self.save_hyperparameters(ignore="width")

    class Derived(Base):
        def __init__(self, width: int, depth: int) -> None:
            super().__init__(width, depth)
            self.save_hyperparameters(ignore=["depth"])

    assert Derived(1, 2).hparams == {"width": 1}


def test_a_copy_has_its_own_hyperparameters() -> None:
    first = Configured({"rate": 0.5})
    second = copy.deepcopy(first)
    second.hparams.rate = 1.0
    assert first.hparams.rate == 0.5


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(8))


def test_a_datamodule_is_made_from_datasets() -> None:
    class Sized(DataModule):
        def __init__(self, batch_size: int, name: str) -> None:
            super().__init__()
            self.batch_size, self.name = batch_size, name

    data = Sized.from_datasets(
        range(8), {"a": range(4), "b": range(6)}, [range(2)], batch_size=2, name="sizes"
    )
    assert (data.batch_size, data.name) == (2, "sizes")
    assert len(data.train_dataloader()) == 4
    assert {name: len(loader) for name, loader in data.val_dataloader().items()} == {"a": 2, "b": 3}
    assert [len(loader) for loader in data.test_dataloader()] == [1]
    assert data.predict_dataloader() is None
    assert data.train_dataloader() is not data.train_dataloader()
    stream = DataModule.from_datasets(Stream(), batch_size=8).train_dataloader()
    assert [batch.tolist() for batch in stream] == [list(range(8))]


class WithConfigs(Net):
    def __init__(self, config: Any, parts: dict[str, Any], rate: float = 0.5) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_configs_of_omegaconf_come_back_from_a_checkpoint(tmp_path: Path) -> None:
    omegaconf = pytest.importorskip("omegaconf")
    create = omegaconf.OmegaConf.create
    config = create({"rate": 0.5, "twice": "${rate}", "sizes": [1, 2]})
    parts = {"first": [create({"width": 4})], "text": "plain"}
    trainer = quiet(tmp_path)
    trainer.fit(WithConfigs(config, parts), datamodule=Rows({"size": 4}))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)["hyper_parameters"]
    assert saved["config"] == {"rate": 0.5, "twice": 0.5, "sizes": [1, 2]}
    hparams = WithConfigs.load_from_checkpoint(tmp_path / "a.ckpt").hparams
    assert isinstance(hparams.config, omegaconf.DictConfig)
    assert (hparams.config.twice, hparams.config.sizes[1]) == (0.5, 2)
    assert hparams.parts["first"][0].width == 4
    assert hparams.parts["text"] == "plain"


def test_a_config_that_holds_all_hyperparameters_comes_back_as_one(tmp_path: Path) -> None:
    omegaconf = pytest.importorskip("omegaconf")
    model = Configured(omegaconf.OmegaConf.create({"rate": 0.5, "parts": {"width": 4}}))
    assert isinstance(model.hparams, omegaconf.DictConfig)
    trainer = quiet(tmp_path)
    trainer.fit(model, datamodule=Rows({"size": 4}))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = Configured.load_from_checkpoint(tmp_path / "a.ckpt", rate=1.0)
    assert isinstance(loaded.hparams, omegaconf.DictConfig)
    assert (loaded.hparams.rate, loaded.hparams.parts.width) == (1.0, 4)


def test_a_loaded_config_calls_no_resolver(tmp_path: Path) -> None:
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create({"rate": 0.5})
    trainer = quiet(tmp_path)
    trainer.fit(WithConfigs(config, {}), datamodule=Rows({"size": 4}))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    forged = torch.load(tmp_path / "a.ckpt", weights_only=True)
    forged["hyper_parameters"]["config"]["rate"] = "${oc.env:HOME}"
    forged["hparams_configs"] += [["nothing", 0], ["rate", "deeper"]]
    torch.save(forged, tmp_path / "forged.ckpt")
    loaded = WithConfigs.load_from_checkpoint(tmp_path / "forged.ckpt")
    assert loaded.hparams.config == {"rate": "${oc.env:HOME}"}
