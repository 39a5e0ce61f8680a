"""`stratagem plan`: which strategies a model would fit with."""

from __future__ import annotations

import argparse
import atexit
import dataclasses
import gc
import importlib
import json
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratagem.cli import at_least, parser_of, print_table
from stratagem.errors import ConfigurationError, StratagemError, format_size, format_text

if TYPE_CHECKING:
    from stratagem_extras.planner.measure import Measurement
    from stratagem_extras.planner.modules import ModuleMemory
    from stratagem_extras.planner.plan import MemoryPlan, PlannedStrategy, Planner

_DESCRIPTION = """Show which strategies a model would fit with, without using the memory.

  stratagem plan my_module:Net --batch 8x3x224x224 --devices 8 --device A100-80GB
  stratagem plan --parameters 7e9 --layers 32 --hidden 4096 --vocabulary 32000 \\
      --sequence 4096 --devices 8 --device H100 --precision bf16-true

MODEL is a class or a function without arguments that returns the model. Sizes plan a decoder in its
place. A row is what one rank holds at the most during a step: bytes of tensors, of which a plan
fills at most 90% of a device. "simulated" rows ran the strategy's own step on tensors without
memory; "computed" rows follow what the strategy says of itself.
Sizes of a mesh are compared by --strategy mesh, and where nothing else fits on the devices.
The exit code is 1 if nothing fits, 2 if the plan cannot be made.
"""

_WIDE = 150
"""Columns of a terminal in which the parts of a model and of working memory are shown."""
_DRAWN = 5
"""How many strategies the curves of a page show."""

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_SHAPE = re.compile(r"(\d+(?:x\d+)*)(?::(\w+))?")


