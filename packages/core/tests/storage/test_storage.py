"""Checkpoints at URLs: on an S3-compatible server and in fsspec's memory, beside local ones."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from moto.server import ThreadedMotoServer
from torch import Tensor, nn

from stratagem import Lite, Module, Trainer
from stratagem.checkpoint import DirectoryCheckpointIO, SingleFileCheckpointIO
from stratagem.checkpoint.catalog import describe_checkpoint
from stratagem.errors import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointSaveError,
    ConfigurationError,
)
from stratagem.storage import durable_replace, paths, remote
from stratagem.storage.claims import claim

SCRIPTS = Path(__file__).parents[1] / "scripts"

RunScript = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    """A server with a bucket `bucket`; the variables by which s3fs finds it."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    yield {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }
    server.stop()


@pytest.fixture(params=["local", "memory", "s3"])
def folder(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> paths.Location:
    """An empty folder of each kind."""
    if request.param == "local":
        return tmp_path
    if request.param == "memory":
        return f"memory://{tmp_path.name}"
    for name, value in request.getfixturevalue("s3").items():
        monkeypatch.setenv(name, value)
    files = fsspec.filesystem("s3")
    if not files.exists("bucket"):
        files.mkdir("bucket")
    return f"s3://bucket/{tmp_path.name}"


# ---------------------------------------------------------------- paths


def test_to_location_keeps_urls_and_makes_paths() -> None:
    assert paths.to_location("s3://bucket/run/") == "s3://bucket/run"
    assert paths.to_location("file:///data/run") == Path("/data/run")
    assert paths.join("s3://bucket/run", "a.ckpt") == "s3://bucket/run/a.ckpt"
    assert paths.parent("s3://bucket/run/a.ckpt") == "s3://bucket/run"
    assert paths.name_of("s3://bucket/run/a.ckpt") == "a.ckpt"
    assert paths.absolute("s3://bucket/run") == "s3://bucket/run"
    assert paths.relative("s3://bucket/run/a.ckpt", "s3://bucket/run") == "a.ckpt"
    assert paths.relative("/data/other/a.ckpt", "/data/run") == "/data/other/a.ckpt"


def test_a_url_that_went_through_pathlib_is_refused() -> None:
    with pytest.raises(ConfigurationError) as caught:
        paths.to_location(Path("s3://bucket/run"))
    assert str(caught.value) == (
        f"received {Path('s3://bucket/run')!r}, a URL of which pathlib has taken a slash: pass it "
        "as a str"
    )


def test_a_url_that_nothing_knows_is_refused() -> None:
    with pytest.raises(ConfigurationError) as caught:
        paths.exists("nowhere://bucket/run")
    assert str(caught.value) == (
        "'nowhere://bucket/run': Protocol not known: nowhere; expected a local path, or a URL such "
        "as s3://bucket/folder"
    )


def test_missing_fsspec_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ConfigurationError) as caught:
        paths.exists("gs://bucket/run")
    assert str(caught.value).startswith("'gs://bucket/run' needs a package that is not installed: ")
    assert "gcsfs" in str(caught.value)


# ---------------------------------------------------------------- a format and its files


def test_a_checkpoint_is_saved_linked_listed_loaded_and_removed(folder: paths.Location) -> None:
    io = SingleFileCheckpointIO()
    first, second, last = (paths.join(folder, name) for name in ("a.ckpt", "b.ckpt", "last.ckpt"))
    io.save_checkpoint({"number": 1, "weights": torch.ones(1000)}, first)
    io.save_checkpoint({"number": 2}, second)
    assert io.link_checkpoint(first, last)
    assert io.load_checkpoint(last)["number"] == 1
    assert io.link_checkpoint(second, last)
    assert io.load_checkpoint(last)["number"] == 2
    io.verify_checkpoint(last)
    manifest = describe_checkpoint(first).manifest
    assert manifest is not None
    assert manifest.contents == ("number", "weights")
    assert (io.load_checkpoint(first)["weights"] == 1).all()
    with pytest.raises(CheckpointNotFoundError) as caught:
        io.load_checkpoint(paths.join(folder, "c.ckpt"))
    assert str(caught.value).startswith(
        f"no checkpoint '{folder}/c.ckpt'; the folder '{folder}' contains a.ckpt, b.ckpt"
    )
    with pytest.raises(CheckpointNotFoundError, match=r"contains a\.ckpt, b\.ckpt"):
        io.verify_checkpoint(paths.join(folder, "c.ckpt"))
    for path in (first, first, last, second):
        io.remove_checkpoint(path)
    assert paths.entries(folder) == []


