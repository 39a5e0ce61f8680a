"""Sharded checkpoints: a directory that all ranks write, which loads under any strategy."""

from __future__ import annotations

import ctypes
import io
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from fixtures import run_file
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from stratagem import Lite
from stratagem.checkpoint import (
    DirectoryCheckpointIO,
    Shards,
    SingleFileCheckpointIO,
    consolidate_checkpoint,
)
from stratagem.errors import (
    CheckpointContentError,
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointSaveError,
)
from stratagem.state.reading.unpickler import SafeUnpickler
from stratagem.storage.local import DurableDirectory
from stratagem_torch.checkpoint.sharded.manifest import MANIFEST, STATE

SCRIPT = Path(__file__).parents[1] / "directory_scripts.py"

Launch = Callable[..., list[dict[str, Any]]]


def launch(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run the script; return what each rank wrote."""
    run_file(SCRIPT, *arguments, folder=folder)
    files = sorted(folder.glob("out-*.json"))
    told = [json.loads(file.read_text()) for file in files]
    for file in files:
        file.unlink()
    return told


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A directory that two ranks of fsdp have written, and the losses of ten steps after it."""
    folder = tmp_path_factory.mktemp("fsdp")
    told = launch(folder, "fsdp", "2", "save", "saved")
    return folder / "saved", told


@pytest.fixture
def saved(fsdp: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    shutil.copytree(fsdp[0], tmp_path / "saved")
    return tmp_path / "saved"


# ---------------------------------------------------------------- what it is


def test_each_rank_writes_its_own_share(fsdp: tuple[Path, list[dict[str, Any]]]) -> None:
    path, told = fsdp
    assert sorted(file.name for file in path.iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        MANIFEST,
        "state.ckpt",
    ]
    # 33 rows are 17 and 16; rank 0 writes what is whole, too.
    weights = {rank: torch.zeros(0) for rank in (0, 1)}
    layout = pickle.loads((path / ".metadata").read_bytes())
    assert isinstance(layout, Metadata)
    for index, place in layout.storage_data.items():
        if index.fqn == "model.0.weight":
            rank = int(place.relative_path[2])
            with (path / place.relative_path).open("rb") as file:
                file.seek(place.offset)
                weights[rank] = torch.load(io.BytesIO(file.read(place.length)))
    assert {rank: weight.shape for rank, weight in weights.items()} == {0: (17, 7), 1: (16, 7)}
    assert 0.4 < told[1]["written"] / told[0]["written"] < 1


def test_manifest_has_strategy_world_size_and_checksums(fsdp: tuple[Path, Any]) -> None:
    manifest = json.loads((fsdp[0] / MANIFEST).read_text())
    assert manifest["strategy"] == "fsdp"
    assert manifest["world_size"] == 2
    assert manifest["contents"] == ["model", "optimizer", "step", "more"]
    for name, told in manifest["files"].items():
        contents = (fsdp[0] / name).read_bytes()
        assert told == {"size": len(contents), "xxh3_128": checksum_of(contents)}


@pytest.mark.parametrize(
    ("strategy", "devices", "tolerance"),
    [("fsdp", "2", 0), ("ddp", "2", 0), ("single_device", "1", 1e-7), ("fsdp", "3", 1e-7)],
)
def test_directory_checkpoint_loads_under_any_strategy_and_world_size(
    strategy: str,
    devices: str,
    tolerance: float,
    fsdp: tuple[Path, list[dict[str, Any]]],
    tmp_path: Path,
) -> None:
    path, before = fsdp
    told = launch(tmp_path, strategy, devices, "load", str(path), "single_file")
    for rank in told:
        assert rank["rest"] == []
        assert rank["step"] == 10
        assert torch.allclose(
            torch.tensor(rank["losses"]), torch.tensor(before[0]["losses"]), rtol=0, atol=tolerance
        )


def test_consolidated_checkpoint_loads_as_a_single_file(
    fsdp: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    consolidate_checkpoint(fsdp[0], tmp_path / "one.ckpt")
    plain = torch.load(tmp_path / "one.ckpt", weights_only=True)
    assert plain["model"]["0.weight"].shape == (33, 7)
    assert plain["optimizer"]["state"]["0.weight"]["exp_avg"].shape == (33, 7)
    told = launch(tmp_path, "fsdp", "2", "load", "one.ckpt")
    assert told[0]["losses"] == fsdp[1][0]["losses"]
    with pytest.raises(CheckpointSaveError, match=r"one.ckpt' is there already: remove it first"):
        consolidate_checkpoint(fsdp[0], tmp_path / "one.ckpt")


def test_plain_dcp_reads_the_tensors(fsdp: tuple[Path, Any]) -> None:
    whole = DirectoryCheckpointIO().load_checkpoint(fsdp[0])
    moment = "optimizer.state.3.bias.exp_avg"
    targets = {"model.0.weight": torch.zeros(33, 7), moment: torch.ones(5)}
    with pytest.warns(UserWarning, match="single process"):
        dcp_load(targets, checkpoint_id=fsdp[0], no_dist=True)
    assert torch.equal(targets["model.0.weight"], whole["model"]["0.weight"])
    expected = whole["optimizer"]["state"]["3.bias"]["exp_avg"]
    assert torch.equal(targets[moment], expected)


# torch 2.9's own dcp.save says so of itself.
OF_PLAIN_DCP = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")


@OF_PLAIN_DCP
def test_a_directory_of_plain_dcp_is_read(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(2, 3)
    state = {"model": {"weight": weight}, "counts": [torch.ones(2)]}
    with pytest.warns(UserWarning, match="single process"):
        dcp_save(state, checkpoint_id=tmp_path / "plain", no_dist=True)
    loaded = SingleFileCheckpointIO().load_checkpoint(tmp_path / "plain")
    assert torch.equal(loaded["model"]["weight"], weight)
    assert torch.equal(loaded["counts"][0], torch.ones(2))


@OF_PLAIN_DCP
def test_objects_of_plain_dcp_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="single process"):
        dcp_save({"a": torch.ones(1), "epoch": 3}, checkpoint_id=tmp_path / "plain", no_dist=True)
    with pytest.raises(CheckpointCorruptError, match=r"no tensors: epoch; loading them would"):
        SingleFileCheckpointIO().load_checkpoint(tmp_path / "plain")


def test_a_save_goes_on_beside_training(
    fsdp: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    during = launch(tmp_path, "fsdp", "2", "beside training", "saved")
    assert during[0]["losses"] == fsdp[1][0]["losses"]
    for name in ("saved", "saved-again"):
        now = DirectoryCheckpointIO().load_checkpoint(tmp_path / name)
        before = DirectoryCheckpointIO().load_checkpoint(fsdp[0])
        assert torch.equal(now["model"]["3.weight"], before["model"]["3.weight"])


# ---------------------------------------------------------------- durable


@pytest.fixture
def lite() -> Lite:
    lite = Lite(accelerator="cpu", plugins="directory")
    lite.launch()
    return lite


def sharded(value: float) -> dict[str, Any]:
    whole = torch.full((4, 3), value)
    return {"weights": {"w": Shards.of_flat((4, 3), whole.flatten(), start=0)}, "value": value}


def test_directory_checkpoint_replaces_the_former_one(lite: Lite, tmp_path: Path) -> None:
    path = tmp_path / "runs" / "model.ckpt"
    for value in (1.0, 2.0):
        lite.save(path, sharded(value))
        loaded = lite.load(path)
        assert loaded["value"] == value
        assert loaded["weights"]["w"].tolist() == [[value] * 3] * 4
    assert [file.name for file in path.parent.iterdir()] == ["model.ckpt"]
    SingleFileCheckpointIO().save_checkpoint({"value": 3}, tmp_path / "file.ckpt")
    lite.save(tmp_path / "file.ckpt", sharded(4.0))
    assert lite.load(tmp_path / "file.ckpt")["value"] == 4.0
    lite.strategy.checkpoint_io.remove_checkpoint(path)
    assert list(path.parent.iterdir()) == []


def test_directory_checkpoint_replaces_a_link(lite: Lite, tmp_path: Path) -> None:
    lite.save(tmp_path / "first", sharded(1.0))
    (tmp_path / "last").symlink_to("first")
    lite.save(tmp_path / "last", sharded(2.0))
    assert lite.load(tmp_path / "first")["value"] == 1.0
    assert lite.load(tmp_path / "last")["value"] == 2.0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["first", "last"]


def test_directory_save_on_a_full_disk_keeps_the_former_checkpoint(
    lite: Lite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lite.save(tmp_path / "a", sharded(1.0))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointSaveError, match=r"No space left on device; what was there") as e:
        lite.save(tmp_path / "a", sharded(2.0))
    assert e.value.errno == 28
    with pytest.raises(CheckpointSaveError, match=r"cannot save '.*b': .*; nothing is there"):
        lite.save(tmp_path / "b", sharded(2.0))
    monkeypatch.undo()
    assert lite.load(tmp_path / "a")["value"] == 1.0
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_directory_save_without_permission_raises(lite: Lite, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointSaveError, match=r"cannot save .*Error: .*; nothing is there"):
        lite.save(tmp_path / "file" / "a", sharded(1.0))


def test_directory_save_with_failed_folder_sync_restores_the_former(
    lite: Lite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lite.save(tmp_path / "a", sharded(1.0))
    fsync = os.fsync
    folder = tmp_path.stat().st_ino

    def fails_for_the_folder(descriptor: int) -> None:
        if os.fstat(descriptor).st_ino == folder:
            raise OSError(5, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fails_for_the_folder)
    with pytest.raises(CheckpointSaveError, match=r"output error; what was there before is unch"):
        lite.save(tmp_path / "a", sharded(2.0))
    with pytest.raises(CheckpointSaveError, match=r"output error; nothing is there"):
        lite.save(tmp_path / "b", sharded(2.0))
    monkeypatch.undo()
    assert lite.load(tmp_path / "a")["value"] == 1.0
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_a_folder_of_other_things_is_not_replaced(lite: Lite, tmp_path: Path) -> None:
    for step in (1, 2):
        lite.save(tmp_path / "run" / f"step={step}", sharded(1.0))
    with pytest.raises(CheckpointSaveError, match=r"it is a directory with other things in it"):
        lite.save(tmp_path / "run", sharded(2.0))
    assert lite.load(tmp_path / "run" / "step=2")["value"] == 1.0
    (tmp_path / "empty").mkdir()
    lite.save(tmp_path / "empty", sharded(2.0))


WRITER = """
import sys, torch
from stratagem import Lite
from stratagem.checkpoint import Shards
lite = Lite(accelerator="cpu", plugins="directory")
lite.launch()
for number in range(100):
    path = f"{sys.argv[1]}-{number % 3}"
    lite.save(path, {"w": Shards.of_flat((4,), torch.full((4,), float(number)), start=0)})
    assert lite.load(path)["w"].tolist() == [number] * 4
    if number % 2:
        lite.strategy.checkpoint_io.remove_checkpoint(path)
"""


def test_two_runs_save_and_remove_in_one_folder_at_once(
    tmp_path: Path, script_environment: dict[str, str]
) -> None:
    (tmp_path / "writer.py").write_text(WRITER)
    runs = [
        subprocess.Popen(
            [sys.executable, "writer.py", name],
            cwd=tmp_path,
            env=script_environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in "ab"
    ]
    for run in runs:
        _, said = run.communicate(timeout=60)
        assert run.returncode == 0, said
    assert not list(tmp_path.glob(".stratagem*"))


def test_directory_save_without_atomic_exchange_raises(
    lite: Lite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lite.save(tmp_path / "a", sharded(1.0))
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    with pytest.raises(CheckpointSaveError, match=r"save to a path where there is nothing yet"):
        lite.save(tmp_path / "a", sharded(2.0))
    assert lite.load(tmp_path / "a")["value"] == 1.0


def test_save_removes_leftovers_of_dead_writers_only(lite: Lite, tmp_path: Path) -> None:
    living = DurableDirectory(tmp_path / "living")
    dead = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os, pathlib, sys\n"
            "from stratagem.storage.local import DurableDirectory\n"
            "print(DurableDirectory(pathlib.Path(sys.argv[1]) / 'dead').temporary, flush=True)\n"
            "os.kill(os.getpid(), 9)",
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    left = Path(dead.stdout.strip())
    assert left.is_dir()
    lite.save(tmp_path / "a", sharded(1.0))
    assert not left.exists()
    assert living.temporary.is_dir()
    living.close()


def test_directory_save_refuses_unsafe_types_by_name(lite: Lite, tmp_path: Path) -> None:
    with pytest.raises(CheckpointContentError, match=r"cannot save .*checkpoint\['x'\] is of type"):
        lite.save(tmp_path / "a", {**sharded(1.0), "x": object()})
    expanded = torch.zeros(1).expand(1 << 30)
    with pytest.raises(CheckpointContentError, match=r"Store the tensor before it was expanded"):
        lite.save(tmp_path / "a", {**sharded(1.0), "x": expanded})
    assert list(tmp_path.iterdir()) == []


def test_shards_that_do_not_make_a_whole_are_refused(lite: Lite, tmp_path: Path) -> None:
    twice = Shards((2, 2), torch.float32, [((0, 0), torch.ones(2, 2)), ((1, 0), torch.ones(1, 2))])
    with pytest.raises(CheckpointContentError, match=r"the ranks' shards do not make whole"):
        lite.save(tmp_path / "a", {"weights": twice})
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- damage and malice


def refusal(path: Path) -> str:
    """Return what loading says of a directory that it must refuse."""
    with pytest.raises(CheckpointCorruptError) as caught:
        DirectoryCheckpointIO().load_checkpoint(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_one_flipped_bit_anywhere_is_found_before_anything_is_loaded(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("something was loaded")

    monkeypatch.setattr(SafeUnpickler, "load", load)
    files = sorted(saved.iterdir())
    sizes = [file.stat().st_size for file in files]
    for _ in range(200):
        file = random.choices(files, sizes)[0]
        contents = bytearray(file.read_bytes())
        at = random.randrange(len(contents))
        contents[at] ^= 1 << random.randrange(8)
        intact = file.read_bytes()
        file.write_bytes(contents)
        assert file.name in refusal(saved)
        file.write_bytes(intact)


def test_a_missing_and_a_truncated_file_are_named(saved: Path) -> None:
    file = saved / "__1_0.distcp"
    contents = file.read_bytes()
    file.write_bytes(contents[:-1])
    assert f"'{file}' is damaged: it has {len(contents) - 1} bytes" in refusal(saved)
    file.unlink()
    assert f"'{file}' is damaged: it is missing" in refusal(saved)
    (saved / MANIFEST).unlink()
    assert f"'{saved / MANIFEST}' is damaged: it is missing" in refusal(saved)
    (saved / STATE).unlink()
    # What is left looks like plain DCP, without checksums; its layout tells.
    assert "'__1_0.distcp'" in refusal(saved)


def test_a_directory_of_ours_without_its_manifest_is_damaged(saved: Path) -> None:
    (saved / MANIFEST).unlink()
    assert f"'{saved / MANIFEST}' is damaged: it is missing" in refusal(saved)


def test_a_directory_without_a_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.ckpt").touch()
    with pytest.raises(
        CheckpointNotFoundError, match=r"without 'manifest.json'.*contains model.ckpt$"
    ):
        SingleFileCheckpointIO().load_checkpoint(tmp_path)


def test_a_newer_format_is_refused(saved: Path) -> None:
    sign(saved, format_version=99)
    assert "has the file format 99" in refusal(saved)


def test_a_name_that_leads_out_of_the_directory_is_refused(saved: Path) -> None:
    files = json.loads((saved / MANIFEST).read_text())["files"]
    sign(saved, files={**files, "../outside": files["state.ckpt"]})
    assert "names the file '../outside'" in refusal(saved)


def checksum_of(contents: bytes) -> str:
    """Return the checksum of a file of one piece, by its definition."""
    return xxhash.xxh3_128_hexdigest(xxhash.xxh3_128_digest(contents))


def sign(path: Path, **changes: Any) -> None:
    """Write the manifest of a directory anew, as someone would who means harm."""
    manifest = json.loads((path / MANIFEST).read_text())
    del manifest["xxh3_128"]
    for name, entry in manifest["files"].items():
        if (path / name).is_file():
            contents = (path / name).read_bytes()
            entry.update(size=len(contents), xxh3_128=checksum_of(contents))
    manifest.update(changes)
    digest = xxhash.xxh3_128_hexdigest(json.dumps(manifest, indent=1).encode())
    (path / MANIFEST).write_text(json.dumps({**manifest, "xxh3_128": digest}, indent=1))


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def change_layout(path: Path, change: Callable[[Any], Any]) -> None:
    layout = pickle.loads((path / ".metadata").read_bytes())
    (path / ".metadata").write_bytes(pickle.dumps(change(layout) or layout))
    sign(path)


def test_layout_of_a_directory_executes_no_code(saved: Path, tmp_path: Path) -> None:
    change_layout(saved, lambda _: Payload(tmp_path / "executed"))
    assert "was refused: it asks for" in refusal(saved)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda _: {"a": 1}, "it is a dict"),
        (lambda layout: setattr(layout, "storage_data", {1: 2}), "it has a int and a int"),
        (lambda layout: layout.state_dict_metadata.update(x=3), "it has a int"),
    ],
)
def test_a_layout_of_something_else_is_refused(
    change: Callable[[Any], Any], said: str, saved: Path
) -> None:
    change_layout(saved, change)
    assert said in refusal(saved)


def first(layout: Any) -> Any:
    """Return the first place in a layout."""
    return next(iter(layout.storage_data.values()))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: setattr(first(m), "relative_path", "../x"), "out of the directory"),
        (lambda m: setattr(first(m), "length", 1 << 40), "which has"),
        (lambda m: setattr(first(m), "relative_path", "nowhere"), "is missing"),
        (lambda m: setattr(first(m), "transform_descriptors", ["zstd"]), "expected plain tensors"),
        (
            lambda m: setattr(
                m.state_dict_metadata["model.0.weight"], "size", torch.Size([1 << 20, 1 << 20])
            ),
            "is a tensor of 1099511627776 elements, of which 231 are stored",
        ),
        (lambda m: m.storage_data.clear(), "has no chunk at"),
        (lambda m: m.planner_data.update({"model.0.weight": ("step", "x")}), "has no place for"),
    ],
)
def test_a_layout_that_lies_is_refused(
    change: Callable[[Any], Any], said: str, saved: Path
) -> None:
    change_layout(saved, change)
    assert said in refusal(saved)


def replace_part(path: Path, contents: bytes) -> str:
    """Put something in the place of a tensor; return the tensor's name."""
    layout = pickle.loads((path / ".metadata").read_bytes())
    name, place = next(
        (index.fqn, place)
        for index, place in layout.storage_data.items()
        if index.fqn == "model.0.weight"
    )
    with (path / place.relative_path).open("ab") as file:
        offset = file.tell()
        file.write(contents)

    def move(layout: Any) -> None:
        for index, there in layout.storage_data.items():
            if index.fqn == name and there.relative_path == place.relative_path:
                there.offset, there.length = offset, len(contents)

    change_layout(path, move)
    return str(name)


def test_tensor_file_of_a_directory_executes_no_code(saved: Path, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"weight": Payload(tmp_path / "executed"), "fill": torch.zeros(500)}, buffer)
    name = replace_part(saved, buffer.getvalue())
    assert f'(its tensor {name!r})" holds something that loading would' in refusal(saved)
    assert not (tmp_path / "executed").exists()


def saved_by_torch(data: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(data, buffer)
    return buffer.getvalue()


def deflated() -> bytes:
    source = zipfile.ZipFile(io.BytesIO(saved_by_torch(torch.zeros(1 << 20))))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        (deflated, "is compressed"),
        (lambda: b"nothing" * 900, "it does not end as an archive"),
        (lambda: saved_by_torch([torch.zeros(400)]), "there is a list"),
        (lambda: saved_by_torch(torch.zeros(400)), "a chunk has the shape"),
    ],
)
def test_a_part_that_is_no_tensor_or_would_grow_is_refused(
    contents: Callable[[], bytes], said: str, saved: Path
) -> None:
    replace_part(saved, contents())
    assert said in refusal(saved)


def test_ranks_share_the_checking_and_all_hear_of_damage(
    saved: Path, run_script: Callable[..., Any]
) -> None:
    file = saved / "__1_0.distcp"
    contents = bytearray(file.read_bytes())
    contents[500] ^= 1
    file.write_bytes(contents)
    script = """
    import sys
    from stratagem import Lite
    from stratagem.errors import CheckpointCorruptError
    lite = Lite(accelerator="cpu", devices=2, strategy="fsdp")
    lite.launch()
    try:
        lite.load(sys.argv[1])
    except CheckpointCorruptError as error:
        open(f"said-{lite.global_rank}", "w").write(str(error))
    lite.barrier()
    """
    run_script(script, str(saved))
    for rank in (0, 1):
        assert "__1_0.distcp' is damaged" in (saved.parent / f"said-{rank}").read_text()


def test_sharded_weights_of_another_shape_are_refused(lite: Lite, tmp_path: Path) -> None:
    lite.save(tmp_path / "a", {"model": {"weight": sharded(1.0)["weights"]["w"]}})
    model = lite.setup(torch.nn.Linear(3, 5, bias=False))
    with pytest.raises(CheckpointMismatchError, match=r"weight \(4, 3\) \(the model has \(5, 3\)"):
        lite.load(tmp_path / "a", {"model": model})
