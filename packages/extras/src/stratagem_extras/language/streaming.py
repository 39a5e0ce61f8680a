"""Documents of several sources as one stream of rows, which any number of ranks resumes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate, islice
from math import isfinite
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from stratagem.errors import CheckpointMismatchError, ConfigurationError
from stratagem_extras.language.packing import make_row, read_document, tokens_of


class MixedDataset(IterableDataset[Any]):
    """The documents of several sources, mixed by weights.

    The choice of a source depends on `seed`, the epoch and the number of documents before it. So
    the order is the same in each process. The sources are read in their own order.

    Args:
        sources: by name, the documents and the weight of a source. Documents are a sequence, or an
            iterable that begins anew with each `iter`. An iterable with `state_dict` and
            `load_state_dict` is resumed by these. Another one is read again up to its position.
        seed: changes the order of choices.
        repeat: begin a source that ends again, so that the stream is endless. Otherwise the stream
            ends when a source has no document left for its turn.

    Raises:
        ConfigurationError: an argument is invalid; or, during iteration, a source is empty.

    Example:
        >>> from stratagem_extras.language import MixedDataset
        >>> wiki, code = [[1], [2], [3], [4]], [[7], [8]]
        >>> list(MixedDataset({"wiki": (wiki, 0.7), "code": (code, 0.3)}, seed=1))
        [[1], [7], [2], [8], [3]]
    """

    def __init__(
        self,
        sources: Mapping[str, tuple[Iterable[Any], float]],
        *,
        seed: int = 0,
        repeat: bool = False,
    ) -> None:
        if not isinstance(sources, Mapping) or not sources:
            raise ConfigurationError(
                f"MixedDataset(sources={sources!r}): expected a dict of names with documents and "
                "a weight, such as {'wiki': (wiki, 0.7), 'code': (code, 0.3)}"
            )
        self._sources = {}
        self._weights: dict[str, float] = {}
        for name, given in sources.items():
            if not isinstance(given, tuple) or len(given) != 2:
                raise ConfigurationError(
                    f"source {name!r} of MixedDataset is a {type(given).__name__}: expected a "
                    "tuple of documents and a weight"
                )
            self._sources[name] = _Source(name, given[0])
            self._weights[name] = _check_weight(name, given[1])
        total = sum(self._weights.values())
        if total == 0:
            raise ConfigurationError(
                f"the weights of MixedDataset sum to 0 ({', '.join(map(repr, sources))}): expected "
                "at least one above 0"
            )
        self._bounds = [bound / total for bound in accumulate(self._weights.values())]
        self._seed = seed
        self._repeat = repeat
        self._epoch = self._position = 0
        self.latest = ""
        """The number and the source of the latest document, for messages."""

    def __iter__(self) -> Iterator[Any]:
        """Yield the documents after the position."""
        while True:
            source = self._choose()
            document = source.read_next()
            if document is _END and self._repeat:
                source.restart()
                document = source.read_next()
            if document is _END:
                if not source.read:
                    raise ConfigurationError(
                        f"source {source.name!r} of MixedDataset has no document: expected at "
                        "least one, or leave the source out"
                    )
                break
            self._position += 1
            self.latest = f"document {source.read - 1} of {source.name!r}"
            yield document
        self._epoch, self._position = self._epoch + 1, 0
        for source in self._sources.values():
            source.restart()

    def _choose(self) -> _Source:
        drawn = _draw(self._seed, self._epoch, self._position)
        names = zip(self._bounds, self._sources.values(), strict=True)
        chosen = [source for bound, source in names if drawn < bound]
        # Rounding may leave the last bound below 1; a source of weight 0 is never chosen.
        return (
            chosen[0]
            if chosen
            else self._sources[max(self._weights, key=self._weights.__getitem__)]
        )

    def __copy__(self) -> MixedDataset:
        """Return a stream at the same position, which moves on its own."""
        copied = type(self).__new__(type(self))
        vars(copied).update(vars(self))
        copied._sources = {name: source.copy() for name, source in self._sources.items()}
        return copied

    def state_dict(self) -> dict[str, Any]:
        """Return the position in each source, and what the order depends on."""
        return {
            "seed": self._seed,
            "weights": dict(self._weights),
            "epoch": self._epoch,
            "position": self._position,
            "sources": {name: source.state() for name, source in self._sources.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position.

        Raises:
            CheckpointMismatchError: the state is of other sources, weights, or another seed.
        """
        own = {"seed": self._seed, "weights": self._weights}
        for key, expected in own.items():
            if state.get(key) != expected:
                raise CheckpointMismatchError(
                    f"the position of MixedDataset was saved with {key}={state.get(key)!r}, and "
                    f"now it has {key}={expected!r}: resume with the sources, weights and seed "
                    "that it was saved with, or begin a new run from the weights of the model"
                )
        self._epoch, self._position = state["epoch"], state["position"]
        for name, source in self._sources.items():
            source.load(state["sources"][name])


