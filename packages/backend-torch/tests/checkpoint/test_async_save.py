"""Asynchronous saves: what is written is what was saved, in order, and its errors are heard."""

from __future__ import annotations

import pickle
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from stratagem import Callback, Lite, Module, Trainer
from stratagem.callbacks import ModelCheckpoint
from stratagem.checkpoint import AsyncCheckpointIO, CheckpointIO, Shards, SingleFileCheckpointIO
from stratagem.errors import (
    CheckpointContentError,
    CheckpointSaveError,
    ConfigurationError,
    UnknownNameError,
)
from stratagem_torch.checkpoint.snapshot import Snapshots


class Gated(SingleFileCheckpointIO):
    """Writes when its gate is open; links by a copy, if it shall."""

    def __init__(self, *, links: bool = False) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.links = links
        self.error: Exception | None = None
        self.begun: list[str] = []
        self.writing = self.at_once = 0

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        self.writing += 1
        self.at_once = max(self.at_once, self.writing)
        self.begun.append(Path(path).name)
        assert self.gate.wait(60)
        self.writing -= 1
        if self.error is not None:
            raise self.error
        super().save_checkpoint(checkpoint, path)

    def link_checkpoint(self, target: str | Path, path: str | Path) -> bool:
        if self.links:
            Path(path).symlink_to(target)
        return self.links


FULL = CheckpointSaveError("cannot save 'a': no space", errno=28)


@pytest.fixture
def gated() -> Gated:
    return Gated()


def failed(gated: Gated, path: Path) -> AsyncCheckpointIO:
    """Return what has had an error in the background, of which nobody was told."""
    io = AsyncCheckpointIO(gated)
    gated.error = FULL
    gated.gate.set()
    io.save_checkpoint({"number": 1}, path)
    assert io._write is not None
    io._write.join()
    return io


# ---------------------------------------------------------------- the copy


def test_async_save_writes_the_values_of_the_call(gated: Gated, tmp_path: Path) -> None:
    io = AsyncCheckpointIO(gated)
    weights, numbers, text = torch.ones(1000), [1, 2], bytearray(b"abc")
    io.save_checkpoint({"weights": weights, "numbers": numbers, "text": text}, tmp_path / "a")
    weights.fill_(2)
    numbers.append(3)
    text[0] = 0
    assert not (tmp_path / "a").exists()
    gated.gate.set()
    io.wait()
    loaded = SingleFileCheckpointIO().load_checkpoint(tmp_path / "a")
    assert torch.equal(loaded["weights"], torch.ones(1000))
    assert (loaded["numbers"], loaded["text"]) == ([1, 2], b"abc")


