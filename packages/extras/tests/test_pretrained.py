"""Folders of safetensors: read into models and shards, written from them, beside the library."""

from __future__ import annotations

import io
import json
import struct
from collections import OrderedDict
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import run_file
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stratagem import Lite, Module, Trainer
from stratagem.checkpoint import (
    DirectoryCheckpointIO,
    PretrainedWeights,
    Shards,
    SingleFileCheckpointIO,
    save_pretrained,
)
from stratagem.cli import run_command
from stratagem.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    ConfigurationError,
)
from stratagem_extras.pretrained.folder import DTYPES as KNOWN, open_folder
from stratagem_extras.pretrained.names import match_names
from stratagem_extras.pretrained.writer import FolderWriter, parse_size

SCRIPT = Path(__file__).parent / "scripts" / "pretrained_ranks.py"
DTYPES = tuple(KNOWN.values())
INDEX = "model.safetensors.index.json"


def write(folder: Path, *files: dict[str, Tensor], index: bool = True, **beside: str) -> Path:
    """Write a folder with the library, of several files if there are several dicts."""
    folder.mkdir(exist_ok=True)
    if len(files) == 1 and index:
        save_file(files[0], folder / "model.safetensors")
        return folder
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        save_file(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    if index:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def read(folder: Path) -> dict[str, Tensor]:
    """Read a folder with the library."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def stratagem(*arguments: str | Path, code: int = 0) -> str:
    """Return what `stratagem checkpoint` printed: what was done, or the error."""
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        assert run_command(["checkpoint", *map(str, arguments)]) == code, said.getvalue()
    return said.getvalue().removesuffix("\n")


def raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        value.dtype == other[name].dtype and torch.equal(value, other[name])
        for name, value in one.items()
    )


def values(model: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        name: torch.randn(value.shape, generator=generator)
        if value.is_floating_point()
        else torch.tensor(3)
        for name, value in model.state_dict().items()
    }


# ---------------------------------------------------------------- a tensor in a file


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_of_a_stored_tensor_equal_those_of_the_library(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    whole = torch.arange(60).remainder(2).reshape(5, 4, 3).to(dtype)
    scalar = torch.tensor(1).to(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    tensors = {"whole": whole, "scalar": scalar, "empty": torch.empty(0, 2, dtype=dtype)}
    stored = open_folder(write(tmp_path / "in", tensors))
    assert {name: (s.shape, s.dtype) for name, s in stored.items()} == {
        name: (tuple(t.shape), dtype) for name, t in tensors.items()
    }
    for name, tensor in tensors.items():
        assert torch.equal(raw(stored[name].whole()), raw(tensor))
    for offsets, sizes in [((1, 0, 0), (3, 4, 3)), ((2, 1, 0), (2, 3, 3)), ((0, 0, 2), (5, 4, 1))]:
        chunk = torch.zeros(sizes, dtype=wide)
        stored["whole"].read_into(Shards((5, 4, 3), wide, [(offsets, chunk)]))
        region = tuple(slice(o, o + size) for o, size in zip(offsets, sizes, strict=True))
        assert torch.equal(chunk, whole[region].to(wide))


def test_a_tensor_larger_than_a_block_is_read_and_converted(tmp_path: Path) -> None:
    tensor = torch.randn(5000, 1000)  # 20 MB
    stored = open_folder(write(tmp_path / "in", {"w": tensor}))["w"]
    half = torch.zeros(5000, 1000, dtype=torch.bfloat16)
    stored.read_into(half)
    assert torch.equal(half, tensor.bfloat16())
    columns = torch.zeros(5000, 500)
    stored.read_into(Shards((5000, 1000), torch.float32, [((0, 500), columns)]))
    assert torch.equal(columns, tensor[:, 500:])


def test_the_library_reads_what_the_writer_writes(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.tensor([[0, 1, 1]]).to(dtype) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3)}
    tensors["transposed"] = torch.randn(4, 3).t()
    plan = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    writer = FolderWriter(tmp_path, plan, 10**9)
    for name in reversed(tensors):
        writer.write(name, tensors[name])
    writer.finish()
    found = read(tmp_path)
    assert found.keys() == tensors.keys()
    for name, value in found.items():
        assert (value.shape, value.dtype) == (tensors[name].shape, tensors[name].dtype)
        assert torch.equal(raw(value), raw(tensors[name]))
    with safe_open(tmp_path / "model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5 MiB", 3 << 19), (300, 300), ("20kb", 20_000)]
)
def test_sizes_are_parsed(text: Any, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "5 apples", "0", "-1", "3B"])
def test_a_wrong_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"max_shard_size=.*expected bytes, or a text"):
        parse_size(text)


# ---------------------------------------------------------------- folders that are refused


def _lacks_index(folder: Path) -> None:
    write(folder, {"a": torch.ones(1)}, {"b": torch.ones(1)}, index=False)


def _lacks_file(folder: Path) -> None:
    write(folder, {"a": torch.ones(1)}, {"b": torch.ones(1)})
    (folder / "model-00002-of-00002.safetensors").unlink()


def _has_bin(folder: Path) -> None:
    folder.mkdir()
    torch.save({}, folder / "pytorch_model.bin")


def _is_empty(folder: Path) -> None:
    folder.mkdir()


def _has_adapter(folder: Path) -> None:
    folder.mkdir()
    save_file({"a": torch.ones(1)}, folder / "adapter_model.safetensors")


def _has_other_index(folder: Path) -> None:
    write(folder, {"a": torch.ones(1)}, {"b": torch.ones(1)})
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(text.replace('"b"', '"c"'))


def _leads_outside(folder: Path) -> None:
    write(folder, {"a": torch.ones(1)})
    (folder / INDEX).write_text('{"weight_map": {"a": "../model.safetensors"}}')


def _is_cut(folder: Path) -> None:
    write(folder, {"a": torch.ones(100)})
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def _is_pointer(folder: Path) -> None:
    folder.mkdir()
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")


def _has_other_dtype(folder: Path) -> None:
    folder.mkdir()
    header = json.dumps({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + b"\0")


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda folder: None, CheckpointNotFoundError, "is no folder on this machine.*hf download"),
        (
            _lacks_index,
            CheckpointError,
            "has 2 safetensors files .* and no model.safetensors.index.json.*copy the index",
        ),
        (
            _lacks_file,
            CheckpointError,
            "names model-00002-of-00002.safetensors, which the folder lacks: copy all 2 files",
        ),
        (
            _has_bin,
            CheckpointError,
            "has pytorch_model.bin; expected model.safetensors.*AutoModel.from_pretrained",
        ),
        (_is_empty, CheckpointError, "has no weights; expected model.safetensors"),
        (_has_adapter, CheckpointError, "has the weights of an adapter.*the folder of the base"),
        (_has_other_index, CheckpointCorruptError, "names c, which the file of each lacks"),
        (_leads_outside, CheckpointCorruptError, "has other values than names of files"),
        (_is_cut, CheckpointCorruptError, "is not a whole safetensors file .*from byte 0 to 400"),
        (_is_pointer, CheckpointCorruptError, "is not a whole safetensors file .*Git LFS"),
        (_has_other_dtype, CheckpointError, "has tensors of F4; expected one of F64"),
    ],
)
def test_a_folder_is_refused_before_processes_start(
    make: Callable[[Path], None], kind: type[Exception], text: str, tmp_path: Path
) -> None:
    make(tmp_path / "in")
    with pytest.raises(kind, match=text):
        Trainer(accelerator="cpu", weights=tmp_path / "in", logger=False)


def test_a_url_and_other_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="'s3://bucket/model' is no folder on this"):
        PretrainedWeights("s3://bucket/model")
    with pytest.raises(ConfigurationError, match="weights=3: expected a folder of safetensors"):
        Trainer(accelerator="cpu", weights=3, logger=False)
    with pytest.raises(ConfigurationError, match="allow_missing='a': expected a list of patterns"):
        PretrainedWeights(tmp_path, allow_missing="a")


def test_weights_without_this_distribution_name_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from stratagem import Trainer\n"
        "try:\n    Trainer(accelerator='cpu', weights='folder')\n"
        "except ImportError as error:\n    print(error)\n"
    )
    environment = {"STRATAGEM_DISABLE_PLUGINS": "extras", "PYTHONWARNINGS": "ignore"}
    said = run_file(script, folder=tmp_path, env=environment).stdout
    assert "'stratagem.checkpoint' has no 'PretrainedWeights'. stratagem-extras" in said


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("own", "stored", "into", "lacks"),
    [
        (["a.w", "b.w"], ["a.w", "b.w"], "", ""),
        (["net.lm.a.w", "net.lm.b.w", "net.extra"], ["a.w", "b.w"], "net.lm.", ""),
        (["net.a.w", "net.b.w"], ["model.a.w", "model.b.w", "head.w"], "net.", "model."),
        (["w", "head.w"], ["w"], "", ""),
    ],
)
def test_the_part_that_a_folder_describes_is_found(
    own: list[str], stored: list[str], into: str, lacks: str
) -> None:
    names = match_names(own, stored)
    assert (names.into, names.lacks) == (into, lacks)
    assert len(names.sources) == 2 - (len(stored) == 1)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy, self.reference = nn.Linear(2, 1), nn.Linear(2, 1)


def test_two_parts_that_fit_equally_are_told_apart_by_the_user(tmp_path: Path) -> None:
    weights = {"weight": torch.ones(1, 2), "bias": torch.ones(1)}
    folder = write(tmp_path / "in", weights)
    lite = Lite(accelerator="cpu")
    model = lite.setup(Pair())
    with pytest.raises(ConfigurationError) as refused:
        lite.load_weights(model, folder)
    assert str(refused.value) == (
        "the names in the folder fit 2 parts of the model equally: policy, reference. Name one: "
        "PretrainedWeights(folder, part='policy')"
    )
    before = model.policy.weight.clone()
    lite.load_weights(model, PretrainedWeights(folder, part="reference"))
    assert torch.equal(model.reference.weight, torch.ones(1, 2))
    assert torch.equal(model.policy.weight, before)
    save_pretrained(model, tmp_path / "out", part="reference")
    assert equal(read(tmp_path / "out"), weights)


def test_differences_are_listed_and_nothing_is_loaded(tmp_path: Path) -> None:
    model = nn.Sequential(OrderedDict(first=nn.Linear(2, 3), second=nn.Linear(3, 1)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    folder = write(
        tmp_path / "in",
        {
            "first.weight": torch.ones(3, 2),
            "first.bias": torch.ones(3),
            "second.weight": torch.ones(2, 3),
            "secund.bias": torch.ones(1),
        },
    )
    lite = Lite(accelerator="cpu")
    prepared = lite.setup(model)
    with pytest.raises(CheckpointMismatchError) as refused:
        lite.load_weights(prepared, folder)
    assert str(refused.value) == (
        f"{str(folder)!r}: the weights belong to another model: it lacks second.bias (1,) "
        "(nearest: secund.bias (1,)); it has secund.bias (1,) (nearest: second.bias (1,)), which "
        "the model lacks; these have another shape: second.weight (2, 3) (the model's "
        "second.weight has (1, 3)). Build the model from the config.json of the folder, or name "
        "new parameters in allow_missing=['second.bias'], or name tensors to leave out in "
        "allow_unexpected=['secund.bias'] of PretrainedWeights(folder, ...)\n"
        "For an explanation: stratagem errors checkpoint-mismatch"
    )
    assert refused.value.missing == ("second.bias",)
    assert equal(dict(model.state_dict()), before)


def test_new_and_superfluous_names_are_allowed_by_patterns(tmp_path: Path) -> None:
    model: Any = nn.Sequential(OrderedDict(body=nn.Linear(2, 3), score=nn.Linear(3, 1)))
    weights = {"body.weight": torch.ones(3, 2), "body.bias": torch.ones(3), "head": torch.ones(1)}
    folder = write(tmp_path / "in", weights)
    before = model.score.weight.clone()
    lite = Lite(accelerator="cpu")
    allowed: dict[str, Any] = {"allow_missing": ["score.*"], "allow_unexpected": ["head"]}
    lite.load_weights(lite.setup(model), PretrainedWeights(folder, **allowed))
    assert torch.equal(model.body.weight, torch.ones(3, 2))
    assert torch.equal(model.score.weight, before)


# ---------------------------------------------------------------- layers in 4 and 8 bits

MODES = ("nf4", "nf4-dq", "fp4", "fp4-dq", "int8", "int8-training")


def layers(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    parts = nn.Linear(64, 96), nn.Linear(96, 64, bias=False), nn.Linear(64, 3)
    return nn.Sequential(*parts).to(dtype)


@pytest.mark.parametrize(
    ("mode", "dtype"), [*((mode, torch.float32) for mode in MODES), ("nf4", torch.bfloat16)]
)
def test_plain_weights_are_quantised_as_before_set_up(
    mode: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    folder = write(tmp_path / "in", layers().state_dict())
    lite = Lite(accelerator="cpu", precision=mode)
    before, after = layers(dtype), layers(dtype)
    before.load_state_dict(read(folder))
    wanted = lite.setup(before).state_dict()
    model = lite.setup(after)
    assert not equal(dict(model.state_dict()), dict(wanted))
    lite.load_weights(model, folder)
    assert equal(dict(model.state_dict()), dict(wanted))


def test_a_quantised_layer_with_two_names_reads_either(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    weights = nn.Linear(64, 64).state_dict()
    lite = Lite(accelerator="cpu", precision="nf4")
    wanted = nn.Linear(64, 64)
    wanted.load_state_dict(weights)
    packed = lite.setup(wanted).state_dict()["weight"]
    for name in ("first", "second"):
        folder = write(tmp_path / name, {f"{name}.{n}": value for n, value in weights.items()})
        layer = nn.Linear(64, 64)
        model = lite.setup(nn.ModuleDict({"first": layer, "second": layer}))
        lite.load_weights(model, folder)
        assert torch.equal(layer.weight, packed)


def test_quantised_weights_that_were_saved_are_read_back(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    lite = Lite(accelerator="cpu", precision="nf4")
    model, other = lite.setup(layers()), lite.setup(layers())
    save_pretrained(model, tmp_path / "out")
    lite.load_weights(other, tmp_path / "out")
    assert equal(dict(other.state_dict()), dict(model.state_dict()))


def test_a_plain_weight_that_a_quantised_layer_cannot_read_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    weights = {**layers().state_dict(), "1.weight": torch.ones(64, 95)}
    folder = write(tmp_path / "in", weights)
    lite = Lite(accelerator="cpu", precision="nf4")
    model = lite.setup(layers())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    wrong = r"1\.weight \(64, 95\) \(the model's 1\.weight has \(64, 96\)\)"
    with pytest.raises(CheckpointMismatchError, match=wrong):
        lite.load_weights(model, folder)
    integers = {**weights, "1.weight": torch.ones(64, 96, dtype=torch.int8)}
    wrong = r"has 1\.weight in torch\.int8, .* the model's 1\.weight is torch\.float32"
    with pytest.raises(CheckpointMismatchError, match=wrong):
        lite.load_weights(model, write(tmp_path / "integers", integers))
    assert equal(dict(model.state_dict()), before)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["nf4-dq", "int8"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "mesh"])
def test_ranks_quantise_plain_weights_as_before_set_up(
    strategy: str, mode: str, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    write(tmp_path / "in", layers().state_dict())
    run_file(SCRIPT.with_name("pretrained_4bit.py"), strategy, mode, folder=tmp_path)
    for rank in range(2):
        found = json.loads((tmp_path / f"found{rank}.json").read_text())
        tensors = 5 + 2 * (5 if mode == "nf4-dq" else 1)
        assert found == {"tensors": tensors, "differed": True, "equal": True}


# ---------------------------------------------------------------- a Trainer


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("weight", self.net.weight.sum())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def trainer(folder: Path | PretrainedWeights, root: Path, **options: Any) -> Trainer:
    options |= {"logger": False, "enable_progress_bar": False, "default_root_dir": root}
    return Trainer(accelerator="cpu", strategy="single_device", weights=folder, **options)


def test_a_trainer_starts_from_weights_once(tmp_path: Path) -> None:
    weights = {"weight": torch.tensor([[3.0, 4.0]], dtype=torch.bfloat16), "bias": torch.ones(1)}
    folder = write(tmp_path / "in", weights)
    data = [torch.ones(4, 2)]
    (found,) = trainer(folder, tmp_path).validate(Net(), data, verbose=False)
    assert found["weight"] == 7.0
    net = Net()
    fitted = trainer(folder, tmp_path, max_steps=1)
    fitted.fit(net, data)
    assert torch.allclose(net.net.weight, torch.tensor([[2.84, 3.84]]))
    assert net.net.weight.dtype == torch.float32
    trained = net.net.weight.sum().item()
    (found,) = fitted.validate(net, data, verbose=False)
    assert found["weight"] == trained, "a trained model is not loaded again"
    path = tmp_path / "saved.ckpt"
    fitted.save_checkpoint(path)
    (found,) = trainer(folder, tmp_path).validate(Net(), data, ckpt_path=path, verbose=False)
    assert found["weight"] == trained, "a checkpoint takes the place of the weights"
    resumed = Net()
    trainer(folder, tmp_path, max_steps=1).fit(resumed, data, ckpt_path=path)
    assert torch.equal(resumed.net.weight, net.net.weight)
    (found,) = fitted.validate(Net(), data, verbose=False)
    assert found["weight"] == 7.0, "another model is loaded"
    (found,) = fitted.validate(net, data, verbose=False)
    assert found["weight"] == trained, "a trained model is not loaded again after another one"


@pytest.mark.slow
def test_weights_trained_in_other_processes_are_not_loaded_again(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", {"weight": torch.ones(1, 2), "bias": torch.ones(1)})
    net, data = Net(), [torch.ones(4, 2)]
    options: dict[str, Any] = {"logger": False, "default_root_dir": tmp_path, "devices": 2}
    forked = Trainer(accelerator="cpu", strategy="ddp_fork", weights=folder, max_steps=1, **options)
    forked.fit(net, data)
    trained = net.net.weight.sum().item()
    assert trained < 2.0
    (found,) = forked.validate(net, data, verbose=False)
    assert found["weight"] == trained


def test_a_trainer_writes_its_weights_during_and_after_a_run(tmp_path: Path) -> None:
    folder = write(tmp_path / "in", {"weight": torch.ones(1, 2), "bias": torch.ones(1)})
    (folder / "config.json").write_text('{"dtype": "bfloat16"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("of another model")
    fitted = trainer(folder, tmp_path, max_steps=1, enable_checkpointing=False)
    net = Net()
    fitted.fit(net, [torch.ones(4, 2)])
    save_pretrained(fitted, tmp_path / "out", like=folder)
    assert equal(read(tmp_path / "out"), dict(net.net.state_dict()))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("config.json", "model.safetensors", "tokenizer.json")
    ]
    assert json.loads((tmp_path / "out/config.json").read_text()) == {"dtype": "float32"}
    save_pretrained(fitted, tmp_path / "half", dtype="bfloat16")
    half = {name: value.bfloat16() for name, value in net.net.state_dict().items()}
    assert equal(read(tmp_path / "half"), half)


def test_a_failed_save_leaves_nothing(tmp_path: Path) -> None:
    model = Lite(accelerator="cpu").setup(nn.Linear(2, 1))
    (tmp_path / "taken").mkdir()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"folder": tmp_path / "taken"}, "is there already; expected a new path"),
        ({"dtype": "int8"}, "dtype='int8': expected a floating-point dtype"),
        ({"dtype": "brain"}, "dtype='brain': expected a floating-point dtype"),
        ({"max_shard_size": "big"}, "max_shard_size='big': expected bytes"),
        ({"like": tmp_path / "absent"}, "is no folder on this machine"),
    ]
    for options, text in wrong:
        with pytest.raises((ConfigurationError, CheckpointError), match=text):
            save_pretrained(model, **{"folder": tmp_path / "out", **options})
    with pytest.raises(ConfigurationError, match="received a Linear; expected a Trainer that has"):
        save_pretrained(nn.Linear(2, 1), tmp_path / "out")
    complex_one = nn.Linear(2, 1, dtype=torch.complex128)
    with pytest.raises(CheckpointError, match=r"weight is a tensor of torch\.complex128"):
        save_pretrained(Lite(accelerator="cpu").setup(complex_one), tmp_path / "out")
    other = write(tmp_path / "other", {"weight": torch.ones(1), "gamma": torch.ones(1)})
    with pytest.raises(CheckpointMismatchError, match="has gamma, which the model lacks: write it"):
        save_pretrained(model, tmp_path / "out", like=other)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "taken"]


def test_a_full_disk_is_an_error_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    model = Lite(accelerator="cpu").setup(nn.Linear(2, 1))
    monkeypatch.setattr(FolderWriter, "write", full)
    with pytest.raises(CheckpointError, match="No space left on device; nothing is there"):
        save_pretrained(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- two ranks


def tied() -> nn.Sequential:
    """The model of the script."""
    layers = OrderedDict[str, nn.Module](
        table=nn.Embedding(7, 6),
        up=nn.Linear(6, 12),
        act=nn.Tanh(),
        down=nn.Linear(12, 6),
        norm=nn.BatchNorm1d(6),
    )
    return nn.Sequential(layers)


@pytest.mark.slow
def test_ranks_read_their_shards_and_write_them_bit_for_bit(tmp_path: Path) -> None:
    weights = values(tied())
    rows = {name: value for name, value in weights.items() if name.startswith("table")}
    rest = {name: value for name, value in weights.items() if name not in rows}
    write(tmp_path / "in", rows, rest)
    write(tmp_path / "other", {**weights, "up.weight": torch.ones(12, 5)})
    total = sum(value.nbytes for value in weights.values())
    run_file(SCRIPT, folder=tmp_path)
    of_ranks = [json.loads((tmp_path / f"found{rank}.json").read_text()) for rank in range(2)]
    names = ("ddp", "fsdp", "ddp_sharded", "mesh", "mesh, shards")
    for name in names:
        for folder in (f"out {name}", f"like {name}", f"after {name}"):
            assert equal(read(tmp_path / folder), weights), folder
        assert len(list((tmp_path / f"out {name}").glob("*.safetensors"))) > 1
        for rank, found in enumerate(of_ranks):
            kind, text = found[name]["other"]
            assert kind == "CheckpointMismatchError"
            assert "up.weight (12, 5) (the model's net.up.weight has (12, 6))" in text
            kind, text = found[name]["taken"]
            assert kind == ("CheckpointError" if rank else "ConfigurationError")
            assert "is there already; expected a new path" in text
    for found in of_ranks:
        assert found["ddp"]["read"] == total
        assert found["fsdp"]["read"] < 0.7 * total
    assert sum(found["fsdp"]["read"] for found in of_ranks) < 1.2 * total
    for found in of_ranks:
        assert "'elsewhere' is no folder on this machine" in found["absent"][1]
    assert of_ranks[0]["absent"][1].startswith("rank 1: ")


# ---------------------------------------------------------------- `stratagem checkpoint convert`


@pytest.mark.parametrize("form", [SingleFileCheckpointIO, DirectoryCheckpointIO])
def test_convert_writes_a_folder_like_another(form: Any, tmp_path: Path) -> None:
    model: Any = tied()
    model.add_module("head", nn.Linear(6, 7, bias=False))
    model.head.weight = model.table.weight
    state = {f"net.{name}": value for name, value in model.state_dict().items()}
    source, target = tmp_path / "model.ckpt", tmp_path / "out"
    form().save_checkpoint({"state_dict": {**state, "extra": 7}}, source)
    like = write(tmp_path / "like", values(tied()))
    (like / "tokenizer.json").write_text("{}")
    said = stratagem(
        *("convert", source, target, "--to", "huggingface", "--like", like),
        *("--max-shard-size", "300"),
    )
    expected = {name: v for name, v in model.state_dict().items() if not name.startswith("head")}
    written = read(target)
    assert equal(written, expected)
    count = len(list(target.glob("*.safetensors")))
    size = sum(value.nbytes for value in expected.values())
    assert said == (
        f"{target}: {len(expected)} tensors, {size} bytes in {count} files; left out, since they "
        "are no tensors: extra"
    )
    index = json.loads((target / INDEX).read_text())
    assert index["metadata"] == {"total_size": size}
    assert (target / "tokenizer.json").exists()
    back = tmp_path / "back.ckpt"
    said = stratagem("convert", target, back, "--to", "checkpoint", "--like", source)
    assert said.endswith(f" bytes, {len(state)} tensors, weights only")
    assert equal(SingleFileCheckpointIO().load_checkpoint(back)["state_dict"], state)


def test_convert_makes_a_checkpoint_of_a_folder_or_says_why_not(tmp_path: Path) -> None:
    folder, target = write(tmp_path / "like", values(tied())), tmp_path / "model.ckpt"
    stratagem("convert", folder, target, "--to", "checkpoint")
    assert equal(SingleFileCheckpointIO().load_checkpoint(target)["state_dict"], values(tied()))
    other = tmp_path / "other.ckpt"
    weights = {**values(tied()), "head.weight": torch.ones(3, 3)}
    SingleFileCheckpointIO().save_checkpoint({"state_dict": weights}, other)
    new = tmp_path / "new.ckpt"
    said = stratagem("convert", folder, new, "--to", "checkpoint", "--like", other, code=1)
    assert "head.weight" in said
    assert not new.exists()


def test_convert_drops_the_prefix_that_all_names_have(tmp_path: Path) -> None:
    weights = values(tied())
    source, target = tmp_path / "model.ckpt", tmp_path / "out"
    state = {f"model.{name}": value for name, value in weights.items()}
    SingleFileCheckpointIO().save_checkpoint({"state_dict": state}, source)
    stratagem("convert", source, target, "--to", "huggingface", "--dtype", "float16")
    expected = {n: v.half() if v.is_floating_point() else v for n, v in weights.items()}
    assert equal(read(target), expected)


def test_convert_says_where_a_config_may_not_fit(tmp_path: Path) -> None:
    like = write(tmp_path / "like", values(tied()))
    source, target = tmp_path / "model.ckpt", tmp_path / "out"
    weights = {**values(tied()), "score.weight": torch.ones(2)}
    SingleFileCheckpointIO().save_checkpoint({"state_dict": weights}, source)
    said = stratagem("convert", source, target, "--to", "huggingface", "--like", like)
    assert said.endswith(f"; {like} has no score.weight, so that its config may not fit")
    inner = {f"net.{name}": value for name, value in values(tied()).items()}
    both = {"state_dict": {**inner, "critic.weight": torch.ones(2)}}
    SingleFileCheckpointIO().save_checkpoint(both, tmp_path / "both.ckpt")
    options = ("--to", "huggingface", "--like", like)
    said = stratagem("convert", tmp_path / "both.ckpt", tmp_path / "inner", *options)
    assert said.endswith(f"; left out, since {like} has no place for them: critic.weight")
    name = next(iter(values(tied())))
    weights = {**values(tied()), name: torch.ones(3, 3)}
    other = tmp_path / "other.ckpt"
    SingleFileCheckpointIO().save_checkpoint({"state_dict": weights}, other)
    said = stratagem(
        "convert", other, tmp_path / "new", "--to", "huggingface", "--like", like, code=1
    )
    assert f"{name} has the shape (3, 3), and " in said
    assert "whose config would describe another model than the weights" in said
    assert not list(tmp_path.glob("*new*"))


def test_a_folder_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    model: Any = tied()
    model.add_module("head", nn.Linear(6, 7, bias=False))
    model.head.weight = model.table.weight
    state = {name: value.clone() for name, value in model.state_dict().items()}
    lite = Lite(accelerator="cpu", devices=1)
    prepared = lite.setup(model)
    differing = write(
        tmp_path / "two", {**state, "head.weight": torch.zeros_like(model.table.weight)}
    )
    with pytest.raises(CheckpointMismatchError, match=r"has different values of .*one parameter"):
        lite.load_weights(prepared, differing)
    lite.load_weights(prepared, write(tmp_path / "equal", state))
    codes = {name: value.to(torch.int8) for name, value in state.items()}
    with pytest.raises(
        CheckpointMismatchError, match=r"in torch\.int8, as quantised weights have it"
    ):
        lite.load_weights(prepared, write(tmp_path / "codes", codes))


def test_convert_refuses_what_a_folder_cannot_hold(tmp_path: Path) -> None:
    source, target = tmp_path / "model.ckpt", tmp_path / "out"
    weight = torch.ones(1)
    SingleFileCheckpointIO().save_checkpoint({"state_dict": {"a.lora_A.x": weight}}, source)
    said = stratagem("convert", source, target, "--to", "huggingface", code=1)
    assert "the checkpoint has adapters of PEFT, and not their config: pass --like FOLDER" in said
    said = stratagem("convert", source, target, "--dtype", "float16", code=1)
    assert said == "dtype: expected to='huggingface' with it, received to='safetensors'"
    said = stratagem("convert", source, target, "--to", "gguf", code=1)
    assert said == ("to='gguf': expected 'safetensors', 'huggingface', 'lightning' or 'checkpoint'")