class PackedStream(IterableDataset[dict[str, Tensor]]):
    """Rows of `length` tokens from a stream of documents; see `PackedDataset` for the rows.

    A row ends before the first document that does not fit into it.

    Args:
        documents: a `MixedDataset`, or the documents of one source.
        length: tokens in a row.
        pad_token_id: the token of the padding.
        truncate: cut documents that are longer than `length`, in place of an error.

    Raises:
        ConfigurationError: an argument is invalid; or, during iteration, a document is longer than
            `length`, or has no token.

    Example:
        >>> from stratagem_extras.language import PackedStream
        >>> rows = PackedStream([[5, 6, 7], [8, 9], [1, 2, 3]], length=6)
        >>> [row["input_ids"].tolist() for row in rows]
        [[5, 6, 7, 8, 9, 0], [1, 2, 3, 0, 0, 0]]
    """

    def __init__(
        self,
        documents: MixedDataset | Iterable[Any],
        length: int,
        *,
        pad_token_id: int = 0,
        truncate: bool = False,
    ) -> None:
        if type(length) is not int or length < 1:
            raise ConfigurationError(f"length={length!r}: expected a number of tokens from 1 on")
        if not isinstance(documents, MixedDataset):
            documents = MixedDataset({"documents": (documents, 1.0)})
        self._documents = documents
        self._length = length
        self._pad = pad_token_id
        self._truncate = truncate
        self._next: Any = None
        """The document that did not fit into the latest row."""
        self._has_ended = False
        """Whether the latest row was the last one."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield the rows after the position."""
        return map(self.make_row, self.drafts())

    def drafts(self) -> Iterator[list[Any]]:
        """Yield the documents of each row after the position, for `make_row`."""
        documents = iter(self._documents)
        while not self._has_ended:
            row, self._next = [] if self._next is None else [self._next], None
            free = self._length - sum(map(self._size_of, row))
            for document in documents:
                free -= self._size_of(document)
                if free < 0:
                    self._next = document
                    break
                row.append(document)
            self._has_ended = self._next is None
            if row:
                yield row
        self._has_ended = False

    def _size_of(self, document: Any) -> int:
        name = self._documents.latest
        tokens = tokens_of(document, name, self._length, truncate=self._truncate)
        return min(len(tokens), self._length)

    def make_row(self, draft: list[Any]) -> dict[str, Tensor]:
        """Return the row of some documents.

        Args:
            draft: the documents, as `drafts` yields them.
        """
        documents = [read_document(document, "a document", self._length) for document in draft]
        return make_row(documents, self._length, self._pad)

    def __copy__(self) -> PackedStream:
        """Return a stream at the same position, which moves on its own."""
        copied = type(self).__new__(type(self))
        vars(copied).update(vars(self))
        copied._documents = copy.copy(self._documents)
        return copied

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the latest row."""
        waiting = None
        if self._next is not None:
            ids, labels = read_document(self._next, "a document", self._length)
            waiting = {"input_ids": ids, "labels": labels}
        return {
            "length": self._length,
            "documents": self._documents.state_dict(),
            "next": waiting,
            "has_ended": self._has_ended,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position.

        Raises:
            CheckpointMismatchError: the state is of rows of another length, or of other documents.
        """
        if state.get("length") != self._length:
            raise CheckpointMismatchError(
                f"the position of PackedStream was saved with length={state.get('length')!r}, and "
                f"now it has length={self._length}: resume with the same length"
            )
        self._documents.load_state_dict(state["documents"])
        self._next = state["next"]
        self._has_ended = state["has_ended"]


