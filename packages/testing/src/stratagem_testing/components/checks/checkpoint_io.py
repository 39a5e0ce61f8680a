"""Checkpoint formats: what comes back, and what else is at a path."""

from __future__ import annotations

import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stratagem.checkpoint import CheckpointIO, Shards
from stratagem.errors import CheckpointContentError, CheckpointNotFoundError
from stratagem_testing.components.bench import Bench, brief
from stratagem_testing.components.check import check
from stratagem_testing.surroundings import open_files

KIND = "checkpoint_io"
NAME = "model.ckpt"


def contents(number: int = 0, *, shards: bool = False) -> dict[str, Any]:
    """Return a checkpoint with tensors that hold one number."""
    weight: Any = torch.full((6, 4), float(number))
    if shards:
        weight = Shards.of_flat(weight.shape, weight.flatten(), start=0)
    return {"state_dict": {"weight": weight}, "number": number}


def saved(io: CheckpointIO, path: Path, number: int) -> None:
    """Save a checkpoint, and wait until it is durable."""
    io.save_checkpoint(contents(number, shards=io.supports_shards), path)
    io.wait()


def number_in(io: CheckpointIO, path: Path) -> int:
    """Return the number that a checkpoint holds."""
    loaded = io.load_checkpoint(path)
    numbers = {int(loaded["number"]), *map(int, loaded["state_dict"]["weight"].unique().tolist())}
    assert len(numbers) == 1, f"the checkpoint at {path.name} mixes the saves {sorted(numbers)}"
    return numbers.pop()


def _values() -> dict[str, Any]:
    """Return a checkpoint with one of everything that one may hold."""
    shared = torch.arange(6.0)
    floats = ["float64", "float32", "float16", "bfloat16", "complex64", "complex128"]
    floats += ["float8_e4m3fn", "float8_e5m2"]
    integers = ("int64", "int32", "int16", "int8", "uint8", "uint16")
    tensors = {name: torch.arange(5).to(getattr(torch, name)) for name in (*floats, *integers)}
    return {
        **tensors,
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(0.1),
        "empty": torch.empty(0, 7),
        "transposed": torch.arange(12.0).view(3, 4).t(),
        "part": torch.arange(12.0)[3:7],
        "not finite": torch.tensor([float("nan"), float("inf"), -0.0]),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "shared": [shared, shared[2:], shared],
        "plain": [None, True, 1 << 80, -1.5, float("inf"), 2 + 3j, "text \u2713 \n\0", b"\0\xff"],
        "numbers": [1, 1.0, True, False, 0, -0.0, 1 / 3, 5e-324, float("nan"), float("-inf")],
        "nested": {"tuple": (1, ("two", [3])), "set": {1, "a"}, 7: "a key", (1, 2): "a tuple"},
        "keys": {"1": "text", 1: "int", "None": 0, None: 1, "a.b": 2, "a": {"b": 3}, "": 4, 0.5: 5},
        "ordered": OrderedDict(b=1, a=2),
        "counter": Counter("aab"),
        "shape": torch.Size((2, 3)),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "empties": [{}, [], (), set(), "", b""],
    }


def _difference(own: Any, other: Any, where: str = "it") -> str | None:
    """Return where two checkpoints differ, and how."""
    if isinstance(other, Tensor):
        if not isinstance(own, Tensor) or own.dtype is not other.dtype or own.shape != other.shape:
            return f"{where} is {_kind(own)}, expected {_kind(other)}"
        return (
            None
            if _bits(own) == _bits(other)
            else f"{where} has other values: {own.tolist()}, {other.tolist()}"
        )
    # An OrderedDict may come back as a dict, which is in order too.
    if type(own) is not type(other) and not (isinstance(own, dict) and isinstance(other, dict)):
        return f"{where} is {_kind(own)}, expected {_kind(other)}"
    if isinstance(other, dict):
        if [*map(repr, own)] != [*map(repr, other)]:
            return f"{where} has the keys {list(own)}, expected {list(other)}"
        inner = (_difference(own[key], other[key], f"{where}[{key!r}]") for key in other)
        return next((found for found in inner if found), None)
    if isinstance(other, (list, tuple)) and not isinstance(other, torch.Size):
        if len(own) != len(other):
            return f"{where} has {len(own)} entries, expected {len(other)}"
        pairs = enumerate(zip(own, other, strict=True))
        inner = (_difference(a, b, f"{where}[{index}]") for index, (a, b) in pairs)
        return next((found for found in inner if found), None)
    same = repr(own) == repr(other) if isinstance(other, float) else own == other  # NaN, -0.0
    return None if same else f"{where} is {own!r}, expected {other!r}"