def test_the_file_has_the_bytes_of_a_save_that_is_waited_for(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    net[2].weight = net[0].weight
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    flat, shared = torch.arange(12.0), [1, 2]
    checkpoint = {
        "state_dict": net.state_dict(),  # an OrderedDict with versions
        "parameters": list(net.parameters()),
        "optimizer": optimizer.state_dict(),
        "views": [flat[2:4], flat.view(3, 4).t(), flat[:0], flat.expand(2, 12)],
        "shared": [shared, shared, (shared, {"in": shared})],
        "containers": [OrderedDict(a=1), Counter("aab"), {1, 2}, torch.Size([2, 3])],
        "types": [torch.float16, torch.device("cpu"), 1j, None, b"bytes", bytearray(b"more")],
        "others": [
            torch.tensor([1.0, 2.0], requires_grad=True),
            torch.tensor(1.5, dtype=torch.bfloat16),
        ],
    }
    SingleFileCheckpointIO().save_checkpoint(checkpoint, tmp_path / "waited")
    io = AsyncCheckpointIO()
    for name in ("first", "second"):  # the second in the memory of the first
        io.save_checkpoint(checkpoint, tmp_path / name)
        io.wait()
        assert (tmp_path / name).read_bytes() == (tmp_path / "waited").read_bytes()


def test_tensors_that_are_no_plain_memory_are_copied_too() -> None:
    sparse, conjugate = torch.eye(2).to_sparse(), torch.tensor([1 + 2j]).conj()
    taken = Snapshots().take({"sparse": sparse, "conjugate": conjugate})
    sparse.zero_()
    conjugate.zero_()
    assert torch.equal(taken["sparse"].to_dense(), torch.eye(2))
    assert taken["conjugate"].tolist() == [1 - 2j]


def test_snapshot_copies_shared_memory_once() -> None:
    whole = torch.arange(1000.0)
    snapshots = Snapshots()
    taken = snapshots.take({"a": whole, "b": whole.view(10, 100), "c": whole[5:7]})
    assert taken["b"].data_ptr() == taken["a"].data_ptr() != whole.data_ptr()
    assert taken["c"].tolist() == [5.0, 6.0]
    assert [len(memory) for memory in snapshots._memory.values()] == [1]


def test_memory_is_used_again_and_freed_when_sizes_change() -> None:
    snapshots = Snapshots()
    first = snapshots.take({"a": torch.ones(100), "b": torch.ones(50)})
    again = snapshots.take({"x": torch.zeros(100), "y": torch.zeros(100)})
    assert again["x"].data_ptr() == first["a"].data_ptr()
    assert again["y"].data_ptr() != first["b"].data_ptr()
    assert {size: len(memory) for (size, _), memory in snapshots._memory.items()} == {400: 2}
    snapshots.forget()
    assert snapshots._memory == {}


def test_of_shards_only_the_parts_are_copied() -> None:
    flat = torch.arange(100.0)
    shards = Shards.of_flat((10, 5), flat[:20], start=30)
    snapshots = Snapshots()
    taken = snapshots.take({"a": [shards]})["a"][0]
    flat.zero_()
    assert (taken.shape, taken.dtype) == ((10, 5), torch.float32)
    [(offsets, chunk)] = taken.chunks
    assert offsets == (6, 0)
    assert chunk.flatten().tolist() == list(range(20))
    assert chunk.untyped_storage().nbytes() == 80


def test_async_save_refuses_unsafe_types_before_a_copy(
    gated: Gated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Snapshots, "take", lambda *_: pytest.fail("it was copied"))
    io = AsyncCheckpointIO(gated)
    with pytest.raises(CheckpointContentError, match=r"checkpoint\['f'\] is of type builtins.func"):
        io.save_checkpoint({"f": lambda: 0}, tmp_path / "a")
    large = torch.zeros(1).expand(2**40)
    with pytest.raises(CheckpointContentError, match="of which only 4 are stored"):
        io.save_checkpoint({"w": large, "s": Shards((1,), large.dtype, [])}, tmp_path / "a")
    with pytest.raises(CheckpointContentError, match=r"\['f'\] is of type \S+Gated"):
        io.save_checkpoint({"s": Shards((1,), large.dtype, []), "f": gated}, tmp_path / "a")
    assert gated.begun == []


# ---------------------------------------------------------------- the order


def test_one_write_at_a_time_also_to_the_same_path(gated: Gated, tmp_path: Path) -> None:
    io = AsyncCheckpointIO(gated)
    gated.gate.set()
    for number in range(8):
        io.save_checkpoint({"weights": torch.full((1000,), float(number))}, tmp_path / "a")
    assert io.load_checkpoint(tmp_path / "a")["weights"].unique().tolist() == [7.0]
    assert (len(gated.begun), gated.at_once) == (8, 1)


def test_load_checkpoint_waits_for_a_pending_async_save(gated: Gated, tmp_path: Path) -> None:
    io = AsyncCheckpointIO(gated)
    for load in (io.load_checkpoint, io.open_checkpoint):
        gated.gate.clear()
        io.save_checkpoint({"number": 1}, tmp_path / "a")
        threading.Timer(0.01, gated.gate.set).start()
        assert load(tmp_path / "a") == {"number": 1}
        (tmp_path / "a").unlink()


def test_removing_and_linking_come_after_the_write(tmp_path: Path) -> None:
    for links in (True, False):
        gated = Gated(links=links)
        io, folder = AsyncCheckpointIO(gated), tmp_path / str(links)
        SingleFileCheckpointIO().save_checkpoint({"number": 1}, folder / "old")
        io.save_checkpoint({"number": 2}, folder / "new")
        assert io.link_checkpoint(folder / "new", folder / "last")
        io.remove_checkpoint(folder / "old")
        io.when_durable(partial(gated.begun.append, "told"))
        assert sorted(path.name for path in folder.iterdir() if path.name[0] != ".") == ["old"]
        gated.gate.set()
        io.wait()
        assert sorted(path.name for path in folder.iterdir()) == ["last", "new"]
        assert io.load_checkpoint(folder / "last") == {"number": 2}
        assert gated.begun == (["new", "told"] if links else ["new", "last", "told"])
        # With nothing in flight they are done at once.
        assert io.link_checkpoint(folder / "new", folder / "more") is links
        io.remove_checkpoint(folder / "new")
        assert not (folder / "new").exists()


def test_linking_another_checkpoint_waits_for_the_write(gated: Gated, tmp_path: Path) -> None:
    io = AsyncCheckpointIO(gated)
    io.save_checkpoint({"number": 2}, tmp_path / "new")
    threading.Timer(0.01, gated.gate.set).start()
    assert not io.link_checkpoint(tmp_path / "old", tmp_path / "last")
    assert (tmp_path / "new").exists()


def test_shards_that_cannot_be_linked_are_an_error(gated: Gated, tmp_path: Path) -> None:
    gated.supports_shards = True
    io = AsyncCheckpointIO(gated)
    io.save_checkpoint({"number": 2}, tmp_path / "new")
    assert io.link_checkpoint(tmp_path / "new", tmp_path / "last")
    gated.gate.set()
    with pytest.raises(CheckpointSaveError, match=r"Gated cannot link it to '\S+' on this"):
        io.wait()


def test_ctrl_c_in_the_waiting_ends_the_waiting_and_not_the_write(
    gated: Gated, tmp_path: Path
) -> None:
    io = AsyncCheckpointIO(gated)
    io.save_checkpoint({"number": 1}, tmp_path / "a")
    assert io._write is not None
    join = io._write.join

    def interrupted() -> None:
        raise KeyboardInterrupt

    io._write.join = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        io.save_checkpoint({"number": 2}, tmp_path / "b")
    io._write.join = join  # type: ignore[method-assign]
    gated.gate.set()
    io.save_checkpoint({"number": 3}, tmp_path / "c")
    io.wait()
    assert gated.begun == ["a", "c"]


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "call",
    [
        lambda io, path: io.raise_errors(),
        lambda io, path: io.save_checkpoint({"number": 2}, path),
        lambda io, path: io.load_checkpoint(path),
        lambda io, path: io.remove_checkpoint(path),
        lambda io, path: io.link_checkpoint(path, path.with_name("last")),
        lambda io, path: io.wait(),
        lambda io, path: io.teardown(),
    ],
    ids=["raise_errors", "save", "load", "remove", "link", "wait", "teardown"],
)
def test_an_error_in_the_background_is_raised_by_the_next_call_and_once(
    call: Callable[[AsyncCheckpointIO, Path], Any], gated: Gated, tmp_path: Path
) -> None:
    path = tmp_path / "a"
    SingleFileCheckpointIO().save_checkpoint({"number": 0}, path)
    io = failed(gated, path)
    with pytest.raises(CheckpointSaveError) as caught:
        call(io, path)
    assert caught.value is FULL
    assert SingleFileCheckpointIO().load_checkpoint(path) == {"number": 0}
    io.raise_errors()
    io.teardown()
    assert gated.begun == ["a"]


