"""Checkpoint formats: nothing is executed, nothing half is loaded, nothing durable is lost."""

from __future__ import annotations

import copyreg
import os
import pickle
import random
import shutil
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from stratagem.checkpoint import CheckpointIO
from stratagem.errors import CheckpointError, CheckpointNotFoundError
from stratagem_testing.components.bench import Bench, brief
from stratagem_testing.components.check import check
from stratagem_testing.components.checks.checkpoint_io import NAME, contents, number_in, saved
from stratagem_testing.components.checks.every import pickled
from stratagem_testing.durability.faults import note_syncs
from stratagem_testing.durability.saver import Subject
from stratagem_testing.durability.scenarios import Row, Scenarios

KIND = "checkpoint_io"
_MARK = "executed"


class _Hostile:
    """Makes a file when somebody unpickles it."""

    def __reduce__(self) -> Any:
        return os.mkdir, (_MARK,)


def _opened(io: CheckpointIO, path: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield every way to read a checkpoint, by its name."""
    for call in (io.load_checkpoint, io.open_checkpoint, io.verify_checkpoint):
        yield call.__name__, lambda call=call: call(path)  # type: ignore[misc]


def _files(path: Path) -> list[Path]:
    """Return the files of a checkpoint."""
    return [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())


def _not_executed(bench: Bench, what: str) -> None:
    assert not (bench.folder / _MARK).exists(), (
        f"{what} executed code that the checkpoint named: read weights and weights-only-safe data "
        "only (stratagem.state.from_bytes, or torch.load with weights_only=True)"
    )


@check(KIND, "safety/nothing executed")
def _executed(bench: Bench) -> None:
    """A load refuses a pickle that would execute code, in each file of a checkpoint."""
    io = bench.make()
    path = bench.folder / NAME
    hostile = {"state_dict": {}, "number": _Hostile()}
    torch.save(hostile, "hostile.pt")
    for made in (pickle.dumps(hostile), Path("hostile.pt").read_bytes()):
        saved(io, path, 1)
        for file in _files(path):
            whole = file.read_bytes()
            file.write_bytes(made)
            for name, call in _opened(io, path):
                error = bench.error(call)
                _not_executed(bench, f"{name} of a checkpoint whose {file.name} is a pickle")
                # Unread contents need not be refused, unless the call checks completeness.
                assert error is not None or name == "open_checkpoint", (
                    f"{name} took a checkpoint whose {file.name} somebody has replaced by a pickle"
                )
                assert error is None or isinstance(error, CheckpointError), (
                    f"{name} of a checkpoint whose {file.name} is a pickle ended in "
                    f"{brief(error)}; expected CheckpointCorruptError"
                )
            file.write_bytes(whole)


@check(KIND, "safety/nothing unpickled")
def _unpickled(bench: Bench) -> None:
    """A load creates no object that a pickle in a checkpoint names, at any place."""
    io = bench.make()
    path = bench.folder / NAME
    # Of these, pickle names a class or a function; a checksum around it proves nothing.
    values = {**contents(1, shards=io.supports_shards), "complex": 1j, "ordered": OrderedDict(a=1)}
    io.save_checkpoint({**values, "counter": Counter("a")}, path)
    io.wait()
    named: list[str] = []

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        # An unpickler with its own rules has a find_class of its own, which calls this one.
        if event == "pickle.find_class" and sys._getframe(1).f_code.co_name != "find_class":
            named.append(".".join(map(str, arguments)))

    sys.addaudithook(note)
    for name, call in _opened(io, path):
        bench.error(call)
        assert not named, (
            f"{name} unpickles what the checkpoint says (it has looked up {named[0]}), so that "
            "whoever can write one executes code: load with torch.load(weights_only=True), or from "
            "a format that names nothing, such as JSON"
        )


@check(KIND, "safety/nothing hostile saved")
def _saved_hostile(bench: Bench) -> None:
    """A save refuses an object with code of its own, or the load does not execute it."""
    io = bench.make()
    path = bench.folder / NAME

    def save() -> None:
        io.save_checkpoint({"state_dict": {}, "number": _Hostile()}, path)
        io.wait()

    if bench.error(save) is None:
        bench.error(lambda: io.load_checkpoint(path))
        _not_executed(bench, "load_checkpoint")


@check(KIND, "safety/nothing hostile loaded")
def _loaded_hostile(bench: Bench) -> None:
    """A load executes nothing from a hostile checkpoint, also if its checksums are right."""
    io = bench.make()
    path = bench.folder / NAME
    # A device may be saved; whoever writes a hostile checkpoint pickles it as a call of a function.
    reduce: Any = lambda device: (os.mkdir, (_MARK,))  # noqa: E731
    copyreg.pickle(torch.device, reduce)

    def save() -> None:
        io.save_checkpoint({"state_dict": {}, "number": torch.device("cpu")}, path)
        io.wait()

    error = bench.error(save)
    copyreg.dispatch_table.pop(torch.device)
    if (bench.folder / _MARK).exists():
        (bench.folder / _MARK).rmdir()  # a copy of the saved state is made in the same way
    if error is None:
        for name, call in _opened(io, path):
            bench.error(call)
            _not_executed(bench, name)


@check(KIND, "safety/names stay inside")
def _names(bench: Bench) -> None:
    """Names in a checkpoint, such as '../x', are data. No file is written outside of its path."""
    io = bench.make()
    folder = bench.folder / "inner"
    folder.mkdir()
    names = ["../outside", str(bench.folder / "absolute"), "a/b/c", "..", "/", "", "x\0y", "~"]
    state = {name: torch.full((2,), float(number)) for number, name in enumerate(names)}
    io.save_checkpoint({"state_dict": state, "../key": 1}, folder / NAME)
    io.wait()
    loaded = io.load_checkpoint(folder / NAME)["state_dict"]
    wrong = [
        name for name in names if name not in loaded or not torch.equal(loaded[name], state[name])
    ]
    assert not wrong, f"tensors with the names {wrong} did not come back as they were"
    outside = [
        name for name in bench.files() if name != "inner" and not name.startswith(f"inner/{NAME}")
    ]
    assert not outside, f"a save wrote {', '.join(outside)}, as names in the checkpoint say"
    io.remove_checkpoint(folder / NAME)
    io.wait()
    assert bench.files() == ["inner"], f"after its removal there is {', '.join(bench.files())}"


@check(KIND, "safety/damage")
def _damage(bench: Bench) -> None:
    """A truncated checkpoint, or one with a flipped bit, raises an error and loads nothing."""
    io = bench.make()
    path = bench.folder / NAME
    saved(io, path, 1)
    chance = random.Random(0)
    for file in _files(path):
        whole = file.read_bytes()
        size = len(whole)
        for kept in sorted({0, 1, size // 3, size // 2, max(0, size - 1)}):
            file.write_bytes(whole[:kept])
            _judge_damaged(bench, io, path, f"{file.name} is cut to {kept} of {size} bytes")
        for _ in range(24):
            flipped = bytearray(whole)
            where = chance.randrange(size)
            flipped[where] ^= 1 << chance.randrange(8)
            file.write_bytes(flipped)
            _judge_damaged(bench, io, path, f"{file.name} has a bit flipped at {where} of {size}")
        file.write_bytes(whole)
        file.unlink()
        _judge_damaged(bench, io, path, f"{file.name} is missing")
        file.write_bytes(whole)
    assert number_in(io, path) == 1


def _judge_damaged(bench: Bench, io: CheckpointIO, path: Path, how: str) -> None:
    error = bench.error(lambda: io.verify_checkpoint(path))
    if error is None:
        # Unread bytes may have any value: the loaded values must equal the saved ones.
        try:
            number = number_in(io, path)
        except Exception as other:
            raise AssertionError(
                f"verify_checkpoint takes a checkpoint of which {how}, and loading it ends in "
                f"{brief(other)}: an interrupted run would choose it"
            ) from None
        assert number == 1, f"a checkpoint of which {how} was loaded with the number {number}"
        return
    assert isinstance(error, CheckpointError), (
        f"verify_checkpoint of a checkpoint of which {how} ended in {brief(error)}; expected "
        "CheckpointCorruptError, upon which a run looks for another one"
    )


@check(KIND, "safety/failed save")
def _failed(bench: Bench) -> None:
    """A failed save keeps the previous checkpoint, and leaves no other file."""
    io = bench.make()
    path = bench.folder / NAME
    saved(io, path, 1)
    before = bench.files()

    def save() -> None:
        # The first tensors are good, so that a format that writes as it goes has begun.
        values: dict[str, Any] = {f"{i}": torch.ones(1000) for i in range(8)}
        io.save_checkpoint({"state_dict": values, "number": object()}, path)
        io.wait()

    error = bench.error(save)
    assert error is not None, "a checkpoint that holds object() was saved"
    error = bench.error(lambda: bench.make().verify_checkpoint(path))
    assert error is None, f"a save that failed destroyed the checkpoint before: {brief(error)}"
    assert number_in(io, path) == 1
    left = sorted(set(bench.files()) - set(before))
    assert not left, f"a save that failed left {', '.join(left)}"


@check(KIND, "safety/half written")
def _half(bench: Bench) -> None:
    """Until a save is complete, none of its files counts as a checkpoint."""
    io = bench.make()
    path, partial = bench.folder / NAME, bench.folder / "partial.ckpt"
    saved(io, path, 1)
    files = _files(path)
    # As a copy that was interrupted leaves them: the first files whole, the next one in part.
    for count in range(len(files)):
        if partial.is_dir():
            shutil.rmtree(partial)
        for position, file in enumerate(files[: count + 1]):
            target = partial if path.is_file() else partial / file.relative_to(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            data = file.read_bytes()
            target.write_bytes(data if position < count else data[: len(data) // 2])
        error = bench.error(lambda: io.load_checkpoint(partial))
        assert isinstance(error, CheckpointError), (
            f"a copy that ended in {files[count].name} was loaded, or ended in {brief(error)}; "
            "expected CheckpointCorruptError"
        )
    with_nothing = bench.folder / "empty.ckpt"
    with_nothing.mkdir()
    error = bench.error(lambda: io.load_checkpoint(with_nothing))
    assert isinstance(error, CheckpointError), f"an empty folder was loaded: {brief(error)}"
    assert not isinstance(error, CheckpointNotFoundError) or "empty.ckpt" in str(error)


# -- durability: a small form of `stratagem checkpoint durability`


@check(KIND, "durability/fsync")
def _synced(bench: Bench) -> None:
    """A save calls fsync on each complete file, and on its folder.

    Killing the process cannot test this: only a power failure loses the kernel's buffers.
    """
    io = bench.make()
    path = bench.folder / NAME
    sizes = note_syncs()
    saved(io, path, 1)
    folders = [] if path.is_file() else [path, *(f for f in path.rglob("*") if f.is_dir())]
    for place in (*_files(path), *folders, bench.folder):
        status = place.stat()
        kind = "folder" if place.is_dir() else "file"
        size = sizes.get(status.st_ino)
        assert size is not None, (
            f"the {kind} {place.name!r} was not made durable when the save was over, so that a "
            "loss of power takes a checkpoint that counts as saved: call os.fsync on each file "
            "before it gets its name, and on the folder afterwards"
        )
        assert place.is_dir() or size == status.st_size, (
            f"os.fsync was called when {size} of the {status.st_size} bytes of {place.name!r} were "
            "written: flush the file first"
        )


def _scenarios(bench: Bench) -> tuple[Scenarios, Subject]:
    io = bench.make()
    subject = Subject(bench.component.name, io.asynchronous, bench.option("megabytes"))
    assert isinstance(io, CheckpointIO)
    return Scenarios(bench.folder, {}, seed=1), subject


def _judge(row: Row, scenarios: Scenarios) -> None:
    assert row.runs, f"{row.scenario}: nothing was tried"
    assert not row.wrong, (
        f"{row.scenario}: {len(row.wrong)} of {row.runs} runs went wrong: "
        f"{'; '.join(row.wrong[:3])}\n{scenarios.log()}"
    )


def _register(name: str, about: str, run: Callable[[Scenarios, Subject, Bench], Row]) -> None:
    def tried(bench: Bench) -> None:
        scenarios, subject = _scenarios(bench)
        _judge(run(scenarios, subject, bench), scenarios)

    tried.__doc__ = about
    check(KIND, f"durability/{name}", slow=True)(tried)


_register(
    "kill -9",
    "After a kill during a save, the last durable checkpoint or a newer one loads.",
    lambda scenarios, subject, bench: scenarios.kill(subject, bench.option("kills")),
)
_register(
    "kill -9 on a slow disk",
    "The same holds for a kill between any two calls that rename or sync a file.",
    lambda scenarios, subject, bench: scenarios.kill(subject, bench.option("kills"), slow=True),
)
_register(
    "a lost rank",
    "The same holds if one of two saving ranks is killed. The other rank ends.",
    lambda scenarios, subject, bench: scenarios.lose_rank(subject, 1),
)
_register(
    "full disk",
    "A save to a full disk raises an error, and keeps the previous checkpoint.",
    lambda scenarios, subject, bench: scenarios.fill_disk(subject, 2),
)
_register(
    "failing fsync",
    "If any fsync of a save fails, it raises an error and keeps the previous checkpoint.",
    lambda scenarios, subject, bench: scenarios.fail_syncs(subject),
)
_register(
    "read-only folder",
    "A save without write permission raises an error, and keeps the previous checkpoint.",
    lambda scenarios, subject, bench: scenarios.forbid_writing(subject),
)


check(KIND, "life/pickled")(pickled)