def _bits(tensor: Tensor) -> bytes:
    """Return the bytes of a tensor: NaN is like itself, and -0.0 is not 0.0."""
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).tolist())


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} and shape {tuple(value.shape)}"
    return f"{type(value).__name__} {value!r}"


@check(KIND, "values/round trip")
def _round_trip(bench: Bench) -> None:
    """A load returns every kind of value with its type and bits, on the CPU."""
    io = bench.make()
    assert isinstance(io, CheckpointIO), (
        f"{bench.component.name} made {io!r}: subclass stratagem.checkpoint.CheckpointIO"
    )
    path = bench.folder / NAME
    given = _values()
    io.save_checkpoint(given, path)
    io.wait()
    where = _difference(given, _values(), "checkpoint")
    assert where is None, (
        f"save_checkpoint changed what it was given: {where}. The run goes on with it, and other "
        "callbacks save it, too: take copies of what is changed"
    )
    files = bench.files()
    loaded = bench.make().load_checkpoint(path)
    where = _difference(loaded, _values(), "checkpoint")
    assert where is None, f"a checkpoint came back changed: {where}"
    bench.make().verify_checkpoint(path)
    assert bench.files() == files, (
        f"loading made or removed {', '.join(set(files) ^ set(bench.files()))}: a checkpoint may "
        "lie in a folder that others own"
    )
    assert loaded["shared"][0].data_ptr() == loaded["shared"][2].data_ptr(), (
        "a tensor that was saved twice came back as two: tied weights would come apart"
    )


@check(KIND, "values/alone")
def _alone(bench: Bench) -> None:
    """Each kind of value comes back with its type if the checkpoint has nothing else.

    A format that writes one kind of file if it can, and another one if not, is tried with each.
    """
    values: dict[str, Any] = {
        "integers as keys": {1: "a", 2: {3: "b"}},
        "keys of several types": {True: 1, None: 2, 0.5: 3, "x": 4},
        "tuples": (1, (2, "three"), ()),
        "a tuple in a list": [(1, 2), [3]],
        "a tuple as a key": {(1, 2): "a"},
        "a set": {1, 2},
        "bytes": b"\0\xff",
        "floats": [1.0, 0.1, float("inf"), float("nan"), -0.0, 1e300],
        "a large integer": 1 << 80,
        "a complex number": 2 + 3j,
        "text": "\u2713 \n\0",
    }
    io = bench.make()
    for number, (what, value) in enumerate(values.items()):
        beside = {"state_dict": {"weight": torch.ones(2)}}
        for name, given in (("", {"kept": value}), ("tensors beside ", {**beside, "kept": value})):
            path = bench.folder / f"{number}{bool(name)}.ckpt"
            io.save_checkpoint(given, path)
            io.wait()
            where = _difference(bench.make().load_checkpoint(path), given, "checkpoint")
            assert where is None, (
                f"a checkpoint with {name}{what} came back changed: {where}. In others it may not, "
                "if the format writes another kind of file for them"
            )


