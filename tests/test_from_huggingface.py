"""Examples in the style of transformers, converted to our Trainer, train with its numbers.

examples/huggingface has two scripts that train with transformers.Trainer, after run_clm.py and
run_glue.py of transformers, and the same two with stratagem.Trainer. The scripts of
docs/start/from-huggingface.md run, too.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples" / "huggingface"
PAGE = (ROOT / "docs" / "start" / "from-huggingface.md").read_text()
SCRIPTS = re.findall(r"^```python\n(.+?)^```$", PAGE, re.MULTILINE | re.DOTALL)
NUMBERS = str(Path(__file__).parent / "huggingface_numbers.py")
TOKENS = str(Path(__file__).parent / "huggingface_tokens.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
STRATEGIES = {"single_device": 1, "ddp": 2, "fsdp": 2}
ARGUMENTS = {"run_clm": ("--train_file", str(ROOT / "LICENSE")), "run_glue": ()}
BATCH = {"run_clm": 8, "run_glue": 16}
"""Samples of all ranks together in a micro-batch."""
ACCUMULATED = {"run_clm": 2, "run_glue": 1}
MODULES = {"run_clm": "LanguageModel", "run_glue": "Classifier"}
NEW_LINES = {"run_clm": 84, "run_glue": 80}

needs_transformers = pytest.mark.skipif(
    not importlib.util.find_spec("transformers"),
    reason="needs transformers: `nox -s huggingface` runs it",
)
Numbers = dict[str, Any]
Run = Callable[..., Path]


def run(folder: Path, *command: str) -> None:
    finished = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a function that runs an example, once, and returns the folder of its output."""
    folders: dict[tuple[str, ...], Path] = {}

    def run_once(name: str, kind: str, devices: int, *further: str) -> Path:
        key = (name, kind, str(devices), *further)
        if key not in folders:
            folders[key] = folder = tmp_path_factory.mktemp(f"{name}-{kind}")
            size = str(BATCH[name] // devices)
            options = ["--output_dir", str(folder), *ARGUMENTS[name], *further]
            options += ["--per_device_train_batch_size", size, "--per_device_eval_batch_size", size]
            if kind == "original":
                launcher = TORCHRUN if devices == 2 else ()
            else:
                launcher = ()
                options += ["--strategy", kind, "--devices", str(devices)]
            script = EXAMPLES / ("original" if kind == "original" else "converted") / f"{name}.py"
            run(folder, *launcher, NUMBERS, str(script), str(folder), *options)
        return folders[key]

    return run_once


def numbers_of_original(folder: Path) -> Numbers:
    """Return what transformers.Trainer has logged: losses of steps, values of evaluations."""
    last = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    rows = json.loads((last / "trainer_state.json").read_text())["log_history"]
    return {
        "losses": [row["loss"] for row in rows if "loss" in row],
        "evaluations": [
            (row["eval_loss"], row["eval_accuracy"]) for row in rows if "eval_loss" in row
        ],
    }


def numbers_of_converted(folder: Path, accumulated: int) -> Numbers:
    """Return the same of ours: the loss of a step is the mean over its batches and ranks."""
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
    batches = [fmean(losses) for losses in zip(*(rank["losses"] for rank in ranks), strict=True)]
    return {
        "losses": [
            fmean(batches[start : start + accumulated])
            for start in range(0, len(batches), accumulated)
        ],
        "evaluations": [
            (values["eval_loss"], values["eval_accuracy"]) for values in ranks[0]["evaluations"]
        ],
    }


@needs_transformers
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_converted_example_has_the_numbers_of_the_original(
    name: str, strategy: str, example: Run
) -> None:
    devices = STRATEGIES[strategy]
    theirs = numbers_of_original(example(name, "original", devices, "--in_order"))
    converted = example(name, strategy, devices, "--in_order")
    ours = numbers_of_converted(converted, ACCUMULATED[name])
    assert len(theirs["losses"]) >= 20
    assert ours["losses"] == pytest.approx(theirs["losses"], abs=1e-6)
    # The state that transformers saves may lack its last evaluation.
    assert theirs["evaluations"]
    for found, expected in zip(ours["evaluations"], theirs["evaluations"], strict=False):
        assert found == pytest.approx(expected, abs=1e-6)


@needs_transformers
@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_folder_of_an_fsdp_run_loads_with_from_pretrained(name: str, example: Run) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kinds = {"run_clm": AutoModelForCausalLM, "run_glue": AutoModelForSequenceClassification}
    folder = example(name, "fsdp", 2, "--in_order")
    loaded = kinds[name].from_pretrained(folder)
    newest = max(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    script = runpy.run_path(str(EXAMPLES / "converted" / f"{name}.py"))
    module = script[MODULES[name]].load_from_checkpoint(newest).eval()
    tokens = torch.arange(12).reshape(2, 6)
    assert torch.equal(loaded(tokens).logits, module.model(tokens).logits)
    alone = kinds[name].from_pretrained(example(name, "single_device", 1, "--in_order"))
    torch.testing.assert_close(loaded(tokens).logits, alone(tokens).logits, atol=1e-4, rtol=0)


@needs_transformers
def test_a_shuffled_fsdp_run_goes_on_bit_for_bit(example: Run) -> None:
    whole = example("run_clm", "fsdp", 2)
    (checkpoint,) = whole.glob("*step=15.ckpt")
    resumed = example("run_clm", "fsdp", 2, "--resume_from_checkpoint", str(checkpoint))
    expected, found = (numbers_of_converted(folder, 2) for folder in (whole, resumed))
    assert len(found["losses"]) == 5
    assert found["losses"] == expected["losses"][15:]
    assert found["evaluations"] == expected["evaluations"][1:]
    assert (resumed / "model.safetensors").read_bytes() == (
        whole / "model.safetensors"
    ).read_bytes()


@needs_transformers
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_losses_by_tokens_train_as_transformers_does(strategy: str, tmp_path: Path) -> None:
    devices = STRATEGIES[strategy]
    page = tmp_path / "page.py"
    page.write_text(next(script for script in SCRIPTS if "class TokenMean" in script))
    weights = {}
    for kind, launcher in (("original", TORCHRUN if devices == 2 else ()), (strategy, ())):
        file = tmp_path / f"{kind}.pt"
        run(tmp_path, *launcher, TOKENS, str(page), kind, str(devices), str(file))
        weights[kind] = torch.load(file)
    torch.testing.assert_close(weights[strategy], weights["original"], atol=1e-7, rtol=0)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_few_lines_of_an_example_change(name: str) -> None:
    original, converted = (
        (EXAMPLES / kind / f"{name}.py").read_text().splitlines()
        for kind in ("original", "converted")
    )
    compared = list(difflib.unified_diff(original, converted, lineterm="", n=0))[2:]
    assert len([line for line in compared if line.startswith("+")]) == NEW_LINES[name]


# ---------------------------------------------------------------- docs/start/from-huggingface.md


@needs_transformers
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_of_the_page_runs(script: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(script)
    run(tmp_path, "script.py")


def test_the_page_counts_the_lines_of_the_examples() -> None:
    for name, lines in NEW_LINES.items():
        assert re.search(rf"\| `{name}\.py` \| .* \| {lines} \|", PAGE), name
