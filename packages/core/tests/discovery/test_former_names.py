"""Former names of the plugin API: each is refused by name, with what took its place."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stratagem import Lite, Trainer
from stratagem.accelerators import Accelerator, CPUAccelerator
from stratagem.callbacks import Callback
from stratagem.checkpoint import CheckpointIO, SingleFileCheckpointIO
from stratagem.discovery import (
    AcceleratorSpec,
    Capabilities,
    ClusterEnvironmentSpec,
    PrecisionSpec,
    StrategySpec,
    former,
)
from stratagem.discovery.former import FORMER, Change, check_former_names
from stratagem.errors import ConfigurationError, PluginError
from stratagem.launch import RunPlan
from stratagem.strategies import (
    DDPStrategy,
    ParallelStrategy,
    ProcessGroupRanks,
    Ranks,
    SingleDeviceStrategy,
    Strategy,
)

CLASSES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(Strategy, ParallelStrategy, Ranks, Accelerator, CheckpointIO, Callback, Capabilities),
        *(StrategySpec, PrecisionSpec, ClusterEnvironmentSpec, AcceleratorSpec, RunPlan),
    )
}
FIRST = Path(__file__).parents[1] / "files" / "first_plugin_api.txt"
LISTED = r"docs/extend/plugin-api\.md lists the former names"


def bound(strategy: Any, **options: Any) -> Any:
    options = {"accelerator": "cpu", "logger": False, **options}
    return Trainer(strategy=strategy, enable_checkpointing=False, **options)


@pytest.mark.parametrize("name", [name for name in FORMER if name in CLASSES])
def test_former_names_are_replaced_by_existing_members(
    name: str,
) -> None:
    kind = CLASSES[name]
    members = {*dir(kind), *getattr(kind, "__annotations__", {})}
    members |= set(vars(kind())) if kind is Ranks else set()
    for name, change in FORMER[kind.__name__].items():
        assert name not in members
        assert change.now in members


def test_each_name_of_the_first_plugin_api_is_there_or_is_a_former_name() -> None:
    path, missing = "", []
    for line in FIRST.read_text().splitlines():
        words = re.match(r"( *)(?:abstract |final )?(?:[a-z]+ )+?([\w.]+)(?=[:( ]|$)", line)
        if words is None or line.startswith(("function", "hook", "alias", "plugin API")):
            continue
        if not words[1]:
            path = words[2].rpartition(".")[2]
        elif path in CLASSES:
            kind, name = CLASSES[path], words[2]
            known = {*dir(kind), *getattr(kind, "__annotations__", {}), *former.former_names(kind)}
            known |= set(vars(kind())) if kind is Ranks else set()
            missing += [f"{path}.{name}"] * (name not in known)
    assert missing == []


class DataShard(DDPStrategy):
    def data_shard_of(self, rank: int, world_size: int) -> tuple[int, int]:
        return (0, 1)


class SetsPart(DDPStrategy):
    def make_ranks(self) -> Ranks:
        made = super().make_ranks()
        setattr(made, "data_part", (0, 2))  # noqa: B010 - where only the object shows it
        return made


class SharesShards(CheckpointIO):
    takes_shards = True


class OwnAccelerator(CPUAccelerator):
    own_strategies = True


class TakesOver(Callback):
    def take_over(self, state: dict[str, Any]) -> None:
        pass


class ShardedFormat(SingleFileCheckpointIO):
    takes_shards = True


@pytest.mark.parametrize(
    ("make", "former_name", "now"),
    [
        (lambda: bound(DataShard(), devices=2), "DataShard.data_shard_of", "data_split_of"),
        (lambda: bound(SetsPart(), devices=2), "ProcessGroupRanks.data_part", "run_split"),
        (
            lambda: bound("auto", accelerator=OwnAccelerator()),
            "OwnAccelerator.own_strategies",
            "requires_dedicated_strategies",
        ),
        (
            lambda: bound(SingleDeviceStrategy(checkpoint_io=ShardedFormat())),
            "ShardedFormat.takes_shards",
            "supports_shards",
        ),
        (lambda: bound("auto", callbacks=[TakesOver()]), "TakesOver.take_over", "load_remote"),
    ],
)
def test_a_class_with_a_former_name_is_refused_before_a_process_starts(
    make: Callable[[], Any], former_name: str, now: str
) -> None:
    message = rf"^{former_name} is a former name, which nothing reads or calls: use {now}.*{LISTED}"
    with pytest.raises(ConfigurationError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "former_name", "now"),
    [
        (lambda: Capabilities(replicated=False), "Capabilities(replicated=...)", "parameters ("),  # type: ignore[call-arg]
        (lambda: Capabilities.parallel(owns_step=True), "Capabilities(owns_step", "engine_steps"),
        (lambda: Ranks(data_shards=[(0, 1)]), "Ranks(data_shards=...)", "data_splits"),  # type: ignore[call-arg]
        (
            lambda: ProcessGroupRanks(None, 1, data_shards=None),  # type: ignore[call-arg,arg-type]
            "ProcessGroupRanks(data_shards",
            "data_splits",
        ),
    ],
)
def test_a_former_argument_is_refused(make: Callable[[], Any], former_name: str, now: str) -> None:
    with pytest.raises(PluginError, match=rf"^{re.escape(former_name)}.*use {re.escape(now)}"):
        make()


class Gathers(SingleDeviceStrategy):
    def everywhere(self) -> list[Any]:
        return self.ranks.gather_plain(1)  # type: ignore[attr-defined,no-any-return]


def test_a_former_attribute_is_an_attribute_error_with_the_present_name() -> None:
    with pytest.raises(AttributeError, match=r"Ranks.gather_plain is a .* use gather_objects"):
        bound(Gathers()).strategy.everywhere()
    with pytest.raises(AttributeError, match=r"Ranks.reduce_numbers is a .* use all_reduce_ints"):
        Ranks().reduce_numbers([1], "sum")  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"Capabilities.uneven_evaluation .* allows_uneven"):
        Capabilities().uneven_evaluation  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"^'Ranks' object has no attribute 'nothing'$"):
        Ranks().nothing  # type: ignore[attr-defined]  # noqa: B018


class OfItsOwn(Callback):
    monitors = ("loss", "accuracy")


def test_an_attribute_of_another_type_is_the_authors_own() -> None:
    check_former_names(OfItsOwn)


class Renamed(SingleDeviceStrategy):
    seen: list[int | None] = []  # noqa: RUF012

    def take_batch_size(self, batch_size: int | None) -> None:
        super().take_batch_size(batch_size)  # type: ignore[misc]
        self.seen.append(batch_size)

    def end_training(self, prepared: Any) -> None:
        self.take_batch_size(7)


def test_former_method_is_called_with_a_deprecation_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change = Change("set_batch_size", ends="99.0")
    monkeypatch.setitem(FORMER, "Strategy", {"take_batch_size": change})
    text = "Renamed.take_batch_size is a former name that ends with release 99.0: use set_batch"
    with pytest.warns(DeprecationWarning, match=text):
        strategy = bound(Renamed()).strategy
    strategy.set_batch_size(3)
    strategy.end_training(None)
    assert Renamed.seen == [3, 7]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bound(Renamed())  # said once
    delattr(Strategy, "take_batch_size")
    with pytest.warns(DeprecationWarning, match=r"SingleDeviceStrategy.take_batch_size .* use set"):
        bound("single_device").strategy.take_batch_size(1)


class Misspelled(SingleDeviceStrategy):
    def end_trainig(self, prepared: Any) -> None:
        pass

    def end_trainings(self) -> None:
        """Called below."""

    def release(self, prepared: Any) -> None:
        self.end_trainings()

    def average(self) -> None:
        pass


def test_a_method_that_nearly_has_the_name_of_one_that_is_called_gets_a_hint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Lite(accelerator="cpu", strategy=Misspelled()).launch()
    said = capsys.readouterr().err
    assert said.count("nothing calls it") == 1
    assert (
        "Misspelled.end_trainig overrides nothing, and nothing calls it. Did you mean end_training?"
        in said
    )