def test_failed_async_save_skips_pending_links_and_removals(gated: Gated, tmp_path: Path) -> None:
    gated.error = FULL
    io = AsyncCheckpointIO(gated)
    SingleFileCheckpointIO().save_checkpoint({"number": 1}, tmp_path / "old")
    io.save_checkpoint({"number": 2}, tmp_path / "new")
    io.link_checkpoint(tmp_path / "new", tmp_path / "last")
    io.remove_checkpoint(tmp_path / "old")
    gated.gate.set()
    with pytest.raises(CheckpointSaveError, match="no space"):
        io.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_unreported_async_save_error_fails_the_process(
    run_script: Callable[..., Any],
) -> None:
    finished = run_script(
        """
        from pathlib import Path
        from stratagem import Lite

        lite = Lite(accelerator="cpu", async_save=True)
        lite.launch()
        Path("file").touch()
        lite.save("file/model.ckpt", {"number": 1})
        print("the script is at its end", flush=True)
        """,
        expect=1,
    )
    assert finished.stdout == "the script is at its end\n"
    assert "CheckpointSaveError: cannot save 'file/model.ckpt': FileExistsError" in finished.stderr


# ---------------------------------------------------------------- in training


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def trainer(folder: Path, *callbacks: Callback, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        strategy="single_device",
        logger=False,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        default_root_dir=folder,
        **{"async_save": True, "max_epochs": 1, **options},
    )


