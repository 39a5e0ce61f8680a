"""`stratagem evaluate`: tasks of lm-eval on a checkpoint, or on a folder of Hugging Face."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stratagem.cli import at_least, parser_of, print_table
from stratagem.discovery import load_target, require_package
from stratagem.errors import StratagemError

_DESCRIPTION = """Run tasks of lm-eval on a checkpoint of a language model.

  stratagem evaluate model/ --tasks hellaswag,arc_easy
  stratagem evaluate last.ckpt --model train:make_model --tokenizer model/ --tasks hellaswag

SOURCE is a folder in Hugging Face's layout, or a checkpoint of any strategy and format. A
checkpoint has no model: --model names a function that returns it. The exit code is 1 if something
is missing or does not fit.
"""


def evaluate(arguments: Sequence[str]) -> int:
    """Print the values of tasks on a model; return the exit code."""
    parser = parser_of("evaluate", _DESCRIPTION)
    parser.add_argument("source", metavar="SOURCE", type=Path, help="a checkpoint, or a folder")
    parser.add_argument(
        "--tasks", required=True, metavar="NAMES", help="tasks of lm-eval: hellaswag,arc_*"
    )
    parser.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help="returns the model of a checkpoint: a model of transformers, or a Module with one",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="FOLDER",
        type=Path,
        help="the folder of the tokenizer (the default: SOURCE, or the model's own folder)",
    )
    parser.add_argument(
        "--include-path", metavar="FOLDER", type=Path, help="a folder with YAML files of tasks"
    )
    parser.add_argument("--few-shot", metavar="N", type=at_least(0), help="examples in the context")
    parser.add_argument("--limit", metavar="N", type=at_least(1), help="samples of each task")
    parser.add_argument(
        "--batch-size", metavar="N", type=at_least(1), default=1, help="the default: 1"
    )
    parser.add_argument("--device", help="such as cuda:1 (the default: a GPU if there is one)")
    parser.add_argument("--dtype", metavar="NAME", help="such as bfloat16")
    parser.add_argument("--key", help="the checkpoint's entry with the weights")
    parser.add_argument("--format", metavar="NAME", default="", help="of the checkpoint")
    options = vars(parser.parse_args(arguments))
    as_json = options.pop("json")
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` has it
    try:
        for package in ("lm_eval", "transformers"):
            require_package("evaluate", package, extra="evaluate")
        # By name: the program does without torch, and this command cannot.
        run = load_target("stratagem_extras.evaluation:evaluate_model", what="evaluate")
        results = run(**options)
    except (StratagemError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps(results, indent=2))
    else:
        print_table(("task", "metric", "value", "stderr", "samples"), _rows(results))
    return 0


def _rows(results: dict[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for task, values in results["tasks"].items():
        for metric, value in values["metrics"].items():
            error = values["stderr"].get(metric)
            rows.append(
                (task, metric, _text(value), _text(error), str(values["samples"] or "-")),
            )
    return rows


def _text(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, (int, float)) else "-"