@check(KIND, "values/refused")
def _refused(bench: Bench) -> None:
    """Saving unsafe data raises an error that names its place, and writes nothing."""
    io = bench.make()
    path = bench.folder / NAME

    def save() -> None:
        io.save_checkpoint({"deep": [1, {"here": Path("x")}]}, path)
        io.wait()

    error = bench.error(save)
    assert isinstance(error, CheckpointContentError), (
        "a checkpoint that holds a Path was not refused with CheckpointContentError, but ended "
        f"with {brief(error)}: whoever loads it would have to execute something "
        "(stratagem.state.check_safe_data names it)"
    )
    assert "here" in str(error), f"the refusal does not say where the value is: {error}"
    assert not bench.files(), f"the refused save left {', '.join(bench.files())}"


@check(KIND, "values/snapshot")
def _snapshot(bench: Bench) -> None:
    """A checkpoint has the values of tensors at the return of save_checkpoint, not later ones."""
    io = bench.make()
    made = contents(1, shards=io.supports_shards)
    weight: Any = made["state_dict"]["weight"]
    tensors = [piece for _, piece in weight.chunks] if io.supports_shards else [weight]
    io.save_checkpoint(made, bench.folder / NAME)
    for tensor in tensors:
        tensor.fill_(2.0)  # as the next step of training does
    io.wait()
    values = io.load_checkpoint(bench.folder / NAME)["state_dict"]["weight"].unique().tolist()
    assert values == [1.0], (
        f"the checkpoint holds {values} of a tensor that was changed after save_checkpoint had "
        "returned: copy it before that"
    )


@check(KIND, "values/independent")
def _independent(bench: Bench) -> None:
    """A loaded checkpoint is a copy: changes of it do not reach the stored one, nor do later saves.

    It can be moved, and be loaded where it is then.
    """
    io = bench.make()
    path = bench.folder / NAME
    made = contents(1, shards=io.supports_shards)
    io.save_checkpoint(made, path)
    io.wait()
    first = io.load_checkpoint(path)
    first["state_dict"]["weight"].fill_(5.0)  # as training does with weights that it has loaded
    first["number"] = 5
    found = bench.error(lambda: number_in(io, path)) or number_in(io, path)
    assert found == 1, (
        f"after changes of what load_checkpoint had returned, a second load returns {found}, "
        "expected 1: return tensors with memory of their own, which no file or cache shares"
    )
    second = io.load_checkpoint(path)
    saved(io, path, 2)
    values = second["state_dict"]["weight"].unique().tolist()
    assert values == [1.0], (
        f"a loaded tensor has the values {values} after a later save to the same path, expected "
        "[1.0]"
    )
    for each in bench.folder.glob(f"{NAME}*"):
        each.rename(bench.folder / f"moved{each.name}")
    moved = bench.folder / f"moved{NAME}"
    found = bench.error(lambda: number_in(io, moved)) or number_in(io, moved)
    assert found == 2, (
        f"a checkpoint that was moved to another name loads as {found!r}, expected 2: store no "
        "path of its own in it"
    )


@check(KIND, "values/shards")
def _shards(bench: Bench) -> None:
    """Shards of several ranks load as whole tensors, and can be opened tensor by tensor."""
    io = bench.make()
    path = bench.folder / NAME
    saved(io, path, 3)
    assert number_in(io, path) == 3
    opened = io.open_checkpoint(path)
    assert opened.keys() == io.load_checkpoint(path).keys(), (
        f"open_checkpoint has the keys {sorted(opened)}, load_checkpoint others"
    )
    assert tuple(opened["state_dict"]["weight"].shape) == (6, 4), (
        "open_checkpoint has another shape of a tensor than was saved"
    )


@check(KIND, "values/through Lite")
def _lite(bench: Bench) -> None:
    """Lite saves and loads a model and an optimizer in the format."""
    lite = bench.lite(plugins=[bench.component.given])
    lite.launch()
    net = torch.nn.Linear(2, 1)
    model = lite.setup(net)
    lite.save(NAME, {"model": model, "epoch": 3})
    lite.strategy.checkpoint_io.wait()
    expected = net.weight.detach().clone()
    torch.nn.init.zeros_(net.weight)
    state = {"model": model, "epoch": 0}
    lite.load(NAME, state)
    assert torch.equal(net.weight, expected), "Lite.load did not restore a weight"
    assert state["epoch"] == 3, f"Lite.load left epoch={state['epoch']}, expected 3"


