"""`stratagem checkpoint consolidate`, `convert` and `average`, beside the library and the mean."""

from __future__ import annotations

import importlib.util
import io
import os
import resource
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from stratagem import Lite, Module, Trainer
from stratagem.checkpoint import DirectoryCheckpointIO, SingleFileCheckpointIO
from stratagem.cli import run_command


def stratagem(*arguments: str | Path, code: int = 0) -> str:
    """Return what the program printed: what was done, or the error."""
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        assert run_command(["checkpoint", *map(str, arguments)]) == code, said.getvalue()
    return said.getvalue().removesuffix("\n")


DTYPES = (
    *(torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool),
)


def save(path: Path, state: dict[str, Any], **more: Any) -> Path:
    SingleFileCheckpointIO().save_checkpoint({"state_dict": state, **more}, path)
    return path


class Net(Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, 1)
        self.norm = torch.nn.BatchNorm1d(1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.norm(self.layer(batch)).square().sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def trained(tmp_path: Path) -> list[Path]:
    """Checkpoints after each of three epochs."""
    from stratagem.callbacks import ModelCheckpoint

    saver = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1)
    Trainer(
        accelerator="cpu",
        strategy="single_device",
        max_epochs=3,
        logger=False,
        callbacks=saver,
        enable_progress_bar=False,
    ).fit(Net(2), [torch.randn(4, 2)])
    return sorted(tmp_path.glob("*.ckpt"))


# ---------------------------------------------------------------- convert


def test_consolidate_makes_one_file_of_a_directory(tmp_path: Path) -> None:
    source, target = tmp_path / "parts.ckpt", tmp_path / "one.ckpt"
    weight = torch.arange(6.0)
    DirectoryCheckpointIO().save_checkpoint({"state_dict": {"weight": weight}}, source)
    said = stratagem("consolidate", source, target)
    assert said == f"{target}: {target.stat().st_size} bytes"
    assert torch.equal(torch.load(target, weights_only=True)["state_dict"]["weight"], weight)
    assert "is there already" in stratagem("consolidate", source, target, code=1)


