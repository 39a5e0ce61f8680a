"""Documents of several sources as one stream of rows, which any number of ranks resumes."""

from __future__ import annotations

import copy
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import run_file
from torch.utils.data import IterableDataset

from stratagem import Lite, Module, Trainer
from stratagem.data.resume import make_resumable
from stratagem.data.sharding import shard_loader
from stratagem.errors import CheckpointMismatchError, ConfigurationError
from stratagem_extras.language import MixedDataset, PackedStream, StreamLoader, pad_documents

SCRIPT = Path(__file__).parents[1] / "scripts" / "streaming_ranks.py"


def documents(first: int, count: int) -> list[list[int]]:
    """Documents of 1 to 5 tokens, each of one number that no other document has."""
    return [[first + number] * (1 + number * 7 % 5) for number in range(count)]


class Lines(IterableDataset[Any]):
    """An iterable without a state."""

    def __init__(self, texts: list[list[int]]) -> None:
        self.texts = texts

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.texts)


class Stateful(Lines):
    """An iterable that takes over a loaded position when its iteration begins."""

    position = loaded = 0
    reads = 0

    def __iter__(self) -> Iterator[list[int]]:
        self.position, self.loaded = self.loaded, 0
        while self.position < len(self.texts):
            self.position += 1
            self.reads += 1
            yield self.texts[self.position - 1]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state["position"]


def mixed(**options: Any) -> MixedDataset:
    sources = {
        "wiki": (documents(0, 60), 0.5),
        "code": (Lines(documents(1000, 40)), 0.3),
        "chat": (Stateful(documents(2000, 30)), 0.2),
    }
    return MixedDataset(sources, **{"seed": 4, **options})


def stream(**options: Any) -> PackedStream:
    return PackedStream(mixed(**options), 8)


def rows_of(batches: Any) -> list[tuple[int, ...]]:
    return [tuple(row) for batch in batches for row in batch["input_ids"].tolist()]


def test_the_order_depends_on_the_seed_and_the_position_alone() -> None:
    first, again, other = list(mixed()), list(mixed()), list(mixed(seed=5))
    assert first == again
    assert first != other
    of_wiki = [document for document in first if document[0] < 1000]
    assert of_wiki == documents(0, 60)[: len(of_wiki)]


def test_sources_are_read_by_their_weights() -> None:
    sources = {name: ([[index]], weight) for index, (name, weight) in enumerate(WEIGHTS.items())}
    endless = MixedDataset(sources, seed=3, repeat=True)
    counts = Counter(document[0] for document in itertools.islice(endless, 4000))
    for index, weight in enumerate(WEIGHTS.values()):
        assert counts[index] / 4000 == pytest.approx(weight / 4, abs=0.03)
    assert 2 not in counts


WEIGHTS = {"a": 3, "b": 1, "none": 0}


def test_a_stream_ends_with_the_first_source_or_repeats_it() -> None:
    short = {"a": ([[1], [2]], 1.0), "b": (documents(10, 500), 1.0)}
    once = MixedDataset(short, seed=1)
    read = [document for document in once if document[0] < 10]
    assert read == [[1], [2]]
    second = list(once)
    assert [document for document in second if document[0] < 10] == [[1], [2]]
    assert second != list(MixedDataset(short, seed=1)), "each epoch has an order of its own"
    repeated = itertools.islice(MixedDataset(short, seed=1, repeat=True), 40)
    assert [d for d in repeated if d[0] < 10][:5] == [[1], [2], [1], [2], [1]]


def test_rows_hold_each_document_once_in_order() -> None:
    tokens = [row["input_ids"].tolist() for row in stream()]
    assert all(len(row) == 8 for row in tokens)
    starts = [
        token
        for row in stream()
        for token, position in zip(row["input_ids"].tolist(), row["position_ids"], strict=True)
        if position == 0 and token
    ]
    expected = [document[0] for document in mixed() if document[0]]
    assert starts == expected


