"""`stratagem checkpoint consolidate`, `convert` and `average`: new files made of checkpoints."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from stratagem.cli import parser_of
from stratagem.discovery import load_target
from stratagem.errors import CheckpointError, ConfigurationError

_CONSOLIDATE = """Make one file of a checkpoint that is a directory, or is in a plugin's format.

The checkpoint is checked first. The exit code is 1 if it is damaged, or the file is there already.
"""

_CONVERT = """Write the weights in a checkpoint as safetensors, or a whole checkpoint for Lightning.

A safetensors file contains nothing but the weights. A folder for Hugging Face has their names, and
the configs and the tokenizer of another folder (--like). Of a model with adapters of PEFT, it is
the adapter's folder. --to checkpoint is the way back, from a folder to a checkpoint of weights. The
source is checked first. The target appears whole or not at all. The exit code is 1 if the source
cannot be read or the target not written.
"""

_AVERAGE = """Write a checkpoint whose weights are the mean of those of others.

Numbers are added in float64; integers have to agree. Only weights and hyperparameters are kept.
The exit code is 1 if they are of different models, or one cannot be read.
"""


def consolidate(arguments: Sequence[str]) -> int:
    """Write a checkpoint of another format as a single file; return the exit code."""
    parser = parser_of("checkpoint consolidate", _CONSOLIDATE, json=False)
    parser.add_argument("source", type=Path, help="a checkpoint: a file or a directory")
    parser.add_argument("target", type=Path, help="the file to write")
    options = parser.parse_args(arguments)
    return _do("consolidate", options.source, options.target)


def convert(arguments: Sequence[str]) -> int:
    """Write the weights in a checkpoint as another file; return the exit code."""
    parser = parser_of("checkpoint convert", _CONVERT, json=False)
    parser.add_argument("source", type=Path, help="a checkpoint")
    parser.add_argument("target", type=Path, help="the new file")
    _add_key(parser)
    parser.add_argument(
        "--to",
        metavar="FORM",
        default="safetensors",
        help="safetensors (the default); huggingface: a folder of them with an index; "
        "lightning: a Trainer's, for Lightning 2.x; or checkpoint: of a folder of Hugging Face",
    )
    parser.add_argument(
        "--like",
        metavar="FOLDER",
        type=Path,
        help="for huggingface: the model's folder, with its names, configs and tokenizer; or an "
        "adapter's, with its config. For checkpoint: a checkpoint of the model, with its names",
    )
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        help="for huggingface: the most bytes of a file (the default: 5GB)",
    )
    parser.add_argument(
        "--dtype",
        metavar="NAME",
        help="for huggingface: of floating-point tensors: bfloat16",
    )
    parser.add_argument(
        "--format", metavar="NAME", default="", help="of the source; the one that loads it"
    )
    options = parser.parse_args(arguments)
    layout = {
        name: value
        for name in ("like", "max_shard_size", "dtype")
        if (value := getattr(options, name)) is not None
    }
    source, target = options.source, options.target
    return _do("convert", source, target, options.key, options.to, options.format, layout)


def average(arguments: Sequence[str]) -> int:
    """Write the mean of checkpoints; return the exit code."""
    parser = parser_of("checkpoint average", _AVERAGE, json=False)
    parser.add_argument("sources", type=Path, nargs="+", help="checkpoints of one model")
    parser.add_argument(
        *("-o", "--output"), metavar="PATH", type=Path, required=True, help="the new checkpoint"
    )
    _add_key(parser)
    # Options may stand between the sources.
    options = parser.parse_intermixed_args(arguments)
    return _do("average", options.sources, options.output, options.key)


def _add_key(parser: ArgumentParser) -> None:
    parser.add_argument("--key", help="the checkpoint's entry with the weights")


def _do(what: str, *arguments: object) -> int:
    # By name: the program does without torch, and this command cannot.
    do = load_target(f"stratagem_extras.checkpoints.weights:{what}", what=f"checkpoint {what}")
    try:
        print(do(*arguments))
    except (CheckpointError, ConfigurationError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0