def test_safetensors_reads_the_output_of_convert(tmp_path: Path) -> None:
    weights = torch.randn(3, 5)
    state = {
        "matrix": weights,
        "tied": weights,
        "transposed": weights.t(),
        "part": weights[1:, 2],
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(1.5),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        **{str(dtype): torch.tensor([0, 1, 1]).to(dtype) for dtype in DTYPES},
    }
    source = save(tmp_path / "model.ckpt", {**state, "extra": 7}, epoch=3)
    target = tmp_path / "model.safetensors"
    told = stratagem("convert", source, target)
    assert told == (
        f"{target}: {len(state)} tensors, {target.stat().st_size} bytes; left out, since they are "
        "no tensors: extra"
    )
    loaded = load_file(target)
    assert loaded.keys() == state.keys()
    for name, tensor in state.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert torch.equal(_bytes(loaded[name]), _bytes(tensor)), name
    assert target.stat().st_mode == source.stat().st_mode, "not the mode of a temporary file"
    with safe_open(target, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert sorted(path.name for path in tmp_path.iterdir()) == [source.name, target.name]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().contiguous().view(-1).view(torch.uint8)


def test_weights_of_lite_are_found_or_named(tmp_path: Path) -> None:
    lite = Lite(accelerator="cpu")
    lite.launch()
    one, two = (lite.setup(torch.nn.Linear(2, 1)) for _ in range(2))
    lite.save(tmp_path / "one.ckpt", {"model": one, "step": 3})
    lite.save(tmp_path / "two.ckpt", {"generator": one, "critic": two, "step": 3})
    stratagem("convert", tmp_path / "one.ckpt", tmp_path / "one.safetensors")
    assert torch.equal(load_file(tmp_path / "one.safetensors")["weight"], one.weight)
    assert stratagem("convert", tmp_path / "two.ckpt", tmp_path / "two.safetensors", code=1) == (
        f"'{tmp_path / 'two.ckpt'}' has 2 entries that may be weights (generator, critic): say "
        "which, by --key"
    )
    arguments = tmp_path / "two.ckpt", tmp_path / "two.safetensors", "--key"
    stratagem("convert", *arguments, "critic")
    assert torch.equal(load_file(tmp_path / "two.safetensors")["weight"], two.weight)
    (tmp_path / "two.safetensors").unlink()
    assert "has no weights under 'step'; it has generator, critic, step" in stratagem(
        "convert", *arguments, "step", code=1
    )


def test_convert_refuses_bad_arguments_and_writes_no_file(tmp_path: Path) -> None:
    source = save(tmp_path / "a.ckpt", {"w": torch.ones(2)})
    there = tmp_path / "there.safetensors"
    there.touch()
    new = tmp_path / "new.safetensors"
    sparse = save(tmp_path / "sparse.ckpt", {"w": torch.eye(2).to_sparse()})
    state = {"v": torch.ones(2), "w": torch.ones(2, dtype=torch.complex128)}
    double = save(tmp_path / "double.ckpt", state)
    empty = tmp_path / "empty.ckpt"
    SingleFileCheckpointIO().save_checkpoint({"epoch": 3}, empty)
    for arguments, said in (
        ((source, tmp_path / "new.bin"), "expected a target that ends in .safetensors, received"),
        ((source, there), f"'{there}' is there already; expected a new path: remove it first"),
        ((tmp_path / "no.ckpt", new), f"no checkpoint '{tmp_path / 'no.ckpt'}'"),
        ((sparse, new), "w is a tensor of torch.float32 (torch.sparse_coo); a safetensors file"),
        ((double, new), "w is a tensor of torch.complex128 (torch.strided); a safetensors file"),
        ((empty, new), "has 0 entries that may be weights (of epoch): say which, by --key"),
        ((source, source / "new.safetensors"), "FileExistsError: [Errno 17] File exists"),
    ):
        assert said in stratagem("convert", *arguments, code=1)
    damaged = bytearray(source.read_bytes())
    damaged[700] ^= 1
    source.write_bytes(damaged)
    assert f"'{source}' is damaged" in stratagem("convert", source, new, code=1)
    assert not new.exists()
    assert there.stat().st_size == 0


def test_a_disk_that_fails_leaves_no_safetensors_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(tmp_path / "a.ckpt", {"w": torch.ones(2)})

    def failing(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    new = tmp_path / "new.safetensors"
    assert stratagem("convert", source, new, code=1) == (
        f"cannot write '{new}': OSError: [Errno 5] Input/output error; nothing is there"
    )
    assert list(tmp_path.iterdir()) == [source]

    def failing_for_folders(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").resolve() == tmp_path:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing_for_folders)
    said = stratagem("convert", source, new, code=1)
    assert said.endswith("error; it is in its place, but may be lost in a power cut")
    assert load_file(new)["w"].tolist() == [1.0, 1.0]


def test_a_disk_that_is_full_leaves_no_safetensors_file(tmp_path: Path) -> None:
    source, new = save(tmp_path / "a.ckpt", {"w": torch.ones(1000)}), tmp_path / "new.safetensors"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        said = stratagem("convert", source, new, code=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert said.startswith(f"cannot write '{new}': OSError: ")
    assert "File too large" in said
    assert said.endswith("; nothing is there")
    assert list(tmp_path.iterdir()) == [source]


def test_convert_syncs_the_file_before_its_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library renames a file of its own, which it does not sync."""
    source, new = save(tmp_path / "a.ckpt", {"w": torch.ones(2)}), tmp_path / "new.safetensors"
    synced: list[tuple[int, bool]] = []
    fsync = os.fsync

    def noting(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_ino, new.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    stratagem("convert", source, new)
    assert synced == [(new.stat().st_ino, False), (tmp_path.stat().st_ino, True)]


@pytest.mark.parametrize("package", ["safetensors", "numpy"])
def test_convert_names_the_missing_package(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else find_spec(name)
    )
    source = save(tmp_path / "a.ckpt", {"w": torch.ones(2)})
    assert stratagem("convert", source, tmp_path / "new.safetensors", code=1) == (
        f"convert needs the package '{package}', which is not installed here: "
        "pip install 'stratagem-core[safetensors]'"
    )


# ---------------------------------------------------------------- average


def test_the_mean_of_a_runs_checkpoints_is_a_model(trained: list[Path], tmp_path: Path) -> None:
    target = tmp_path / "mean.ckpt"
    told = stratagem("average", *trained, "-o", target)
    assert told == f"{target}: the mean of 3 checkpoints, 7 tensors"
    states = [SingleFileCheckpointIO().load_checkpoint(path)["state_dict"] for path in trained]
    model = Net.load_from_checkpoint(target)
    assert model.hparams == {"width": 2}
    for name, tensor in model.state_dict().items():
        mean = torch.stack([state[name].double() for state in states]).mean(0)
        if name.endswith("num_batches_tracked"):
            assert tensor == 3
        else:
            assert torch.equal(tensor, mean.float())
    mean_of = SingleFileCheckpointIO().load_checkpoint(target)
    assert mean_of.keys() == {
        "state_dict",
        "stratagem_version",
        "format_version",
        "hyper_parameters",
    }


def test_average_adds_in_float64_and_keeps_dtypes(tmp_path: Path) -> None:
    # In float16 the sum would be infinite, and in float32 the small one would be lost.
    big, one = torch.tensor([6e4, 2.0**24]), torch.tensor([6e4, 1.0])
    paths = [
        save(
            tmp_path / f"{number}.ckpt",
            {"half": values[:1].half(), "single": values[1:], "complex": values[1:] * 1j},
        )
        for number, values in enumerate((big, one, one))
    ]
    stratagem("average", *paths, "--output", tmp_path / "mean.ckpt")
    mean = SingleFileCheckpointIO().load_checkpoint(tmp_path / "mean.ckpt")["state_dict"]
    assert mean["half"] == torch.tensor([6e4]).half()
    assert mean["single"] == torch.tensor([(2.0**24 + 2) / 3])
    assert mean["complex"].dtype == torch.complex64


def test_average_refuses_other_models_with_their_differences(tmp_path: Path) -> None:
    first = save(tmp_path / "a.ckpt", {"w": torch.ones(2), "b": torch.ones(1), "n": torch.ones(1)})
    other = save(tmp_path / "b.ckpt", {"w": torch.ones(3), "c": torch.ones(1), "n": torch.ones(1)})
    new = tmp_path / "mean.ckpt"
    assert stratagem("average", first, other, "-o", new, code=1) == (
        f"'{first}' and '{other}' are of different models: only the first has b; only the second "
        "has c; w is (2,) torch.float32 and (3,) torch.float32. Average checkpoints of one model"
    )
    table = save(tmp_path / "t.ckpt", {"index": torch.tensor([1, 2])})
    changed = save(tmp_path / "u.ckpt", {"index": torch.tensor([1, 3])})
    assert stratagem("average", table, changed, "-o", new, code=1) == (
        f"index has no mean, since it holds integers (torch.int64), and differs between '{table}' "
        f"and '{changed}': average checkpoints in which it is alike"
    )
    assert stratagem("average", first, "-o", new, code=1) == (
        f"average needs at least two checkpoints, received 1: {first}"
    )
    assert "is there already" in stratagem("average", first, first, "-o", other, code=1)
    missing = tmp_path / "no.ckpt"
    assert f"no checkpoint '{missing}'" in stratagem("average", first, missing, "-o", new, code=1)
    assert not new.exists()
