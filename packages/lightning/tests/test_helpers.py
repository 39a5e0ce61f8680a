"""Helpers of Lightning's users: seeds, warnings and data."""

from __future__ import annotations

import importlib
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stratagem import rng
from stratagem.errors import ConfigurationError
from stratagem_lightning.api.loggers import CSVLogger
from stratagem_lightning.api.utilities import data, parsing, seed
from stratagem_lightning.api.utilities.warnings import PossibleUserWarning

_VARIABLES = (
    *(rng.SEED_VARIABLE, rng.WORKERS_VARIABLE),
    *(seed.SEED_VARIABLE, seed.WORKERS_VARIABLE),
)


@pytest.fixture
def no_seed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No seed in the environment, and the generators as they were afterwards."""
    for name in _VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with rng.preserve_rng_state():
        yield


def test_default_seed_warns_once(no_seed: None, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.warns(
        UserWarning,
        match=r"No seed found: .* takes 0. Pass a seed, or set PL_GLOBAL_SEED",
    ):
        seed.seed_everything()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert seed.seed_everything(verbose=False) == 0
        assert seed.seed_everything() == 0
    caplog.clear()
    seed.seed_everything(7)
    seed.reset_seed()
    with caplog.at_level("WARNING", "lightning.fabric.utilities.seed"):
        seed.seed_everything(8)
    assert [record.getMessage() for record in caplog.records] == ["seed set to 7"]


def test_workers_of_all_ranks_draw_differently(no_seed: None) -> None:
    drawn = set()
    for worker in range(3):
        for rank in range(3):
            seed.seed_everything(5, verbose=False)
            seed.pl_worker_init_function(worker, rank)
            drawn |= {int(torch.randint(0, 10**12, ())), random.randrange(10**12)}
    assert len(drawn) == 18


@pytest.mark.parametrize("setting", ["0", "off"])
def test_possible_user_warnings_are_turned_off_by_the_environment(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("stratagem_lightning.fabric")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        importlib.reload(module)
        warnings.warn("said", PossibleUserWarning, stacklevel=1)
        monkeypatch.setenv("POSSIBLE_USER_WARNINGS", setting)
        importlib.reload(module)
        warnings.warn("not said", PossibleUserWarning, stacklevel=1)
    assert [str(one.message) for one in seen] == ["said"]


def test_an_object_that_moves_itself_and_returns_nothing_is_kept() -> None:
    class Batch:
        device: Any = None

        def to(self, device: torch.device) -> None:
            self.device = device

    batch = Batch()
    assert data.move_data_to_device(batch, "cpu") is batch
    assert batch.device == torch.device("cpu")


def test_rows_without_a_step_are_counted(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    for step in (None, None, 7, None):
        logger.log_metrics({"loss": 0.5}, step)
    logger.save()
    rows = (Path(logger.log_dir) / "metrics.csv").read_text().split()
    assert [row.partition(",")[0] for row in rows] == ["step", "0", "1", "7", "8"]


def test_signatures_are_read() -> None:
    class Net:
        def __init__(this, width: int, *sizes: int, **options: Any) -> None: ...

    def hook(batch: Any, batch_idx: int) -> None: ...

    assert parsing.parse_class_init_keys(Net) == ("this", "sizes", "options")
    takes = parsing.is_param_in_hook_signature
    assert takes(hook, "batch_idx", explicit=True)
    assert not takes(hook, "dataloader_idx")
    assert takes(hook, "dataloader_idx", min_args=2)
    assert not takes(hook, "dataloader_idx", min_args=3)


def test_extract_batch_size_takes_the_first_tensor() -> None:
    assert [data.weight_of(batch) for batch in (None, "text", torch.zeros(3))] == [1, 1, 3]
    assert data.extract_batch_size({"a": [torch.zeros(3, 2)], "b": torch.zeros(3)}) == 3
    with pytest.warns(UserWarning, match=r"infer the `batch_size` .* batch size we found is 1\."):
        assert data.extract_batch_size([torch.tensor(1), torch.zeros(4)]) == 1
    for without in ("text", {"texts": ["some"] * 7}):
        with pytest.raises(ConfigurationError, match="could not infer the batch_size"):
            data.extract_batch_size(without)