class StreamLoader:
    """Batches of a stream, dealt to ranks and workers, which any number of ranks resumes.

    All ranks read the whole stream. Of each `n` rows, each of `n` ranks takes one. So the rows
    after any number of batches are the beginning of the stream, and a state is a position that any
    number of ranks continues from. The Trainer and Lite divide the loader between ranks. At the end
    of the stream, rows that are fewer than the ranks are left out.

    Args:
        stream: an iterable with `state_dict` and `load_state_dict`, such as `PackedStream`. It
            yields the same on each rank, and begins anew after its end.
        batch_size: rows in a batch of a rank.
        num_workers: worker processes of a rank. Each reads the whole stream, and makes its batches.
        collate_fn: a function that makes a batch of rows. None: torch's `default_collate`.
        **options: other options of torch's DataLoader, such as `pin_memory`.

    Raises:
        ConfigurationError: an argument is invalid.

    Example:
        >>> from stratagem_extras.language import PackedStream, StreamLoader
        >>> loader = StreamLoader(PackedStream([[1, 2], [3], [4, 5]], length=2), batch_size=2)
        >>> [batch["input_ids"].tolist() for batch in loader]
        [[[1, 2], [3, 0]], [[4, 5]]]
    """

    drop_last = False

    def __init__(
        self,
        stream: Any,
        batch_size: int,
        *,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **options: Any,
    ) -> None:
        needed = ("__iter__", "state_dict", "load_state_dict")
        if missing := [name for name in needed if not hasattr(stream, name)]:
            raise ConfigurationError(
                f"StreamLoader received a {type(stream).__name__} without {missing[0]}: expected a "
                "stream that saves its position, such as a MixedDataset or a PackedStream"
            )
        if type(batch_size) is not int or batch_size < 1:
            raise ConfigurationError(
                f"StreamLoader(batch_size={batch_size!r}): expected a number of rows from 1 on"
            )
        fixed = {"persistent_workers": False, "in_order": True}
        refused = ("shuffle", "sampler", "batch_sampler", "drop_last")
        for name, value in options.items():
            if name in refused or fixed.get(name, value) is not value:
                raise ConfigurationError(
                    f"StreamLoader({name}={value!r}): a stream is read in its order, by workers "
                    "that begin at its position: leave this option out"
                )
        self.batch_size = batch_size
        self.num_workers = num_workers
        self._stream = stream
        self._collate = collate_fn or default_collate
        self._options = options
        self._part = (0, 1)
        self._state = {"stream": stream.state_dict(), "has_ended": False}

    def read_part(self, index: int, count: int) -> StreamLoader:
        """Return a loader of one rank's part of the rows.

        Args:
            index, count: the number of the part, and the number of parts.
        """
        copied = copy.copy(self)
        copied._part = (index, count)
        return copied

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches after the position."""
        if self._state["has_ended"]:
            self._state = {**self._state, "has_ended": False}
            return
        stream = copy.copy(self._stream)
        stream.load_state_dict(self._state["stream"])
        batches: DataLoader[Any] = DataLoader(
            _Part(stream, self.batch_size, *self._part, self._collate),
            batch_size=None,
            num_workers=self.num_workers,
            collate_fn=_unchanged,
            **self._options,
        )
        for batch, state in batches:
            self._state = state
            if batch is not None:
                yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the latest batches of all ranks."""
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position, with any number of ranks and workers, and any batch size.

        Raises:
            CheckpointMismatchError: the state is of another stream.
        """
        if set(state) != {"stream", "has_ended"}:
            raise CheckpointMismatchError(
                f"the position has {', '.join(map(repr, state)) or 'nothing'}: expected one that a "
                "StreamLoader has saved"
            )
        copy.copy(self._stream).load_state_dict(state["stream"])
        self._state = state


class _Part(IterableDataset[Any]):
    """The batches of one rank, and of one of its workers, each with the position after it."""

    def __init__(
        self, stream: Any, batch_size: int, index: int, count: int, collate: Callable[..., Any]
    ) -> None:
        self._stream = stream
        self._batch_size = batch_size
        self._index, self._count = index, count
        self._collate = collate

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        is_packed = isinstance(self._stream, PackedStream)
        # Only the rows of this rank and worker become tensors.
        rows = self._stream.drafts() if is_packed else iter(self._stream)
        batch, has_ended = 0, False
        while not has_ended:
            own: list[Any] = []
            for _ in range(self._batch_size):
                dealt = list(islice(rows, self._count))
                if len(dealt) < self._count:
                    has_ended = True
                    break
                own.append(dealt[self._index])
            if own and batch % workers == number:
                made = list(map(self._stream.make_row, own)) if is_packed else own
                yield self._collate(made), self._state(has_ended=has_ended)
            batch += 1
        yield None, self._state(has_ended=False)

    def _state(self, *, has_ended: bool) -> dict[str, Any]:
        return {"stream": self._stream.state_dict(), "has_ended": has_ended}


_END = object()


class _Source:
    """The documents of one source, read one after the other.

    Attributes:
        name: the name of the source.
        read: the number of documents read since the beginning.
    """

    def __init__(self, name: str, documents: Any) -> None:
        is_sequence = hasattr(documents, "__len__") and hasattr(documents, "__getitem__")
        is_text = isinstance(documents, (str, bytes, Mapping))
        if is_text or not (is_sequence or hasattr(documents, "__iter__")):
            raise ConfigurationError(
                f"source {name!r} of MixedDataset is a {type(documents).__name__}: expected a "
                "sequence or an iterable of documents"
            )
        if isinstance(documents, Iterator):
            raise ConfigurationError(
                f"source {name!r} of MixedDataset is a {type(documents).__name__}, which can be "
                "read only once: expected a sequence, or an object whose __iter__ begins anew"
            )
        self.name = name
        self.read = 0
        self._documents = documents
        self._is_sequence = is_sequence
        self._is_stateful = not is_sequence and hasattr(documents, "load_state_dict")
        self._first = self._own = self._read_own() if self._is_stateful else None
        self._iterator: Iterator[Any] | None = None

    def read_next(self) -> Any:
        """Return the next document, or _END."""
        if self._is_sequence:
            if self.read >= len(self._documents):
                return _END
            document = self._documents[self.read]
        else:
            if self._iterator is None:
                self._iterator = iter(self._documents)
                if not self._is_stateful:
                    next(islice(self._iterator, self.read, self.read), None)
            document = next(self._iterator, _END)
        self.read += document is not _END
        return document

    def restart(self) -> None:
        """Go to the beginning."""
        if self.read:
            self.load({"read": 0, "own": self._first})

    def copy(self) -> _Source:
        """Return a source at the same position, which moves on its own."""
        copied = copy.copy(self)
        if self._is_stateful:
            copied._documents = copy.copy(self._documents)
        copied.load(self.state())
        return copied

    def state(self) -> dict[str, Any]:
        """Return the position."""
        if not self._is_stateful:
            return {"read": self.read}
        # An iterable may take over a loaded position only when its iteration begins.
        return {"read": self.read, "own": self._own if self._iterator is None else self._read_own()}

    def load(self, state: dict[str, Any]) -> None:
        """Go to a position."""
        self.read, self._iterator = state["read"], None
        if self._is_stateful:
            self._own = state["own"]
            self._documents.load_state_dict(copy.deepcopy(self._own))

    def _read_own(self) -> Any:
        return copy.deepcopy(self._documents.state_dict())


def _check_weight(name: str, weight: Any) -> float:
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not isfinite(weight):
        raise ConfigurationError(f"weight {weight!r} of source {name!r}: expected a number")
    if weight < 0:
        raise ConfigurationError(f"weight {weight!r} of source {name!r}: expected 0 or more")
    return float(weight)


def _draw(seed: int, epoch: int, position: int) -> float:
    """Return a number from 0 to 1 (Steele et al., 2014, "SplitMix")."""
    mask = 2**64 - 1
    value = seed & mask
    for part in (epoch, position):
        value = (value + (part + 1) * 0x9E3779B97F4A7C15) & mask
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        value ^= value >> 31
    return value / 2**64


def _unchanged(pair: Any) -> Any:
    return pair