@pytest.mark.parametrize("taken", [0, 1, 7, -2, -1])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_position_is_exact_at_any_batch(taken: int, workers: int) -> None:
    whole = StreamLoader(stream(), 3, num_workers=workers)
    expected = rows_of(whole)
    second_epoch = rows_of(whole)
    assert expected == [tuple(row["input_ids"].tolist()) for row in stream()]
    batches = -(-len(expected) // 3)
    taken = batches + taken + 1 if taken < 0 else taken
    assert 0 <= taken <= batches
    first, again = (StreamLoader(stream(), 3, num_workers=workers) for _ in range(2))
    read = rows_of(itertools.islice(first, taken))
    state = copy.deepcopy(first.state_dict())
    again.load_state_dict(state)
    assert read + rows_of(again) == expected
    assert rows_of(again) == second_epoch


def test_a_source_with_a_state_is_not_read_again() -> None:
    first = StreamLoader(PackedStream(Stateful(documents(0, 30)), 8), 2)
    list(itertools.islice(first, 4))
    texts = Stateful(documents(0, 30))
    read: list[int] = []
    texts.texts = [Noted(text, read) for text in texts.texts]
    again = StreamLoader(PackedStream(texts, 8), 2)
    again.load_state_dict(first.state_dict())
    rows_of(again)
    assert min(read) > 8


class Noted(list[int]):
    """A document that notes when it is read."""

    def __init__(self, tokens: list[int], read: list[int]) -> None:
        super().__init__(tokens)
        self.read = read

    def __iter__(self) -> Iterator[int]:
        self.read.append(self[0])
        return super().__iter__()


class Ranks:
    """The loaders of so many ranks, as front ends make them."""

    def __init__(self, count: int, size: int, workers: int = 0) -> None:
        self.readers = [
            make_resumable(
                shard_loader(
                    StreamLoader(stream(), size, num_workers=workers), rank, count, even=True
                ),
                "the loader",
                rank,
                (rank, count),
            )
            for rank in range(count)
        ]

    def resume(self, states: list[dict[str, Any]], done: int) -> int:
        return {reader.resume(states, done) for reader in self.readers}.pop()

    def read(self, done: int, steps: int | None) -> list[tuple[int, ...]]:
        """Return the rows of so many steps, in the order of the stream."""
        begun = [reader.begin(0, done)[0] for reader in self.readers]
        read = []
        for turn in itertools.islice(zip(*begun, strict=True), steps):
            of_ranks = [rows_of([batch]) for batch in turn]
            read += [row for rows in zip(*of_ranks, strict=True) for row in rows]
        return read

    def states(self) -> list[dict[str, Any]]:
        return [reader.state() for reader in self.readers]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("now", [(2, 2), (1, 3), (4, 1), (3, 2)], ids=str)
def test_other_ranks_read_each_row_once(now: tuple[int, int], workers: int) -> None:
    expected = [tuple(row["input_ids"].tolist()) for row in stream()]
    before = Ranks(2, 2, workers)
    read = before.read(0, 5)
    assert read == expected[:20]
    after = Ranks(*now, workers)
    done = after.resume(before.states(), 5)
    assert done == 20 // (now[0] * now[1])
    # One more change, after one step.
    read += after.read(done, 1)
    last = Ranks(2, 1, workers)
    done = last.resume(after.states(), done + 1)
    read += last.read(done, None)
    assert read == expected[: len(read)]
    assert len(expected) - len(read) < 2


def test_other_ranks_continue_after_a_limited_epoch() -> None:
    expected = [tuple(row["input_ids"].tolist()) for row in stream()]
    before = Ranks(2, 2)
    begun = [reader.begin(0, 0, 3)[0] for reader in before.readers]
    for batches in begun:
        assert len(list(itertools.islice(batches, 3))) == 3
    states = [reader.state(within_epoch=False) for reader in before.readers]
    alone = Ranks(1, 2)
    assert alone.resume(states, 0) == 0
    assert alone.read(0, 1) == expected[12:14]
    # A checkpoint before the end of the epoch was noted.
    alone = Ranks(1, 4)
    assert alone.resume(states, 3) == 3
    assert list(alone.readers[0].begin(0, 3, 3)[0]) == []
    assert alone.read(0, 1) == expected[12:16]


def test_two_iterations_over_one_stream_do_not_meet() -> None:
    both = stream()
    train, validate = StreamLoader(both, 2), StreamLoader(both, 2)
    expected = rows_of(StreamLoader(stream(), 2))
    reading = iter(train)
    read = rows_of([next(reading)])
    assert rows_of(validate) == expected
    assert read + rows_of(reading) == expected


def test_documents_without_packing_are_padded_in_batches() -> None:
    loader = StreamLoader(mixed(), 4, collate_fn=pad_documents)
    shapes = {tuple(batch["input_ids"].shape) for batch in loader}
    assert (4, 8) in shapes
    assert {columns for _, columns in shapes} == {8}


def test_a_loop_of_lite_continues_at_the_next_row(tmp_path: Path) -> None:
    lite = Lite(accelerator="cpu", devices=1)
    lite.launch()
    first = lite.setup_dataloaders(StreamLoader(stream(), 3, num_workers=2))
    read = rows_of(itertools.islice(first, 5))
    lite.save_state(tmp_path / "state")
    lite = Lite(accelerator="cpu", devices=1)
    lite.launch()
    again = lite.setup_dataloaders(StreamLoader(stream(), 3))
    lite.load_state(tmp_path / "state")
    assert read + rows_of(again) == rows_of(StreamLoader(stream(), 3))


class Evaluated(Module):
    """Notes the rows of its validations, with the sanity check."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.read: list[list[tuple[int, ...]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.weight * 2

    def on_validation_start(self) -> None:
        self.read.append([])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.read[-1] += rows_of([batch])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_each_validation_begins_at_the_beginning() -> None:
    module = Evaluated()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=2,
        limit_train_batches=2,
        limit_val_batches=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    loader = StreamLoader(stream(), 2)
    trainer.fit(module, loader, loader)
    expected = [tuple(row["input_ids"].tolist()) for row in stream()]
    assert module.read == [expected[:4], expected[:8], expected[:8]]


STRATEGIES = ["ddp", "fsdp", "mesh"]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return fit(tmp_path_factory.mktemp("one"), "single_device", 1, 100, None)


def fit(
    folder: Path, strategy: str, ranks: int, steps: int, resume: str | None, workers: int = 0
) -> dict[str, Any]:
    """Return the rows of each step, by parts of the data, and the weights."""
    out = folder / f"{strategy}{ranks}{steps}"
    arguments = [str(out), strategy, str(ranks), str(steps), str(workers), resume or ""]
    run_file(SCRIPT, *arguments, folder=folder)
    parts = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{out.name}-*.json"))]
    steps_of_parts = zip(*(part["rows"] for part in parts), strict=True)
    rows = [[row for turn in zip(*step, strict=True) for row in turn] for step in steps_of_parts]
    return {"rows": rows, "weights": torch.tensor(parts[0]["weights"]), "out": str(out)}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_continues_on_another_number_of_ranks(
    strategy: str, tmp_path: Path, one_process: dict[str, Any]
) -> None:
    first = fit(tmp_path, strategy, 2, 4, None, workers=2)
    second = fit(tmp_path, "single_device", 1, 100, f"{first['out']}.ckpt")
    rows = [row for step in first["rows"] + second["rows"] for row in step]
    expected = [row for step in one_process["rows"] for row in step]
    assert rows == expected
    torch.testing.assert_close(second["weights"], one_process["weights"], rtol=1e-5, atol=1e-6)


def test_a_run_on_as_many_ranks_continues_bit_for_bit(tmp_path: Path) -> None:
    whole = fit(tmp_path, "ddp", 2, 8, None)
    first = fit(tmp_path, "ddp", 2, 4, None)
    second = fit(tmp_path, "ddp", 2, 8, f"{first['out']}.ckpt", workers=2)
    assert first["rows"] + second["rows"] == whole["rows"]
    assert torch.equal(second["weights"], whole["weights"])


def test_ranks_of_one_part_of_the_data_read_the_same(
    tmp_path: Path, one_process: dict[str, Any]
) -> None:
    divided = fit(tmp_path, "mesh, tensor", 2, 3, None)
    expected = [[row for row in step for _ in "01"] for step in one_process["rows"][:3]]
    assert divided["rows"] == expected


OK = ([[1]], 1.0)


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ({}, r"MixedDataset\(sources=\{\}\): expected a dict of names"),
        ({"a": [[1]]}, "source 'a' of MixedDataset is a list: expected a tuple of documents and a"),
        ({"a": ([[1]], -0.5), "b": OK}, "weight -0.5 of source 'a': expected 0 or more"),
        ({"a": ([[1]], "1")}, "weight '1' of source 'a': expected a number"),
        ({"a": ([[1]], float("nan"))}, "weight nan of source 'a': expected a number"),
        ({"a": ([[1]], 0), "b": ([[1]], 0.0)}, r"weights of MixedDataset sum to 0 \('a', 'b'\)"),
        ({"a": (3, 1.0)}, "source 'a' of MixedDataset is a int: expected a sequence or an iterab"),
        ({"a": ("text", 1.0)}, "source 'a' of MixedDataset is a str: expected a sequence or an"),
        ({"a": (iter([[1]]), 1.0)}, "is a list_iterator, which can be read only once: expected a"),
    ],
)
def test_sources_that_cannot_be_mixed_are_refused(sources: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        MixedDataset(sources)


@pytest.mark.parametrize("repeat", [False, True])
def test_a_source_without_documents_is_refused(repeat: bool) -> None:
    empty = MixedDataset({"a": OK, "b": (Lines([]), 1.0)}, repeat=repeat)
    with pytest.raises(ConfigurationError, match="source 'b' of MixedDataset has no document"):
        list(itertools.islice(empty, 20))


def test_documents_that_do_not_fit_are_named() -> None:
    none = MixedDataset({"code": ([[1], [2], []], 1.0)})
    with pytest.raises(ConfigurationError, match="document 2 of 'code' has 0 tokens: expected 1 "):
        list(PackedStream(none, 4))
    long = MixedDataset({"code": ([[1] * 5], 1.0)})
    with pytest.raises(ConfigurationError, match="document 0 of 'code' has 5 tokens: expected 1 "):
        list(PackedStream(long, 4))
    (row,) = PackedStream([[1] * 5], 4, truncate=True)
    assert row["input_ids"].tolist() == [1] * 4
    with pytest.raises(ConfigurationError, match="length=0: expected a number of tokens from 1"):
        PackedStream(long, 0)


def test_the_position_of_another_stream_is_refused() -> None:
    state = StreamLoader(stream(), 2).state_dict()
    with pytest.raises(CheckpointMismatchError, match="saved with seed=4, and now it has seed=5"):
        StreamLoader(stream(seed=5), 2).load_state_dict(state)
    other = PackedStream(MixedDataset({"wiki": OK}, seed=4), 8)
    with pytest.raises(CheckpointMismatchError, match=r"weights=.'wiki': 0.5, .* weights=.'wiki'"):
        StreamLoader(other, 2).load_state_dict(state)
    with pytest.raises(CheckpointMismatchError, match="saved with length=8, and now it has length"):
        StreamLoader(PackedStream(mixed(), 16), 2).load_state_dict(state)
    with pytest.raises(
        CheckpointMismatchError, match="the position has 'x': expected one that a S"
    ):
        StreamLoader(stream(), 2).load_state_dict({"x": 1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, r"StreamLoader\(batch_size=0\): expected a number of rows from 1 on"),
        ({"shuffle": True}, r"StreamLoader\(shuffle=True\): a stream is read in its order"),
        ({"persistent_workers": True}, r"StreamLoader\(persistent_workers=True\): a stream is rea"),
        ({"in_order": False}, r"StreamLoader\(in_order=False\): a stream is read in its order"),
    ],
)
def test_options_that_change_the_order_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        StreamLoader(stream(), **{"batch_size": 2, **options})


def test_a_stream_without_a_position_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="received a Lines without state_dict: expected a"):
        StreamLoader(Lines([[1]]), 2)