@check(KIND, "paths/text and Path")
def _paths(bench: Bench) -> None:
    """A path can be a str or a Path, absolute or relative, in a folder that does not exist yet.

    Names may have spaces, brackets, other letters and several dots, or no suffix. A removal takes
    the same paths.
    """
    io = bench.make()
    folder = bench.folder
    paths: list[Any] = [folder / "new" / "a.ckpt", str(folder / "other" / "b.ckpt"), "c.ckpt"]
    paths += ["relative/d.ckpt", Path("relative/e.ckpt"), folder / "epoch=1-loss=0.25.ckpt"]
    paths += [
        folder / name for name in ("best [1] *.ckpt", "\u00fc 100%25.ckpt", "step#3?x=1.ckpt")
    ]
    paths += [folder / name for name in ("epoch=1-loss=0.5.ckpt", "epoch=1-loss=0.25.pt", "last")]
    for number, path in enumerate(paths):
        error = bench.error(lambda path=path, number=number: saved(io, path, number))  # type: ignore[misc]
        assert error is None, f"saving to {path!r} ended in {brief(error)}: make its folder"
    for number, path in enumerate(paths):
        error = bench.error(lambda path=path: bench.make().verify_checkpoint(path))  # type: ignore[misc]
        assert error is None, f"the checkpoint at {path!r} cannot be found: {brief(error)}"
        assert number_in(io, path) == number, (
            f"at {path!r} is the checkpoint of {paths[number_in(io, path)]!r}: make no other name "
            "of a path, as without its suffix"
        )
    assert Path("relative/d.ckpt").exists(), "nothing is at the path 'relative/d.ckpt'"
    for path in paths:
        error = bench.error(lambda path=path: (io.remove_checkpoint(path), io.wait()))  # type: ignore[misc]
        assert error is None, f"remove_checkpoint({path!r}) ended in {brief(error)}"
        error = bench.error(lambda path=path: bench.make().verify_checkpoint(path))  # type: ignore[misc]
        assert isinstance(error, CheckpointNotFoundError), (
            f"after remove_checkpoint({path!r}) verify_checkpoint ended in {brief(error)}, "
            "expected CheckpointNotFoundError"
        )


@check(KIND, "paths/missing")
def _missing(bench: Bench) -> None:
    """Without a checkpoint, a load raises CheckpointNotFoundError, and a removal does nothing."""
    io = bench.make()
    path = bench.folder / "nothing.ckpt"
    calls: dict[str, Callable[[Path], Any]] = {
        "load_checkpoint": io.load_checkpoint,
        "open_checkpoint": io.open_checkpoint,
        "verify_checkpoint": io.verify_checkpoint,
    }
    for name, call in calls.items():
        error = bench.error(lambda call=call: call(path))  # type: ignore[misc]
        assert isinstance(error, CheckpointNotFoundError), (
            f"{name} of a path where nothing is ended in {brief(error)}; expected "
            "CheckpointNotFoundError, upon which a run looks for another checkpoint"
        )
        assert "nothing.ckpt" in str(error), f"the error of {name} does not name the path: {error}"
    error = bench.error(lambda: (io.remove_checkpoint(path), io.wait()))
    assert error is None, f"remove_checkpoint of a path where nothing is ended in {brief(error)}"
    assert not bench.files(), f"looking at nothing made {', '.join(bench.files())}"