BATCHES = [torch.ones(1, 2)] * 6


def test_async_save_writes_the_checkpoints_of_a_synchronous_fit(tmp_path: Path) -> None:
    files, saver = [], None
    for async_save in (False, True):
        torch.manual_seed(0)
        one = trainer(tmp_path / str(async_save), async_save=async_save)
        one.fit(Net(), BATCHES)
        saver = one.checkpoint_callback
        assert saver is not None
        files.append(SingleFileCheckpointIO().load_checkpoint(saver.best_model_path))
    assert saver is not None
    waited, behind = files
    assert (waited["epoch"], waited["global_step"]) == (behind["epoch"], behind["global_step"])
    for name, weights in waited["state_dict"].items():
        assert torch.equal(weights, behind["state_dict"][name])
    resumed = trainer(tmp_path / "resumed", max_epochs=2)
    resumed.fit(Net(), BATCHES, ckpt_path=saver.best_model_path)
    assert resumed.global_step == 12


@pytest.mark.parametrize("form", ["single_file", "directory"])
def test_save_last_with_async_save_names_the_newest_checkpoint(form: str, tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_last=True, filename="{step}")
    one = trainer(tmp_path, saver, plugins=form)
    one.fit(Net(), BATCHES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", "step=6.ckpt"]
    assert (tmp_path / "last.ckpt").readlink() == Path("step=6.ckpt")


class SavesAfter(Callback):
    """Saves after a step, and does something."""

    def __init__(self, step: int, path: Path, then: Callable[[Trainer], None]) -> None:
        self.step, self.path, self.then = step, path, then

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            self.then(trainer)


def test_an_error_in_the_background_ends_training_before_the_next_step(
    gated: Gated, tmp_path: Path
) -> None:
    gated.error = FULL
    gated.gate.set()

    def let_it_fail(trainer: Trainer) -> None:
        trainer.strategy.checkpoint_io._write.join()  # type: ignore[attr-defined]

    saves = SavesAfter(2, tmp_path / "a", let_it_fail)
    one = trainer(tmp_path, saves, plugins=gated, enable_checkpointing=False)
    with pytest.raises(CheckpointSaveError, match="no space"):
        one.fit(Net(), BATCHES)
    assert one.global_step == 2


def test_a_fit_ends_once_its_last_save_is_durable(gated: Gated, tmp_path: Path) -> None:
    saves = SavesAfter(6, tmp_path / "a", lambda _: threading.Timer(0.05, gated.gate.set).start())
    trainer(tmp_path, saves, plugins=gated, enable_checkpointing=False).fit(Net(), BATCHES)
    assert SingleFileCheckpointIO().load_checkpoint(tmp_path / "a")["global_step"] == 6
    assert gated.writing == 0


def test_fit_that_raises_waits_for_the_pending_async_save(
    gated: Gated, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Trainer) -> None:
        threading.Timer(0.05, gated.gate.set).start()
        raise ZeroDivisionError("of the user")

    one = trainer(
        tmp_path, SavesAfter(3, tmp_path / "a", fail), plugins=gated, enable_checkpointing=False
    )
    with pytest.raises(ZeroDivisionError, match="of the user"):
        one.fit(Net(), BATCHES)
    assert SingleFileCheckpointIO().load_checkpoint(tmp_path / "a")["global_step"] == 3
    # And if that fails, both are told.
    gated.gate.clear()
    gated.error = FULL
    with pytest.raises(ZeroDivisionError, match="of the user"):
        one.fit(Net(), BATCHES)
    assert capfd.readouterr().err == f"stratagem: CheckpointSaveError: {FULL}\n"


def test_a_signal_ends_a_fit_once_its_save_is_durable(run_script: Callable[..., Any]) -> None:
    finished = run_script(
        """
        import os, signal, time
        import torch
        from stratagem import Module, Trainer
        from stratagem.checkpoint import SingleFileCheckpointIO

        fsync = os.fsync
        def slow(descriptor):
            time.sleep(0.2)
            fsync(descriptor)
        os.fsync = slow

        class Net(Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(2, 1)
            def training_step(self, batch, batch_idx):
                if batch_idx == 2:
                    os.kill(os.getpid(), signal.SIGTERM)
                return self.layer(batch).sum()
            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)
            def on_exception(self, error):
                path = self.trainer.checkpoint_callback.dirpath / "interrupted-step=3.ckpt"
                print(SingleFileCheckpointIO().load_checkpoint(path)["global_step"])

        Trainer(
            accelerator="cpu", max_epochs=9, logger=False, enable_progress_bar=False,
            async_save=True,
        ).fit(Net(), [torch.ones(1, 2)] * 6)
        """,
        expect=143,
    )
    told, step = finished.stdout.splitlines()
    assert told.startswith("stratagem: SIGTERM: training ends here, saved as ")
    assert told.endswith("/checkpoints/interrupted-step=3.ckpt")
    assert step == "3"


def test_lite_raises_an_error_in_the_background_at_the_next_backward(
    gated: Gated, tmp_path: Path
) -> None:
    lite = Lite(accelerator="cpu", plugins=gated, async_save=True)
    lite.launch()
    model = lite.setup(torch.nn.Linear(2, 1))
    gated.error = FULL
    gated.gate.set()
    lite.save(tmp_path / "a", {"model": model})
    lite.strategy.checkpoint_io._write.join()  # type: ignore[attr-defined]
    with pytest.raises(CheckpointSaveError, match="no space"):
        lite.backward(model(torch.ones(1, 2)).sum())
    lite.backward(model(torch.ones(1, 2)).sum())


def test_lite_run_waits_for_pending_async_saves(gated: Gated, tmp_path: Path) -> None:
    class Saves(Lite):
        def run(self) -> None:
            self.save(tmp_path / "a", {"number": 1})
            threading.Timer(0.05, gated.gate.set).start()

    Saves(accelerator="cpu", plugins=gated, async_save=True).run()
    assert (tmp_path / "a").exists()


def test_async_save_on_two_ranks_loads_and_raises_on_both(
    run_script: Callable[..., Any],
) -> None:
    finished = run_script(
        """
        import os, time
        import torch
        from stratagem import Lite

        fsync = os.fsync
        def slow(descriptor):
            time.sleep(0.3)
            fsync(descriptor)
        os.fsync = slow

        lite = Lite(accelerator="cpu", strategy="ddp", devices=2, async_save=True)
        lite.launch()
        model = lite.setup(torch.nn.Linear(2, 1))
        lite.save("model.ckpt", {"model": model, "number": 7})
        assert lite.load("model.ckpt", {"model": model})["number"] == 7
        print("loaded\\n", end="", flush=True)  # in one write, which the other rank cannot divide
        lite.save("script.py/model.ckpt", {"number": 8})
        while True:
            lite.backward(model(torch.ones(1, 2)).sum())
        """,
        expect=1,
    )
    assert finished.stdout == "loaded\nloaded\n"
    assert "CheckpointSaveError: cannot save 'script.py/model.ckpt'" in finished.stderr
    assert "CommunicationError" not in finished.stderr


# ---------------------------------------------------------------- by name


def test_async_save_goes_around_any_format() -> None:
    lite = Lite(accelerator="cpu", async_save=True)
    io = lite.strategy.checkpoint_io
    assert isinstance(io, AsyncCheckpointIO)
    assert isinstance(io.inner, SingleFileCheckpointIO)
    assert lite.plan.checkpoint_io.why == "async_save=True; it writes single_file"
    own = Gated()
    io = Lite(accelerator="cpu", async_save=True, plugins=own).strategy.checkpoint_io
    assert isinstance(io, AsyncCheckpointIO)
    assert io.inner is own
    for options in ({"plugins": "async"}, {"plugins": "async", "async_save": True}):
        io = Lite(accelerator="cpu", **options).strategy.checkpoint_io
        assert isinstance(io, AsyncCheckpointIO)
    assert not Lite(accelerator="cpu").strategy.checkpoint_io.asynchronous


def test_two_of_them_around_each_other_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="it is asynchronous already; pass the format"):
        Lite(accelerator="cpu", async_save=True, plugins=AsyncCheckpointIO())
    with pytest.raises(UnknownNameError, match="single_fil"):
        AsyncCheckpointIO("single_fil")