def plan(arguments: Sequence[str]) -> int:
    """Print a plan; return the exit code."""
    options = parser_of_plan().parse_args(arguments)
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` has it
    atexit.register(_end_quickly)
    try:
        return _plan(options, arguments)
    except StratagemError as error:
        print(f"stratagem plan: error: {error}", file=sys.stderr)
        return 2


def _end_quickly() -> None:
    """Skip the collection of the garbage of torch's modules, which takes most of a second.

    Triton, which builds of torch for CUDA import, prints what is left of it without the collection.
    """
    if "triton" not in sys.modules:
        gc.freeze()


def parser_of_plan() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments."""
    parser = parser_of("plan", _DESCRIPTION)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="module:Class or module:function")
    parser.add_argument(
        "--batch",
        action="append",
        metavar="BATCH",
        help="a micro-batch of one rank: its shape, such as 8x3x224x224 or 8x1024:long, once for "
        "each input; or module:function, which returns a batch or a loader",
    )
    parser.add_argument("--optimizer", metavar="NAME", help="of torch.optim; or the model's own")
    parser.add_argument("--precision", default="32-true", help="as for the Trainer")
    parser.add_argument("--devices", type=at_least(1), default=1, help="on each node")
    parser.add_argument("--num-nodes", type=at_least(1), default=1)
    parser.add_argument("--device", metavar="NAME", help="such as A100-80GB; or what is here")
    parser.add_argument("--device-memory", metavar="SIZE", help="such as 80GB")
    parser.add_argument(
        "--figure",
        action="append",
        default=[],
        metavar="NAME=N",
        help="another figure of the device: flops, operations a second; link or network, bytes a "
        "second to a device of its node or of another one, such as network=50e9",
    )
    parser.add_argument("--host-memory", metavar="SIZE", help="of a node; or what is here")
    parser.add_argument("--disk-memory", metavar="SIZE", help="of a node's NVMe device")
    parser.add_argument("--accumulate-grad-batches", type=at_least(1), default=1, metavar="N")
    parser.add_argument(
        "--activation-checkpointing",
        action="store_true",
        help="compute the activations of layers again in backward",
    )
    parser.add_argument(
        "--strategy",
        action="append",
        default=[],
        metavar="NAME",
        help="only this one; repeatable. Sizes are written 'mesh(tensor=2, context=2)'; a name "
        "alone is planned with each of the sizes that it proposes",
    )
    parser.add_argument(
        "--modules",
        action="store_true",
        help="print what each part of the model adds to a step in one process",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="take two real steps of each strategy that runs here, and print what they held, "
        "beside the plan for this machine",
    )
    parser.add_argument("--html", metavar="FILE", type=Path, help="write charts as one file")
    sizes = parser.add_argument_group("a decoder that is not written yet")
    sizes.add_argument("--parameters", type=at_least(1.0), metavar="N")
    sizes.add_argument("--layers", type=at_least(1), metavar="N")
    sizes.add_argument("--hidden", type=at_least(1), metavar="N")
    sizes.add_argument("--vocabulary", type=at_least(1), metavar="N")
    sizes.add_argument("--sequence", type=at_least(2), metavar="N")
    return parser


def _plan(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    if options.html is not None and not options.html.absolute().parent.is_dir():
        raise ConfigurationError(
            f"--html {options.html}: expected a file in a folder that exists: make the folder first"
        )
    from stratagem_extras.planner.choices import check_names

    check_names(options.strategy)
    planner = _planner(options)
    planned = _planned(planner, options, options.strategy, options.devices, expand=True)
    if options.html is not None:
        from stratagem_extras.planner.page import write_page

        curves = _varied(planner, options, planned)
        options.html.write_text(write_page(planned, curves), encoding="utf-8")
    measurements = _measurements(planner, planned, options, arguments) if options.measure else {}
    if options.json:
        print(json.dumps(_as_json(planned, measurements), indent=2))
        return int(planned.best is None)
    host = "a host that is not compared (--host-memory)"
    if planned.host is not None:
        host = f"a host of {format_size(planned.host)}"
    print(
        f"{planned.parameters:,} parameters; {options.num_nodes} node(s) of {options.devices} "
        f"device(s) of {format_size(planned.capacity)} and {host}"
    )
    kept = {"host": "on_host", "disk": "on_disk"}  # columns omitted if empty
    kept = {c: a for c, a in kept.items() if any(getattr(r, a) for r in planned.strategies)}
    is_wide = shutil.get_terminal_size().columns >= _WIDE
    headers = ["strategy", "fits", "device", *kept]
    if is_wide:
        headers += ["parameters", "gradients", "optimizer"]
        headers += ["activations", "communication", "temporary"]
    else:
        headers += ["model", "working"]
    headers += ["sent", "step", "how"]
    if options.measure:
        headers += ["measured", "predicted/measured"]
    rows, failed = [], []
    for row in planned.strategies:
        if row.memory is None:
            continue
        memory = row.memory
        model = [memory.parameters, memory.gradients, memory.optimizer]
        working = [memory.activations, memory.communication, memory.temporary + memory.buffers]
        parts = [*model, *working] if is_wide else [sum(model), memory.working + memory.buffers]
        sizes = [format_size(size) for size in (*parts, memory.sent)]
        places = [row.on_device, *(getattr(row, attribute) for attribute in kept.values())]
        held = [format_size(size) if size else "" for size in places]
        seconds = "" if row.seconds is None else _format_time(row.seconds)
        rows.append([row.name, "yes" if row.fits else "no", *held, *sizes, seconds, row.how])
        if real := measurements.get(row.name):
            rows[-1] += ["", ""]
            if real.ratio is None:
                failed.append(f"{row.name} was not measured: {real.why_not}")
            else:
                rows[-1][-2:] = [format_size(real.measured), f"{real.ratio:.2f}"]
    print_table(headers, rows)
    kinds = {one.accelerator for one in measurements.values()}
    failed += [
        f"measured on this machine's {kind}, and compared with the plan for this machine"
        for kind in kinds - {planned.accelerator}
    ]
    for row in planned.strategies:
        if row.memory is None:
            print(f"{', '.join((row.name, *row.alike))}: {row.why_not}")
        elif row.alike:
            print(f"as {row.name}: {', '.join(row.alike)}")
    for line in (*failed, *planned.notes):
        print(line)
    if options.modules:
        _print_modules(planned.modules)
    if not rows:
        print("\nno strategy could be planned; the lines above say why")
        return 1
    if planned.best is None:
        nearest = min((r for r in planned.strategies if r.memory), key=lambda r: r.on_device)
        ways = ["more devices", "a smaller micro-batch"]
        if not options.activation_checkpointing:
            ways.append("--activation-checkpointing")
        if not options.precision.endswith("16-true"):
            ways.append("--precision bf16-true")
        print(
            f"\nnothing fits; the nearest is {nearest.name} with {format_size(nearest.on_device)} "
            f"on a device. To take less: {', '.join(ways)}"
        )
        for line in nearest.reasons[-1:]:
            print(line)
        return 1
    print(f"\n{planned.call}")
    print(_reason(planned, planned.best))
    for line in planned.best.reasons:
        print(f"- {line}")
    larger = planned.best_doubled
    print(f"twice the size: {larger.name if larger else 'nothing'} would fit")
    if options.activation_checkpointing:
        print("with activation_checkpointing=True of the Trainer, or of Lite's step_options")
    return 0


def _print_modules(modules: Sequence[ModuleMemory]) -> None:
    """Print a row for each part of the model; equal ones in a row once."""
    rows = []
    for _, group in groupby(modules, lambda row: (_parent(row.name), *_amounts(row))):
        first, *others = group
        name = first.name or "(the rest)"
        if others:
            name += f" ... {others[-1].name} ({len(others) + 1})"
        sizes = map(format_size, (first.parameters, first.activations))
        rows.append([name, *sizes, f"{first.flops:.3g}" if first.flops else "0"])
    print()
    print_table(["module", "parameters", "activations", "operations"], rows)


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _amounts(row: ModuleMemory) -> tuple[int, ...]:
    return row.parameters, row.activations, row.flops


def _as_json(planned: MemoryPlan, measurements: dict[str, Measurement]) -> dict[str, Any]:
    """Return the plan for programs.

    Args:
        planned: the plan.
        measurements: of strategies, by name. The others have null.
    """
    larger = planned.best_doubled
    rows = []
    for row in planned.strategies:
        real = measurements.get(row.name)
        more = {"on_device": row.on_device, "measured": real and dataclasses.asdict(real)}
        rows.append({**dataclasses.asdict(row), **more})
    return {
        **dataclasses.asdict(planned),
        "strategies": rows,
        "best": planned.best and planned.best.name,
        "best_doubled": larger and larger.name,
        "call": planned.call,
    }


def _format_time(seconds: float) -> str:
    """Return an estimated time with a unit in which it has few digits."""
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 0.1 or unit == "us":
            break
    return f"{seconds * factor:.3g} {unit}"


def _reason(planned: MemoryPlan, best: PlannedStrategy) -> str:
    fitting = [row for row in planned.strategies if row.fits]
    if len(fitting) == 1:
        return f"{best.name} is the only strategy that fits"
    if best.on_host:
        return "no strategy fits without the host's memory"
    fastest = "" if best.seconds is None else "has the shortest step, and of equally fast ones it "
    if fastest and any(row.ranks_of_batch > 1 for row in fitting):
        fastest = "takes the least time for a batch, and of equally fast ones it "
    return f"of {len(fitting)} strategies that fit, {best.name} {fastest}divides least"


def _planner(options: argparse.Namespace) -> Planner:
    from stratagem_extras.planner.plan import Planner

    model, batch = model_and_batch(options)
    return Planner(
        model,
        batch,
        optimizer=options.optimizer,
        precision=options.precision,
        accumulate_grad_batches=options.accumulate_grad_batches,
        activation_checkpointing=options.activation_checkpointing,
    )


def _planned(
    planner: Planner,
    options: argparse.Namespace,
    strategies: Sequence[str],
    devices: int,
    *,
    expand: bool = False,
) -> MemoryPlan:
    """Return the plan for the command's nodes with another number of devices.

    Args:
        planner: the planner of the model.
        options: the options of the command.
        strategies: names of rows; empty for all strategies.
        devices: the number of devices on each node.
        expand: whether to plan candidates of strategies.
    """
    from stratagem_extras.planner.forks import in_forks

    return planner.plan(
        devices=devices,
        num_nodes=options.num_nodes,
        device=options.device,
        device_memory=options.device_memory,
        figures=_figures(options.figure),
        host_memory=options.host_memory,
        disk_memory=options.disk_memory,
        strategies=strategies,
        expand=expand,
        divide=in_forks,
    )


def _figures(given: Sequence[str]) -> dict[str, float]:
    """Return the figures of `--figure`, by name.

    Raises:
        ConfigurationError: one is not NAME=N.
    """
    figures = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            figures[name] = float(value)
        except ValueError:
            raise ConfigurationError(
                f"--figure {text}: expected a name and a number, such as network=50e9"
            ) from None
    return figures


def _measurements(
    planner: Planner, planned: MemoryPlan, options: argparse.Namespace, arguments: Sequence[str]
) -> dict[str, Measurement]:
    """Return the measurements of the planned strategies, by name.

    A plan for another kind of device is made again for this machine: optimizers hold other
    temporary tensors there, and engines have other buckets.
    """
    from stratagem_extras.planner.measure import measure_plan

    names = [row.name for row in planned.strategies if row.memory is not None]
    if not names:
        return {}
    machine = {"device": None, "device_memory": None, "host_memory": None}
    local = argparse.Namespace(**{**vars(options), **machine})
    given = any(getattr(options, name) is not None for name in machine)
    here = _planned(planner, local, names, options.devices) if given else planned
    return {name: one for name, one in measure_plan(here, arguments).items() if name in names}


def _varied(
    planner: Planner, options: argparse.Namespace, planned: MemoryPlan
) -> dict[str, dict[str, MemoryPlan]]:
    """Return plans of the first strategies with other devices, and other sizes of a decoder."""
    names = [row.name for row in planned.strategies if row.memory is not None][:_DRAWN]

    def with_sizes(**sizes: float) -> MemoryPlan:
        changed = argparse.Namespace(**{**vars(options), **sizes})
        other = planner if changed == options else _planner(changed)
        return _planned(other, options, names, options.devices)

    devices = sorted({2, 4, 8, 16, options.devices} - {1})
    varied = {
        "number of devices on a node": {
            str(number): _planned(planner, options, names, number) for number in devices
        }
    }
    if options.model is None:
        if not options.batch:
            varied["sequence length"] = {
                str(length): with_sizes(sequence=length)
                for length in (options.sequence // 2, options.sequence, 2 * options.sequence)
            }
        sizes = (
            (options.layers * times // 2, options.parameters * times / 2) for times in (1, 2, 4)
        )
        varied["parameters of the model"] = {
            f"{parameters / 1e9:.3g} billion": with_sizes(layers=layers, parameters=parameters)
            for layers, parameters in sizes
        }
    return varied


def model_and_batch(options: argparse.Namespace) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return the functions that make the model and a batch for it.

    Raises:
        ConfigurationError: the arguments name no model, or no batch.
    """
    names = ("parameters", "layers", "hidden", "vocabulary", "sequence")
    given = [name for name in names if getattr(options, name) is not None]
    if options.model is None:
        if len(given) < len(names):
            missing = ", ".join(f"--{name}" for name in names if name not in given)
            raise ConfigurationError(
                f"expected a MODEL, such as my_module:Net, or the sizes of a decoder: {missing} is "
                "missing"
            )
        from stratagem_extras.planner.decoder import PlannedDecoder

        sizes = {name: getattr(options, name) for name in names[1:-1]}
        shapes = options.batch or [f"1x{options.sequence}:long"]
        return partial(PlannedDecoder, options.parameters, **sizes), _batch(shapes)
    if given:
        raise ConfigurationError(
            f"received MODEL and --{given[0]}: give a model, or the sizes of a decoder"
        )
    if not options.batch:
        raise ConfigurationError(
            "expected --batch, the shape of a micro-batch, such as --batch 8x3x224x224"
        )
    return _imported(options.model, "model"), _batch(options.batch)


def _imported(name: str, what: str) -> Callable[[], Any]:
    """Return the object that MODEL or BATCH names.

    Raises:
        ConfigurationError: the object does not exist, or importing it fails.
    """
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            f"the {what} {name!r} cannot be imported: {type(error).__name__}: "
            f"{format_text(str(error), 300)}. Expected module:Class or module:function, found from "
            "this folder or installed"
        ) from error
    if not callable(found):
        raise ConfigurationError(
            f"the {what} {name!r} is a {type(found).__name__}: expected a class, or a function "
            f"that returns the {what}"
        )
    return found  # type: ignore[no-any-return]


def _batch(shapes: Sequence[str]) -> Callable[[], Any]:
    """Return a function that creates a batch of given shapes, or that calls a user's function.

    Raises:
        ConfigurationError: a shape is invalid, or the function fails.
    """
    import torch

    if len(shapes) == 1 and _FUNCTION.fullmatch(shapes[0]):
        return _own_batch(shapes[0])
    made = []
    for text in shapes:
        found = _SHAPE.fullmatch(text)
        dtype = getattr(torch, found[2] or "float32", None) if found else None
        if found is None or not isinstance(dtype, torch.dtype):
            raise ConfigurationError(
                f"--batch {text}: expected sizes and a dtype of torch, such as 8x3x224x224 or "
                "8x1024:long; or module:function, once, for a batch or a loader"
            )
        made.append((tuple(map(int, found[1].split("x"))), dtype))

    def batch() -> Any:
        tensors = [torch.zeros(shape, dtype=dtype) for shape, dtype in made]
        return tensors[0] if len(tensors) == 1 else tensors

    return batch


def _own_batch(name: str) -> Callable[[], Any]:
    from stratagem_extras.planner.training import first_batch

    make = _imported(name, "batch")
    try:
        batch = first_batch(make())
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"--batch {name} failed: {type(error).__name__}: {format_text(str(error), 300)}. "
            "Expected a function without arguments that returns a batch or a loader"
        ) from error
    return lambda: batch