@check(KIND, "paths/saved again")
def _again(bench: Bench) -> None:
    """A second save to a path replaces the first, and leaves none of its files or contents.

    The files have the permissions that the user's umask gives.
    """
    io = bench.make()
    path = bench.folder / NAME
    larger = contents(1, shards=io.supports_shards)
    larger["state_dict"]["more"], larger["only in the first"] = torch.ones(1000), [1] * 1000
    io.save_checkpoint(larger, path)
    io.wait()
    first = bench.files()
    os.umask(mask := os.umask(0))  # the only way to read the umask
    for name in first:
        if (file := bench.folder / name).is_file():
            mode = file.stat().st_mode & 0o777
            assert mode & 0o444 == 0o444 & ~mask, (
                f"the file {name} has the mode {mode:o}, and the umask is {mask:03o}: other users "
                "of the group cannot read it, as of a file that tempfile makes; chmod it"
            )
    saved(io, path, 2)
    assert number_in(io, path) == 2, "after a second save the first checkpoint is there"
    loaded = io.load_checkpoint(path)
    left = {*loaded, *loaded["state_dict"]} - {"state_dict", "number", "weight"}
    assert not left, f"after a second save {', '.join(left)} of the first checkpoint is there"
    assert len(bench.files()) == len(first), (
        f"a second save left {sorted(set(bench.files()) - set(first))} beside {first}"
    )


@check(KIND, "paths/removed")
def _removed(bench: Bench) -> None:
    """remove_checkpoint removes all files of one checkpoint, and no other files."""
    io = bench.make()
    names = (NAME, f"{NAME}.1", f"{NAME}-v1", "model")
    for number, name in enumerate(names):
        saved(io, bench.folder / name, number)
    (bench.folder / "notes.txt").write_text("mine")
    io.remove_checkpoint(bench.folder / NAME)
    io.wait()
    left = [name for name in bench.files() if name == NAME or name.startswith(f"{NAME}/")]
    assert not left, f"remove_checkpoint left {', '.join(left)}"
    assert (bench.folder / "notes.txt").exists(), "remove_checkpoint removed a file of the user's"
    for number, name in enumerate(names[1:], start=1):
        error = bench.error(lambda name=name: io.verify_checkpoint(bench.folder / name))  # type: ignore[misc]
        assert error is None, (
            f"remove_checkpoint({NAME!r}) damaged the checkpoint {name!r} beside it: {brief(error)}"
        )
        assert number_in(io, bench.folder / name) == number


@check(KIND, "paths/two runs")
def _two_runs(bench: Bench) -> None:
    """Two runs save to two paths of one folder at the same time."""
    paths = [bench.folder / f"run{number}.ckpt" for number in range(2)]
    begun: list[str] = []

    def hook(name: str) -> None:
        real = getattr(os, name)

        def hooked(*arguments: Any, **options: Any) -> Any:
            if not begun:  # the file of the first save gets its name while the second one saves
                begun.append(name)
                saved(bench.make(), paths[1], 1)
            return real(*arguments, **options)

        setattr(os, name, hooked)

    hook("replace")
    hook("rename")
    error = bench.error(lambda: saved(bench.make(), paths[0], 0))
    assert error is None, (
        f"a save to run0.ckpt, while another run saved to run1.ckpt, ended in {brief(error)}: give "
        "each path and process a temporary name of its own (stratagem.storage.durable_replace does)"
    )
    for number, path in enumerate(paths[: 1 + len(begun)]):
        found = number_in(bench.make(), path)
        assert found == number, f"at {path.name} is the checkpoint {found} of another run"


