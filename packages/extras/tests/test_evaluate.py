"""`stratagem evaluate`: lm-eval's own values, for folders and for checkpoints of any strategy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import run_file

from stratagem_extras.commands.evaluate import evaluate

lm_eval: Any = pytest.importorskip("lm_eval", reason="`nox -s huggingface` runs this")
transformers: Any = pytest.importorskip("transformers", reason="`nox -s huggingface` runs this")

SCRIPT = Path(__file__).parent / "scripts" / "evaluated.py"
WORDS = ["<pad>", "<s>", "</s>", *(f"w{number}" for number in range(3, 20))]

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of lm-eval's packages


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer, and a task with its data."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("evaluated")
    tokenizer = Tokenizer(models.WordLevel({w: n for n, w in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder / "tokenizer")
    generator = torch.Generator().manual_seed(0)

    def words(count: int) -> str:
        drawn = torch.randint(3, 20, (count,), generator=generator).tolist()
        return " ".join(WORDS[number] for number in drawn)

    rows = [
        {"question": words(5), "choices": [words(3) for _ in range(4)], "answer": number % 4}
        for number in range(24)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "tasks").mkdir()
    (folder / "tasks" / "choose.yaml").write_text(
        f"""
task: choose_words
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder / "rows.jsonl"}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
  - metric: acc_norm
"""
    )
    return folder


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(SCRIPT.parent)


def directly(model: Any, folder: Path) -> dict[str, float]:
    """Return lm-eval's values for a model."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")
    found = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model.eval(), tokenizer=tokenizer, batch_size=2),
        tasks=["choose_words"],
        task_manager=TaskManager(include_path=str(folder / "tasks"), include_defaults=False),
    )
    values = found["results"]["choose_words"]
    assert len(found["samples"]["choose_words"]) == 24
    return {name: values[name] for name in ("acc,none", "acc_norm,none")}


def run(folder: Path, *arguments: str) -> int:
    tasks = ["--tasks", "choose_words", "--include-path", str(folder / "tasks")]
    return evaluate([*tasks, *arguments])