def test_a_changed_byte_is_found_and_the_place_named(folder: paths.Location) -> None:
    io, path = SingleFileCheckpointIO(), paths.join(folder, "a.ckpt")
    io.save_checkpoint({"weights": torch.ones(1000)}, path)
    data = bytearray(paths.read(path))
    data[2000] ^= 1
    paths.write(path, bytes(data))
    for look in (io.load_checkpoint, io.verify_checkpoint):
        with pytest.raises(CheckpointCorruptError, match=str(path)):
            look(path)


@pytest.mark.parametrize("size", [1000, 12 << 20])
def test_failed_save_keeps_the_former_checkpoint(
    size: int, folder: paths.Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload in one piece, and one in several, of which some are there by then."""
    if str(folder).startswith("s3:"):
        monkeypatch.setattr(fsspec.filesystem("s3"), "default_block_size", 5 << 20)
    io, path = SingleFileCheckpointIO(), paths.join(folder, "a.ckpt")
    io.save_checkpoint({"number": 1}, path)
    save = torch.save

    def full(contents: Any, file: Any) -> None:
        save(contents, file)
        raise OSError(errno.ENOSPC, "No space left on device")

    weights = torch.zeros(size // 4)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(CheckpointSaveError, match=r"No space left.*is unchanged"):
            io.save_checkpoint({"number": 2, "weights": weights}, path)
    assert io.load_checkpoint(path) == {"number": 1}
    assert [entry.path for entry in paths.entries(folder)] == [path]
    if isinstance(folder, str):
        files = fsspec.core.url_to_fs(folder)[0]
        files.invalidate_cache()
        assert [paths.name_of(found) for found in files.find(folder)] == ["a.ckpt"]
        if "s3" in files.protocol:
            # Components that nobody sees would be paid for.
            assert not files.call_s3("list_multipart_uploads", Bucket="bucket").get("Uploads")
    io.save_checkpoint({"number": 3, "weights": weights}, path)
    assert io.load_checkpoint(path)["weights"].numel() == size // 4


def test_small_file_is_synced_with_concurrent_writers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced = tmp_path / "new" / "record.json", list[str]()
    fsync = os.fsync

    def sync(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        synced.append("temporary" if name.endswith(".saving") else name)
        if len(synced) == 2:
            # Another process writes, while the first one's file has no name yet.
            paths.write(path, b"second")
            assert path.read_bytes() == b"second"
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    paths.write(path, b"first")
    assert path.read_bytes() == b"first"
    assert synced == [tmp_path.name, "temporary", "temporary", "new", "new"]
    assert list(path.parent.iterdir()) == [path]


def test_durable_replace_is_atomic(
    tmp_path: Path,
) -> None:
    path = tmp_path / "new" / "rows.db"
    for rows in (2, 3):
        with durable_replace(path) as new:
            database = sqlite3.connect(new)
            with database:
                database.execute("CREATE TABLE rows (number INTEGER)")
                database.executemany("INSERT INTO rows VALUES (?)", [(n,) for n in range(rows)])
            database.close()
        with contextlib.closing(sqlite3.connect(path)) as database:
            assert len(database.execute("SELECT * FROM rows").fetchall()) == rows
    before = path.read_bytes()

    def replaced_until(error: Exception) -> None:
        with durable_replace(path) as new:
            new.write_text("half of")
            raise error

    with pytest.raises(ValueError, match="told to"):
        replaced_until(ValueError("told to"))
    assert path.read_bytes() == before
    with pytest.raises(CheckpointSaveError, match="was there before is unchanged") as caught:
        replaced_until(OSError(errno.ENOSPC, "No space left on device"))
    assert caught.value.errno == errno.ENOSPC
    assert list(path.parent.iterdir()) == [path]


def test_durable_replace_refuses_directories_and_urls(tmp_path: Path) -> None:
    with pytest.raises(CheckpointSaveError, match="it is a directory, give a file"):
        durable_replace(tmp_path).__enter__()
    with pytest.raises(CheckpointSaveError) as caught:
        durable_replace("memory://run/a.db").__enter__()
    assert str(caught.value) == (
        "cannot save 'memory://run/a.db': this format writes local files; give a local path"
    )


def test_a_directory_is_not_saved_at_a_url() -> None:
    with pytest.raises(CheckpointSaveError) as caught:
        DirectoryCheckpointIO().save_checkpoint({}, "memory://run/a.ckpt")
    assert str(caught.value) == (
        "cannot save 'memory://run/a.ckpt': a checkpoint that is a directory lies on a file system "
        "that all ranks share, not at a URL: give a local path, or use the format 'single_file'"
    )


def test_a_name_is_claimed_by_one_only(folder: paths.Location) -> None:
    path = paths.join(folder, "a.ckpt")
    mine = claim(path)
    assert mine is not None
    assert claim(path) is None
    paths.write(path, b"saved")
    mine.release()
    assert claim(path) is None
    again = claim(path, may_exist=True)
    assert again is not None
    again.release()
    assert [entry.path for entry in paths.entries(folder)] == [path]


def test_a_server_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    fsspec.filesystem("s3").clear_instance_cache()
    monkeypatch.setattr(fsspec.filesystem("s3"), "retries", 1)
    with pytest.raises(CheckpointSaveError, match=r"cannot save 's3://bucket/x/a\.ckpt': "):
        SingleFileCheckpointIO().save_checkpoint({}, "s3://bucket/x/a.ckpt")
    fsspec.filesystem("s3").clear_instance_cache()


# ---------------------------------------------------------------- the copy that is read


def left_in(folder: Path) -> list[Path]:
    """What is in a directory for temporary files, but for the folder of copies."""
    own = folder / f"stratagem-{os.geteuid()}"
    return [path for path in (*folder.iterdir(), *own.iterdir()) if path != own]


def test_fetch_returns_a_file_at_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As /dev/fd does on macOS."""
    url = f"memory://{tmp_path.name}/a.bin"
    with fsspec.open(url, "wb") as file:
        file.write(b"all of it")

    def fill(descriptor: int, *_: object) -> None:
        os.write(descriptor, b"all of it")

    monkeypatch.setattr(remote, "_fill", fill)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with os.fdopen(remote.fetch(url), "rb") as copy:
        assert copy.read() == b"all of it"


def test_concurrent_fetches_share_one_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    url = f"memory://{tmp_path.name}/a.ckpt"
    SingleFileCheckpointIO().save_checkpoint({"number": 1}, url)
    fetched = []
    both = threading.Barrier(2)
    flock, get_file = fcntl.flock, MemoryFileSystem.get_file

    def meet(descriptor: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX:
            both.wait(timeout=30)  # each has opened the copy by now
        flock(descriptor, operation)

    def count(self: Any, *args: Any, **kwargs: Any) -> Any:
        fetched.append(args[0])
        return get_file(self, *args, **kwargs)

    monkeypatch.setattr(fcntl, "flock", meet)
    monkeypatch.setattr(MemoryFileSystem, "get_file", count)
    read: list[bytes] = []

    def fetch() -> None:
        with paths.open_local(url) as file:
            read.append(file.read())

    threads = [threading.Thread(target=fetch) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read[0] == read[1] == paths.read(url)
    assert len(fetched) == 1
    assert left_in(tmp_path) == []


def test_full_disk_for_a_local_copy_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    url = f"memory://{tmp_path.name}/a.ckpt"
    paths.write(url, b"0123456789")

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(MemoryFileSystem, "get_file", full)
    with pytest.raises(OSError, match="no room") as caught, paths.open_local(url):
        pass
    assert caught.value.strerror == (
        f"no room in {str(tmp_path)!r} for the 10 bytes of {url!r}: set TMPDIR to a directory that "
        "has it"
    )
    assert left_in(tmp_path) == []


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory for temporary files that everybody may write to."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a path be another user's."""
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
    else:
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        path.rename(path.with_name(f"stratagem-{user + 1}"))


def stored(name: str) -> tuple[str, bytes]:
    """The URL of a checkpoint, and what is there."""
    url = f"memory://{name}/a.ckpt"
    SingleFileCheckpointIO().save_checkpoint({"number": 1}, url)
    return url, paths.read(url)


def name_of_copy(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the copy of a URL is called while it is fetched."""
    seen: list[str] = []
    get_file = MemoryFileSystem.get_file

    def look(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.extend(path.name for path in folder.iterdir())
        return get_file(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(MemoryFileSystem, "get_file", look)
        with paths.open_local(url):
            pass
    (name,) = seen
    return name


def test_a_folder_for_copies_that_is_not_this_users_alone_is_refused(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _ = stored(shared.parent.name)
    own = shared / f"stratagem-{os.geteuid()}"
    name = name_of_copy(url, own, monkeypatch)
    assert own.stat().st_mode & 0o777 == 0o700
    crafted = shared / "crafted"
    SingleFileCheckpointIO().save_checkpoint({"number": 6}, crafted)

    own.rmdir()
    (shared / "elsewhere").mkdir(0o700)
    own.symlink_to(shared / "elsewhere")
    with pytest.raises(PermissionError, match="is a link, another user's") as caught:
        SingleFileCheckpointIO().load_checkpoint(url)
    assert caught.value.strerror == (
        f"{str(own)!r}, where copies of what is at URLs are kept, is a link, another user's, or of "
        f"another kind; expected one that user {os.geteuid()} alone may enter: remove it, or set "
        "TMPDIR to a directory of your own"
    )
    assert list((shared / "elsewhere").iterdir()) == []

    own.unlink()
    own.mkdir()
    own.chmod(0o777)
    shutil.copyfile(crafted, own / name)
    with pytest.raises(PermissionError, match="with the mode 777; expected"):
        SingleFileCheckpointIO().load_checkpoint(url)

    own.chmod(0o700)
    give_away(own, monkeypatch)
    with pytest.raises(PermissionError, match=r"is user \d+'s, with the mode 700; expected"):
        SingleFileCheckpointIO().load_checkpoint(url)


def test_a_file_in_the_place_of_a_copy_is_never_taken_for_one(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, data = stored(shared.parent.name)
    own = shared / f"stratagem-{os.geteuid()}"
    name = name_of_copy(url, own, monkeypatch)
    # As a process leaves it that was killed: all of its size, and not all of its bytes.
    (own / name).write_bytes(bytes(len(data)))
    (own / name).chmod(0o600)
    (own / "0123").write_bytes(b"of another URL")
    with paths.open_local(url) as file:
        assert file.read() == data
    assert left_in(shared) == []

    (shared / "notes").write_text("mine")
    (own / name).hardlink_to(shared / "notes")
    with pytest.raises(PermissionError, match="expected one that user"), paths.open_local(url):
        pass
    (own / name).unlink()
    (own / name).symlink_to(shared / "notes")
    with pytest.raises(PermissionError, match="is a link"), paths.open_local(url):
        pass
    assert (shared / "notes").read_text() == "mine"


# ---------------------------------------------------------------- both front ends


class Line(Module):
    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(width, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def train_dataloader(self) -> Any:
        return [torch.ones(2, self.hparams.width)] * 4

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_lite_saves_and_loads_at_a_url(folder: paths.Location) -> None:
    lite = Lite(accelerator="cpu")
    lite.launch()
    path = str(paths.join(folder, "lite.ckpt"))
    model = lite.setup(nn.Linear(2, 1))
    lite.save(path, {"model": model, "step": 3})
    other = lite.setup(nn.Linear(2, 1))
    state = {"model": other, "step": 0}
    assert lite.load(path, state) == {}
    assert state["step"] == 3
    assert torch.equal(other.weight, model.weight)
    with pytest.raises(CheckpointMismatchError, match=f"^'{path}': the checkpoint belongs to an"):
        lite.load(path, {"model": lite.setup(nn.Linear(3, 1))})


def test_a_root_at_a_url_gets_the_checkpoints_and_logs_stay_here(
    folder: paths.Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, enable_progress_bar=False, default_root_dir=folder
    )
    trainer.fit(Line())
    assert trainer.checkpoint_callback is not None
    path = trainer.checkpoint_callback.best_model_path
    inside = "" if isinstance(folder, str) else "stratagem_logs/version_0/"
    assert path == f"{folder}/{inside}checkpoints/epoch=0-step=4.ckpt"
    assert (tmp_path / "stratagem_logs" / "version_0").is_dir()
    loaded = Line.load_from_checkpoint(path)
    assert trainer.run is not None
    assert torch.equal(loaded.net.weight, trainer.run.module.state_dict()["net.weight"])


TRAINING = (SCRIPTS / "storage_training.py").read_text()


@pytest.mark.slow
def test_two_ranks_save_to_s3_and_another_process_goes_on_from_the_last(
    run_script: RunScript, s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    files = fsspec.filesystem("s3")
    if not files.exists("bucket"):
        files.mkdir("bucket")
    expected = run_script(TRAINING, "saved", "7").stdout.split(maxsplit=2)
    url = "s3://bucket/two-ranks"
    run_script(TRAINING, url, "5", env=s3)
    again = run_script(TRAINING, url, "7", "last", env=s3).stdout.split(maxsplit=2)
    assert again == ["4", f"{url}/step=6.ckpt", expected[2]]
    files.invalidate_cache()
    there = sorted(paths.name_of(path) for path in files.find(url))
    assert there == ["last.ckpt", "step=6.ckpt"]
    for command, told in (("inspect", "global step"), ("verify", "whole")):
        program = "from stratagem.cli import main; main()"
        said = run_script(program, "checkpoint", command, f"{url}/last.ckpt", env=s3).stdout
        assert told in said


def test_download_of_another_size_is_refused(tmp_path: Path) -> None:
    def answers(path: str) -> None:
        Path(path).write_bytes(b"x" * 20)

    folder = os.open(tmp_path, os.O_RDONLY)
    copy = os.open(tmp_path / "copy", os.O_RDWR | os.O_CREAT)
    try:
        with pytest.raises(OSError, match="20 bytes came of an object that was said to have 10"):
            remote._fill(copy, 10, answers, "copy", folder)
    finally:
        os.close(copy)
        os.close(folder)