@check(KIND, "paths/linked")
def _linked(bench: Bench) -> None:
    """link_checkpoint gives a checkpoint a second name, or returns False and writes nothing.

    The name may be that of another checkpoint, which it replaces, and paths may be relative.
    """
    io = bench.make()
    target, link = bench.folder / NAME, bench.folder / "last.ckpt"
    saved(io, target, 4)
    before = bench.files()
    linked = io.link_checkpoint(target, link)
    io.wait()
    if linked is False:
        assert bench.files() == before, (
            f"link_checkpoint returned False and made {sorted(set(bench.files()) - set(before))}"
        )
        return
    assert linked is True, f"link_checkpoint returned {linked!r}; expected True or False"
    assert number_in(io, link) == 4
    for number, name in ((5, "inner/next.ckpt"), (6, "inner/one more.ckpt")):
        saved(io, Path(name), number)
        error = bench.error(
            lambda name=name: (io.link_checkpoint(name, "inner/last.ckpt"), io.wait())  # type: ignore[misc]
        )
        error = error or bench.error(lambda: number_in(io, Path("inner/last.ckpt")))
        assert error is None, (
            f"link_checkpoint({name!r}, 'inner/last.ckpt') ended in {brief(error)}: a link is "
            "replaced by each save, and what it names is beside it"
        )
        assert number_in(io, Path("inner/last.ckpt")) == number, "a second link is the first one"
    io.remove_checkpoint(link)
    io.wait()
    assert link.name not in bench.files(), f"remove_checkpoint left the link {link.name}"
    assert bench.error(lambda: io.verify_checkpoint(target)) is None, (
        "removing a link removed the checkpoint that it names: `last.ckpt` is replaced that way"
    )
    assert number_in(io, target) == 4


@check(KIND, "asynchronous/durable after wait")
def _durable(bench: Bench) -> None:
    """After wait(), a new process can load the checkpoint, and when_durable has been called."""
    io = bench.make()
    path = bench.folder / NAME
    called: list[bool] = []
    io.save_checkpoint(contents(5, shards=io.supports_shards), path)
    io.when_durable(lambda: called.append(path.exists()))
    if not io.asynchronous:
        assert called == [True], (
            "asynchronous=False, and when_durable has not called its function at once with the "
            f"checkpoint in place: {called}"
        )
    io.wait()
    assert called == [True], f"when_durable has called its function {len(called)} time(s) by wait()"
    child = bench.in_child(lambda report: report(number=number_in(bench.make(), path)))
    told = child.next_report()
    child.end()
    assert told == {"number": 5}, f"another process finds {told} after wait()"


@check(KIND, "asynchronous/prepared save")
def _prepared(bench: Bench) -> None:
    """The function that prepare_save returns can write the checkpoint in another thread."""
    io = bench.make()
    path = bench.folder / NAME
    rest = io.prepare_save(contents(6, shards=io.supports_shards), path)
    errors: list[BaseException] = []

    def write() -> None:
        try:
            rest()
            io.wait()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert not errors, f"what prepare_save returned ended in {brief(errors[0])} in another thread"
    assert number_in(io, path) == 6


@check(KIND, "asynchronous/teardown")
def _teardown(bench: Bench) -> None:
    """A teardown finishes pending writes, and leaves no thread and no open file.

    It can be called twice. A removal right after a save removes what that has written.
    """
    io = bench.make()
    path = bench.folder / NAME
    saved(io, path, 7)
    io.load_checkpoint(path)
    before, files = {thread.ident for thread in threading.enumerate()}, open_files()
    io.save_checkpoint(contents(8, shards=io.supports_shards), bench.folder / "removed.ckpt")
    io.remove_checkpoint(bench.folder / "removed.ckpt")
    io.wait()
    there = [name for name in bench.files() if name.startswith("removed.ckpt")]
    assert not there, f"remove_checkpoint right after a save left {', '.join(there)}"
    io.save_checkpoint(contents(7, shards=io.supports_shards), path)
    io.teardown()
    io.teardown()
    error = bench.error(lambda: bench.make().verify_checkpoint(path))
    assert error is None, f"after teardown() the checkpoint is not there whole: {brief(error)}"
    left = [thread.name for thread in threading.enumerate() if thread.ident not in before]
    assert not left, f"after teardown() there are the threads {', '.join(left)}"
    for _ in range(5):
        bench.error(lambda: bench.make().load_checkpoint(path))
    left = sorted({file for file in open_files() if file not in files})
    assert not left, f"after saves and loads these files are open still: {', '.join(left)}"