def values(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    capsys.readouterr()
    assert run(folder, *arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)["tasks"]["choose_words"]


def test_a_folder_has_the_values_of_lm_eval(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from evaluated_model import make_model  # type: ignore[import-not-found]

    make_model().save_pretrained(tmp_path / "model")
    shutil.copytree(folder / "tokenizer", tmp_path / "model", dirs_exist_ok=True)
    found = values(folder, capsys, str(tmp_path / "model"), "--batch-size", "3")
    assert found["metrics"] == directly(make_model(), folder)
    assert found["samples"] == 24
    assert 0 < found["stderr"]["acc,none"] < 0.2
    assert run(folder, str(tmp_path / "model"), "--limit", "4") == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["task", "metric", "value", "stderr", "samples"]
    assert table[1].split()[:2] == ["choose_words", "acc,none"]
    assert table[1].split()[-1] == "4"


@pytest.mark.parametrize(
    ("strategy", "ranks"), [("single_device", 1), ("ddp", 2), ("fsdp", 2), ("deepspeed_stage_3", 2)]
)
def test_a_checkpoint_of_a_strategy_has_the_values_of_lm_eval(
    strategy: str, ranks: int, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if strategy.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    out = tmp_path / "trained"
    paths = {"PYTHONPATH": str(SCRIPT.parent), "PYTHONWARNINGS": "ignore"}
    run_file(SCRIPT, strategy, str(ranks), str(out), folder=tmp_path, env=paths)
    from evaluated_model import make_model

    trained = make_model()
    before = directly(trained, folder)
    from safetensors.torch import load_file

    trained.load_state_dict(load_file(f"{out}-weights/model.safetensors"))
    expected = directly(trained, folder)
    assert expected != before
    options = ["--tokenizer", str(folder / "tokenizer"), "--model", "evaluated_model:make_model"]
    assert values(folder, capsys, f"{out}.ckpt", *options)["metrics"] == expected
    options[-1] = "evaluated_model:WithModel"
    assert values(folder, capsys, f"{out}.ckpt", *options)["metrics"] == expected


def test_a_checkpoint_with_adapters_has_the_values_of_lm_eval(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft", reason="`nox -s huggingface` has it")
    from evaluated_model import make_adapted

    trained = make_adapted()
    draw = torch.Generator().manual_seed(5)
    for name, parameter in trained.named_parameters():
        if "lora_B" in name:
            parameter.data = 30 * torch.randn(parameter.shape, generator=draw)
    state = {f"model.{name}": value for name, value in trained.state_dict().items()}
    torch.save({"state_dict": state}, tmp_path / "one.ckpt")
    expected = directly(trained, folder)
    assert expected != directly(make_adapted(), folder)
    options = ["--tokenizer", str(folder / "tokenizer"), "--model", "evaluated_model:make_adapted"]
    assert values(folder, capsys, str(tmp_path / "one.ckpt"), *options)["metrics"] == expected


def test_mistakes_are_one_error(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from evaluated_model import make_model

    def said(*arguments: str) -> str:
        capsys.readouterr()
        assert run(folder, *arguments) == 1
        return capsys.readouterr().err

    checkpoint, model = tmp_path / "one.ckpt", tmp_path / "model"
    torch.save({"state_dict": make_model().state_dict()}, checkpoint)
    make_model().save_pretrained(model)
    named = [str(checkpoint), "--model", "evaluated_model:make_model"]
    tokenizer = ["--tokenizer", str(folder / "tokenizer")]

    assert "there is no such checkpoint or folder" in said(str(tmp_path / "absent"))
    assert "has weights, but no model: expected --model" in said(str(checkpoint))
    assert "has a config.json, from which its model is built" in said(str(model), *named[1:])
    assert f"there is no tokenizer in '{model}': expected --tokenizer" in said(str(model))
    assert "there is no tokenizer in" in said(*named)
    larger = said(str(checkpoint), "--model", "evaluated_model:make_larger", *tokenizer)
    assert "the weights belong to another model: these have another shape" in larger
    assert "(the model's " in larger
    two = said(str(checkpoint), "--model", "evaluated_model:WithTwo", *tokenizer)
    assert "returned a WithTwo with 2 models of transformers (LlamaForCausalLM, Llama" in two
    plain = said(str(checkpoint), "--model", "torch:Generator", *tokenizer)
    assert "returned a Generator with 0 models of transformers: expected one" in plain
    failed = said(str(checkpoint), "--model", "evaluated_model:fail", *tokenizer)
    assert "cannot be built: ValueError: no such file. Expected module:function" in failed
    assert "--dtype int8: expected a floating-point dtype" in said(
        *named, *tokenizer, "--dtype", "int8"
    )
    assert "--device nowhere: the model cannot be moved there (RuntimeError: " in said(
        *named, *tokenizer, "--device", "nowhere"
    )
    (model / "config.json").write_text('{"model_type": "unheard-of"}')
    assert "has no language model that transformers can read" in said(str(model))


def test_an_unknown_task_is_an_error_with_the_nearest_name(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    assert evaluate([str(tmp_path / "model"), "--tasks", "hellaswagg"]) == 1
    said = capsys.readouterr().err
    assert "--tasks hellaswagg: lm-eval has no such task. Did you mean 'hellaswag'?" in said
    assert evaluate([str(tmp_path / "model"), "--tasks", " ,"]) == 1
    assert "expected names of tasks, such as" in capsys.readouterr().err


def test_a_missing_lm_eval_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "lm_eval" else find(name)
    )
    assert evaluate([str(tmp_path), "--tasks", "hellaswag"]) == 1
    said = capsys.readouterr().err
    assert "evaluate needs the package 'lm_eval', which is not installed here" in said
    assert "pip install 'stratagem-core[evaluate]'" in said
