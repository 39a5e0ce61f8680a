"""The checkpoint file: durable, checked before it is loaded, and readable by everybody else."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import pickle
import random
import resource
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from stratagem import Trainer, __version__
from stratagem.checkpoint import SingleFileCheckpointIO
from stratagem.errors import (
    CheckpointContentError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointSaveError,
)
from stratagem.state.reading.unpickler import SafeUnpickler
from stratagem.storage.local import DurableFile
from stratagem.storage.owner import Owner, _started

SCRIPTS = Path(__file__).parents[1] / "scripts"

CONTENTS: dict[str, Any] = {
    "number": 7,
    "weights": torch.arange(50.0),
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A small whole checkpoint."""
    SingleFileCheckpointIO().save_checkpoint(CONTENTS, tmp_path / "model.ckpt")
    return tmp_path / "model.ckpt"


@pytest.fixture
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("something was loaded from a file that should have been refused")

    monkeypatch.setattr(SafeUnpickler, "load", load)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def corrupt(path: Path) -> str:
    """Return what loading says of a file that it must refuse."""
    with pytest.raises(CheckpointCorruptError) as caught:
        SingleFileCheckpointIO().load_checkpoint(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------- the format


def test_torch_load_reads_the_file_too(saved: Path) -> None:
    for mmap in (False, True):
        loaded = torch.load(saved, weights_only=True, mmap=mmap)
        assert torch.equal(loaded["weights"], CONTENTS["weights"])


def test_zip_comment_has_manifest_and_checksum(saved: Path) -> None:
    head, manifest, checksum = zipfile.ZipFile(saved).comment.split(b"\n")
    assert head == b"stratagem checkpoint"
    assert json.loads(manifest) == {
        "format_version": 2,
        "piece_size": 64 << 20,
        "stratagem": __version__,
        "torch": torch.__version__,
        "strategy": None,
        "world_size": None,
        "epoch": None,
        "global_step": None,
        "run": None,
        "nonfinite": None,
        "contents": ["number", "weights"],
    }
    data = saved.read_bytes()
    assert checksum.decode() == f"xxh3_128 {checksum_of(data[:-32])}"
    assert data.endswith(checksum)


def test_a_manifest_has_room_for_any_number_of_names_of_any_length(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    snow = "\N{SNOWMAN}"
    contents = {snow * 300 + str(number): number for number in range(1000)}
    io = SingleFileCheckpointIO()
    io.save_checkpoint(contents, path)
    names = json.loads(zipfile.ZipFile(path).comment.split(b"\n")[1])["contents"]
    assert names[0] == snow * 200
    assert names[-1] == f"... and {1000 - (len(names) - 1)} more"
    assert io.load_checkpoint(path) == contents


def test_a_file_of_plain_torch_save_is_loaded(tmp_path: Path) -> None:
    torch.save({"weights": torch.ones(3)}, tmp_path / "model.ckpt")
    loaded = SingleFileCheckpointIO().load_checkpoint(tmp_path / "model.ckpt")
    assert torch.equal(loaded["weights"], torch.ones(3))


def test_save_checkpoint_keeps_the_crc32_option_of_torch(saved: Path, tmp_path: Path) -> None:
    assert torch.serialization.get_crc32_options()
    torch.save({"weights": torch.ones(3)}, tmp_path / "plain.ckpt")
    assert zipfile.ZipFile(tmp_path / "plain.ckpt").testzip() is None


def test_a_trainers_checkpoint_says_where_training_stood(tmp_path: Path) -> None:
    from stratagem import Module

    class Net(Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = Trainer(
        accelerator="cpu",
        strategy="single_device",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Net(), [torch.ones(1, 2)] * 3)
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    manifest = json.loads(zipfile.ZipFile(tmp_path / "model.ckpt").comment.split(b"\n")[1])
    told = {name: manifest[name] for name in ("strategy", "world_size", "global_step")}
    assert told == {"strategy": "single_device", "world_size": 1, "global_step": 3}


# ---------------------------------------------------------------- damage


def test_one_flipped_bit_anywhere_is_found_before_anything_is_loaded(
    saved: Path, nothing_is_loaded: None
) -> None:
    whole = saved.read_bytes()
    chance = random.Random(1)
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << chance.randrange(8)
        saved.write_bytes(damaged)
        corrupt(saved)


def test_damaged_and_truncated_files_raise_different_messages(saved: Path) -> None:
    whole = saved.read_bytes()
    damaged = bytearray(whole)
    damaged[1000] ^= 1
    saved.write_bytes(damaged)
    said = corrupt(saved)
    assert said.startswith(f"'{saved}' is damaged: its contents have the checksum xxh3_128 ")
    assert said.endswith(
        f"but {whole[-32:].decode()} was written. Copy it again from where it is whole, or use an "
        "older one"
    )
    saved.write_bytes(whole[:1000])
    assert corrupt(saved) == (
        f"'{saved}' is not a whole checkpoint (1000 bytes): its end is missing. It may be "
        "truncated; use an older one"
    )
    saved.write_bytes(whole[:-1])
    assert "it ends with" in corrupt(saved)
    saved.write_bytes(whole + b"more")
    assert "it ends with" in corrupt(saved)
    saved.write_bytes(whole.replace(b"\nxxh3_128 ", b"\nXXH3_128 "))
    assert "its manifest cannot be read" in corrupt(saved)


def test_every_truncated_length_is_refused(saved: Path, nothing_is_loaded: None) -> None:
    whole = saved.read_bytes()
    for length in range(len(whole)):
        saved.write_bytes(whole[:length])
        corrupt(saved)


def test_without_verifying_the_contents_are_not_compared(saved: Path) -> None:
    damaged = bytearray(saved.read_bytes())
    at = damaged.index(CONTENTS["weights"].numpy().tobytes())
    damaged[at] ^= 1
    saved.write_bytes(damaged)
    loaded = SingleFileCheckpointIO(verify=False).load_checkpoint(saved)
    assert not torch.equal(loaded["weights"], CONTENTS["weights"])
    corrupt(saved)


def test_a_foreign_file_is_called_one(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("These are notes.\n" * 100)
    assert "it begins with b'Thes', expected a zip archive" in corrupt(notes)
    archive = tmp_path / "other.zip"
    with zipfile.ZipFile(archive, "w") as other:
        other.writestr("notes.txt", "These are notes.")
    assert "its entry 'notes.txt' is not in a folder 'notes.txt/'" in corrupt(archive)
    with zipfile.ZipFile(archive, "a") as other:
        other.comment = b"holiday pictures"
    assert "its manifest cannot be read" in corrupt(archive)


def test_a_file_that_goes_on_being_read_after_another_took_its_name_is_the_one_that_was_checked(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = SafeUnpickler.load

    def replaced_meanwhile(unpickler: SafeUnpickler) -> Any:
        SingleFileCheckpointIO().save_checkpoint({"number": 8}, saved)
        return load(unpickler)

    monkeypatch.setattr(SafeUnpickler, "load", replaced_meanwhile)
    assert SingleFileCheckpointIO().load_checkpoint(saved)["number"] == 7


# ---------------------------------------------------------------- files made to harm


def checksum_of(data: bytes, piece_size: int = 64 << 20) -> str:
    """Return the checksum of format version 2, by its definition."""
    pieces = [data[start : start + piece_size] for start in range(0, len(data), piece_size)]
    return xxhash.xxh3_128_hexdigest(b"".join(map(xxhash.xxh3_128_digest, pieces)))


def reseal(path: Path, **changes: Any) -> None:
    """Change the manifest of a checkpoint, and make its checksum fit."""
    data, comment = path.read_bytes(), zipfile.ZipFile(path).comment
    head, manifest, _ = comment.split(b"\n")
    text = json.dumps({**json.loads(manifest), **changes}).encode()
    before = head + b"\n" + text + b"\nxxh3_128 "
    contents = data[: -len(comment) - 2] + (len(before) + 32).to_bytes(2, "little") + before
    path.write_bytes(contents + checksum_of(contents).encode())


def test_a_newer_format_is_refused(saved: Path, nothing_is_loaded: None) -> None:
    reseal(saved, format_version=3, stratagem="3.1")
    assert corrupt(saved) == (
        f"'{saved}' has the file format 3, made by stratagem 3.1; this version reads up to 2: "
        "upgrade stratagem-core"
    )


@pytest.mark.parametrize("changes", [{"format_version": "x"}, {"contents": 3}, {"piece_size": 8}])
def test_a_manifest_of_something_else_is_refused(changes: dict[str, Any], saved: Path) -> None:
    reseal(saved, **changes)
    assert "its manifest cannot be read" in corrupt(saved)


def test_a_later_manifests_further_entries_are_passed_over(saved: Path) -> None:
    reseal(saved, colour="green")
    assert SingleFileCheckpointIO().load_checkpoint(saved)["number"] == 7


def rewrite(source: Path, target: Path, change: Callable[[zipfile.ZipInfo], Any]) -> None:
    """Copy a zip archive entry by entry; `change` may change the copy of each."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for entry in old.infolist():
            copy = zipfile.ZipInfo(entry.filename)
            change(copy)
            new.writestr(copy, old.read(entry))


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """What plain `torch.save` makes of 8 MB."""
    torch.save({"weights": torch.zeros(2_000_000)}, tmp_path / "plain.ckpt")
    return tmp_path / "plain.ckpt"


def test_a_compressed_archive_is_refused(
    plain: Path, tmp_path: Path, nothing_is_loaded: None
) -> None:
    bomb = tmp_path / "bomb.ckpt"

    def compress(entry: zipfile.ZipInfo) -> None:
        entry.compress_type = zipfile.ZIP_DEFLATED

    rewrite(plain, bomb, compress)
    assert bomb.stat().st_size < 20_000
    said = corrupt(bomb)
    assert "was refused: its entry 'plain/data.pkl' is compressed, from " in said
    assert "torch.save writes no such file" in said


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a\\..\\..\\b"])
def test_a_name_that_leads_out_of_the_archive_is_refused(
    name: str, plain: Path, tmp_path: Path, nothing_is_loaded: None
) -> None:
    path = tmp_path / "escape.ckpt"

    def rename(entry: zipfile.ZipInfo) -> None:
        if entry.filename.endswith("data/0"):
            entry.filename = name

    rewrite(plain, path, rename)
    assert f"its entry {name!r} leads out of the archive" in corrupt(path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_entries_of_one_name_are_refused(
    plain: Path, tmp_path: Path, nothing_is_loaded: None
) -> None:
    path = tmp_path / "twice.ckpt"

    def rename(entry: zipfile.ZipInfo) -> None:
        entry.filename = "plain/data.pkl"

    rewrite(plain, path, rename)
    assert "its entry 'plain/data.pkl' is there twice" in corrupt(path)


def test_entries_that_share_their_bytes_are_refused(
    tmp_path: Path, nothing_is_loaded: None
) -> None:
    path = tmp_path / "overlap.ckpt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/a", b"x" * 100_000)
        for number in range(5):
            info = zipfile.ZipInfo(f"x/b{number}")
            info.header_offset, info.CRC = 0, archive.infolist()[0].CRC
            info.file_size = info.compress_size = 100_000
            archive.filelist.append(info)
    assert "its entry 'x/b0' begins at 0, expected 100033" in corrupt(path)


def test_zip_directory_with_a_bad_size_is_refused(saved: Path, nothing_is_loaded: None) -> None:
    torch.save({}, saved)
    data = bytearray(saved.read_bytes())
    data[-10:-6] = (1 << 30).to_bytes(4, "little")
    saved.write_bytes(data)
    assert "the two records at its end disagree on where its entries are" in corrupt(saved)


def test_a_tensor_that_would_grow_when_copied_is_refused_in_both_directions(tmp_path: Path) -> None:
    path = tmp_path / "model.ckpt"
    huge = torch.zeros(1).expand(2**38)
    with pytest.raises(CheckpointContentError) as caught:
        SingleFileCheckpointIO().save_checkpoint({"a": [huge]}, path)
    assert str(caught.value) == (
        f"cannot save {path}: checkpoint['a'][0] is a tensor of {2**40} bytes, of which only 4 are "
        "stored. Store the tensor before it was expanded"
    )
    torch.save({"a": [huge]}, path)
    assert corrupt(path) == (
        f"'{path}' was refused: checkpoint['a'][0] is a tensor of {2**40} bytes, of which only 4 "
        "are stored"
    )
    small = {"a": torch.ones(1).expand(1000)}
    SingleFileCheckpointIO().save_checkpoint(small, path)
    assert torch.equal(SingleFileCheckpointIO().load_checkpoint(path)["a"], small["a"])


def test_pickle_that_allocates_huge_memory_is_refused(tmp_path: Path) -> None:
    class Greedy:
        def __reduce__(self) -> Any:
            return bytearray, (2**45,)

    torch.save({}, tmp_path / "plain.ckpt")
    path = tmp_path / "greedy.ckpt"
    with (
        zipfile.ZipFile(tmp_path / "plain.ckpt") as old,
        zipfile.ZipFile(path, "w") as new,
    ):
        for entry in old.infolist():
            pickled = pickle.dumps({"a": Greedy()}, 2)
            new.writestr(
                entry.filename, pickled if entry.filename.endswith("pkl") else old.read(entry)
            )
    assert corrupt(path) == (
        f"'{path}' was refused: bytes are made of a int by None. torch.save writes no such file: "
        "do not use it unless you know who made it"
    )


# ---------------------------------------------------------------- writers that die

KILLS = (SCRIPTS / "single_file_kills.py").read_text()


def test_twenty_killed_writers_leave_a_whole_checkpoint_and_the_next_save_cleans_up(
    tmp_path: Path, run_script: Callable[..., Any]
) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    finished = run_script(KILLS, str(seed))
    # Otherwise no kill met a save, and nothing was shown.
    assert int(finished.stdout) > 0
    assert names_in(tmp_path / "saved") == ["model.ckpt"]


def leftover(folder: Path, host: str = "00000000", *, age: float = 0.0) -> Path:
    path = folder / f".stratagem-{host}-0123456789abcdef.saving"
    path.write_bytes(b"half of it")
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_a_living_writers_temporary_file_is_left_alone(saved: Path, tmp_path: Path) -> None:
    io = SingleFileCheckpointIO()
    with DurableFile(tmp_path / "slow.ckpt") as slow:
        slow.write(memoryview(b"first half, "))
        io.save_checkpoint({"number": 8}, saved)
        meanwhile = names_in(tmp_path)
        slow.write(memoryview(b"second half"))
        slow.commit()
    assert len(meanwhile) == 2
    assert meanwhile[0].startswith(".stratagem-")
    assert names_in(tmp_path) == ["model.ckpt", "slow.ckpt"]
    assert (tmp_path / "slow.ckpt").read_bytes() == b"first half, second half"


def test_another_hosts_leftover_goes_after_a_day_without_a_change(tmp_path: Path) -> None:
    # Whether that host's locks are seen here depends on the network file system.
    path = leftover(tmp_path, age=23 * 3600)
    SingleFileCheckpointIO().save_checkpoint({}, tmp_path / "model.ckpt")
    assert path.exists()
    leftover(tmp_path, age=25 * 3600)
    SingleFileCheckpointIO().save_checkpoint({}, tmp_path / "model.ckpt")
    assert names_in(tmp_path) == ["model.ckpt"]


def test_other_files_are_nobodys_leftovers(tmp_path: Path) -> None:
    others = [".model.ckpt.swp", "model.ckpt.tmp", ".stratagem-notes"]
    for name in others:
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))
    SingleFileCheckpointIO().save_checkpoint({}, tmp_path / "model.ckpt")
    assert names_in(tmp_path) == sorted([*others, "model.ckpt"])


def test_writer_retries_if_its_file_is_removed_before_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock
    taken: list[Path] = []

    def removed_first(descriptor: int, operation: int) -> None:
        if not taken:
            taken.append(Path(f"/proc/self/fd/{descriptor}").readlink())
            taken[0].unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", removed_first)
    SingleFileCheckpointIO().save_checkpoint(CONTENTS, tmp_path / "model.ckpt")
    assert taken
    assert SingleFileCheckpointIO().load_checkpoint(tmp_path / "model.ckpt")["number"] == 7


def no_locks(descriptor: int, operation: int) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


def unseen_locks(descriptor: int, operation: int) -> None:
    """Every lock is granted, as where one node does not see another's."""


@pytest.mark.parametrize("flock", [no_locks, unseen_locks])
def test_without_locks_the_files_of_living_writers_are_left_alone_and_dead_ones_go(
    flock: Callable[[int, int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", flock)
    this = Owner.this()
    parent = dataclasses.replace(this, pid=os.getppid(), started=_started(os.getppid()) or 0)
    recycled = dataclasses.replace(parent, started=parent.started - 1)
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    living = leftover(tmp_path, str(parent), age=10**6)
    leftover(tmp_path, str(recycled))
    leftover(tmp_path, str(dataclasses.replace(this, pid=killed.pid)))
    with DurableFile(tmp_path / "slow.ckpt") as slow:
        slow.write(memoryview(b"slow"))
        SingleFileCheckpointIO().save_checkpoint(CONTENTS, tmp_path / "model.ckpt")
        slow.commit()
    assert names_in(tmp_path) == [living.name, "model.ckpt", "slow.ckpt"]


@pytest.mark.parametrize("flock", [no_locks, unseen_locks])
def test_without_locks_files_of_other_hosts_stay_for_a_day(
    flock: Callable[[int, int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", flock)
    elsewhere = dataclasses.replace(Owner.this(), boot="0123456789abcdef")
    young = leftover(tmp_path, str(elsewhere))
    SingleFileCheckpointIO().save_checkpoint({}, tmp_path / "model.ckpt")
    assert young.exists()
    leftover(tmp_path, str(elsewhere), age=25 * 3600)
    SingleFileCheckpointIO().save_checkpoint({}, tmp_path / "model.ckpt")
    assert names_in(tmp_path) == ["model.ckpt"]


def test_file_locked_by_another_container_is_kept(tmp_path: Path) -> None:
    this = Owner.this()
    container = dataclasses.replace(this, namespace=this.namespace + 1)
    path = leftover(tmp_path, str(container), age=10**6)
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        SingleFileCheckpointIO().save_checkpoint({}, tmp_path / "model.ckpt")
        assert path.exists()
    SingleFileCheckpointIO().save_checkpoint({}, tmp_path / "model.ckpt")
    assert names_in(tmp_path) == ["model.ckpt"]


def test_concurrent_writers_of_one_path_leave_one_complete_file(tmp_path: Path) -> None:
    io, path, errors = SingleFileCheckpointIO(), tmp_path / "model.ckpt", []

    def write(number: int) -> None:
        try:
            for _ in range(5):
                io.save_checkpoint({"weights": torch.full((100_000,), float(number))}, path)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    weights = io.load_checkpoint(path)["weights"]
    assert (weights == weights[0]).all()
    assert names_in(tmp_path) == ["model.ckpt"]


# ---------------------------------------------------------------- file systems that refuse


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def refused(io: SingleFileCheckpointIO, contents: dict[str, Any], path: Path) -> str:
    with pytest.raises(CheckpointSaveError) as caught:
        io.save_checkpoint(contents, path)
    assert isinstance(caught.value, OSError)
    assert isinstance(caught.value, CheckpointError)
    return str(caught.value)


def test_a_full_disk_keeps_the_old_checkpoint(small_disk: Path) -> None:
    io, path = SingleFileCheckpointIO(), small_disk / "model.ckpt"
    large = {"weights": [torch.ones(100_000) for _ in range(30)]}
    said = refused(io, large, path)
    assert said == (
        f"cannot save '{path}': OSError: [Errno 28] No space left on device; nothing is there"
    )
    io.save_checkpoint(CONTENTS, path)
    said = refused(io, large, path)
    assert said.endswith("No space left on device; what was there before is unchanged")
    assert io.load_checkpoint(path)["number"] == 7
    assert names_in(small_disk) == ["model.ckpt"]


def test_a_read_only_disk_keeps_the_old_checkpoint(small_disk: Path) -> None:
    io, path = SingleFileCheckpointIO(), small_disk / "model.ckpt"
    io.save_checkpoint(CONTENTS, path)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    said = refused(io, {"number": 8}, path)
    assert said.startswith(f"cannot save '{path}': OSError: [Errno 30] Read-only file system: ")
    assert said.endswith("; what was there before is unchanged")
    assert io.load_checkpoint(path)["number"] == 7


def test_a_limit_on_the_size_of_files_keeps_the_old_checkpoint(saved: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        said = refused(SingleFileCheckpointIO(), {"weights": torch.ones(1_000_000)}, saved)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert said == (
        f"cannot save '{saved}': OSError: [Errno 27] File too large; what was there before is "
        "unchanged"
    )
    assert SingleFileCheckpointIO().load_checkpoint(saved)["number"] == 7
    assert names_in(saved.parent) == ["model.ckpt"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_the_right_to_write_keeps_the_old_checkpoint(saved: Path) -> None:
    saved.parent.chmod(0o555)
    try:
        said = refused(SingleFileCheckpointIO(), {"number": 8}, saved)
    finally:
        saved.parent.chmod(0o755)
    assert said.startswith(f"cannot save '{saved}': PermissionError: [Errno 13] Permission denied")
    assert SingleFileCheckpointIO().load_checkpoint(saved)["number"] == 7


def test_a_disk_that_fails_to_sync_keeps_the_old_checkpoint(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    said = refused(SingleFileCheckpointIO(), {"number": 8}, saved)
    assert said == (
        f"cannot save '{saved}': OSError: [Errno 5] Input/output error; what was there before is "
        "unchanged"
    )
    assert SingleFileCheckpointIO().load_checkpoint(saved)["number"] == 7
    assert names_in(saved.parent) == ["model.ckpt"]


def test_failed_folder_sync_has_its_own_message(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def failing(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").resolve() == saved.parent:
            raise OSError(errno.EIO, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    said = refused(SingleFileCheckpointIO(), {"number": 8}, saved)
    assert said.endswith("it is in its place, but may be lost in a power cut")
    assert SingleFileCheckpointIO().load_checkpoint(saved)["number"] == 8


def test_keyboard_interrupt_in_a_save_leaves_no_file(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = DurableFile.write

    def interrupted(self: DurableFile, data: memoryview) -> int:
        if len(data) > 100_000:
            raise KeyboardInterrupt
        return write(self, data)

    monkeypatch.setattr(DurableFile, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        SingleFileCheckpointIO().save_checkpoint({"weights": torch.ones(1_000_000)}, saved)
    assert SingleFileCheckpointIO().load_checkpoint(saved)["number"] == 7
    assert names_in(saved.parent) == ["model.ckpt"]


def test_save_checkpoint_reraises_the_error_of_torch_save(saved: Path) -> None:
    weights = torch.ones(4)
    with pytest.raises(RuntimeError, match="view the same data as different types"):
        SingleFileCheckpointIO().save_checkpoint(
            {"a": weights, "b": weights.view(torch.int32)}, saved
        )
    assert SingleFileCheckpointIO().load_checkpoint(saved)["number"] == 7


def test_the_number_of_the_error_is_kept(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(descriptor: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(CheckpointSaveError) as caught:
        SingleFileCheckpointIO().save_checkpoint({}, saved)
    assert caught.value.errno == errno.EDQUOT


def test_a_directory_at_the_path_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    said = refused(SingleFileCheckpointIO(), CONTENTS, tmp_path)
    assert said == f"cannot save '{tmp_path}': it is a directory, give a file"
    assert names_in(tmp_path) == []


def test_save_syncs_new_directories_into_their_parents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").resolve())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    SingleFileCheckpointIO().save_checkpoint({}, tmp_path / "a" / "b" / "model.ckpt")
    assert synced[:2] == [tmp_path, tmp_path / "a"]
    assert synced[-1] == tmp_path / "a" / "b"


@pytest.mark.parametrize("value", [b"", b"\0", bytearray()])
def test_bytes_round_trip_also_if_empty(tmp_path: Path, value: Any) -> None:
    io = SingleFileCheckpointIO()
    io.save_checkpoint({"deep": [value]}, tmp_path / "model.ckpt")
    loaded = io.load_checkpoint(tmp_path / "model.ckpt")["deep"][0]
    assert (type(loaded), loaded) == (type(value), value)


def test_failed_link_checkpoint_names_the_former_target(tmp_path: Path) -> None:
    io = SingleFileCheckpointIO()
    io.save_checkpoint({"weights": torch.ones(1)}, tmp_path / "one.ckpt")
    with pytest.raises(CheckpointSaveError, match=r"cannot let '.*last' name .*what it named"):
        io.link_checkpoint(tmp_path / "one.ckpt", tmp_path / "one.ckpt" / "last")