def test_async_checkpoint_io_is_picklable(tmp_path: Path) -> None:
    io = AsyncCheckpointIO(SingleFileCheckpointIO(verify=False))
    io.save_checkpoint({"weights": torch.ones(100_000)}, tmp_path / "a")
    pickled = pickle.dumps(io)
    assert len(pickled) < 1000
    there: CheckpointIO = pickle.loads(pickled)
    assert isinstance(there, AsyncCheckpointIO)
    assert isinstance(there.inner, SingleFileCheckpointIO)
    assert not there.inner.verify
    io.wait()


def test_async_save_of_shards_survives_changes_and_a_lost_rank(
    run_script: Callable[..., Any],
) -> None:
    finished = run_script(
        """
        import os, signal, time
        import torch
        from stratagem import Lite

        lite = Lite(
            accelerator="cpu", strategy="fsdp", devices=2, plugins="directory", async_save=True
        )
        lite.launch()
        torch.manual_seed(0)
        model = lite.setup(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)))
        optimizer = lite.setup_optimizers(torch.optim.Adam(model.parameters(), lr=0.1))
        batch = torch.ones(1, 8)

        def step():
            loss = model(batch).square().sum()
            lite.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        for _ in range(3):
            step()
        lite.save("model", {"model": model, "optimizer": optimizer})
        after = [step() for _ in range(3)]
        lite.load("model", {"model": model, "optimizer": optimizer})
        assert [step() for _ in range(3)] == after
        print("the same", flush=True)

        if lite.global_rank == 1:
            def never(descriptor):
                time.sleep(600)
            os.fsync = never
        lite.save("model", {"model": model, "optimizer": optimizer})
        if lite.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            step()
        """,
        expect=1,
        timeout=60,
    )
    assert finished.stdout == "the same\nthe same\n"
    assert "rank 1" in finished.stderr
    assert "SIGKILL" in finished.stderr
    # The write in the background has told as well.
    assert "rank 1 has not written its share of a checkpoint" in finished.stderr
