"""Which tensors cross from one stage of a model to another, from a dry run."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import Tensor

from stratagem.errors import ConfigurationError
from stratagem_mesh.pipeline.dry_run import DryRun, Meta, Node, UnitCall
from stratagem_mesh.pipeline.objects import leaves_of
from stratagem_mesh.pipeline.values import Program, Stages, Value

Place = tuple[str, int]
"""A call: the name of the unit, and the number of the call."""


@dataclass(eq=False)
class Run:
    """The part of a program that the runs of a model read.

    Attributes:
        calls: the calls of units.
        arguments: the values that are arguments of a call: (leaf, value).
        outputs: the values that are outputs of a call: (leaf, value).
        kept: the arguments that user code reads after the call, too.
        changed: the outputs that user code changes in place.
        work: the number of calls of each stage, and of values that it sends to another stage's
            call, after which its forward pass ends.
    """

    calls: dict[Place, UnitCall]
    work: dict[int, int]
    arguments: dict[Place, list[tuple[int, Value]]] = field(default_factory=dict)
    outputs: dict[Place, list[tuple[int, Value]]] = field(default_factory=dict)
    kept: set[tuple[str, int, int]] = field(default_factory=set)
    changed: set[Any] = field(default_factory=set)


@dataclass(eq=False)
class _Argument:
    """An argument of the first unit of a stage that another stage computes."""

    node: Node
    stage: int
    time: int
    meta: Meta
    leaves: dict[tuple[str, int, int], None]
    can_keep: bool
    is_kept: bool = False


def program_of(
    run: DryRun, stages: Stages, result: Any, *, to_all: bool, is_partial: bool
) -> Program:
    """Return the values that stages exchange.

    Args:
        run: the dry run.
        stages: which unit belongs to which stage.
        result: the result of user code.
        to_all: every stage reads the result, as in an evaluation.
        is_partial: the run ended at an operation that depends on values.

    Raises:
        ConfigurationError: user code reads a value that no stage can send.
    """
    leaves = leaves_of(result)
    is_known = not (to_all or is_partial)
    run.mark_gradients(leaf for leaf in leaves if is_known and isinstance(leaf, Tensor))
    results = {
        index: nodes
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and (nodes := run.nodes(leaf))
    }
    if to_all:
        of_last: list[Node] = []
    else:
        of_last = [node for nodes in results.values() for node in nodes if node.kind != "inner"]
        of_last += [node for node in run.operations if not node.readers]
        if is_partial:
            of_last += run.alive()
    of_all = [node for nodes in results.values() for node in nodes] if to_all else []
    return _Analysis(run, stages, of_last, of_all).program()


class _Analysis:
    """Walks from the results of each stage back to the values that it has to receive.

    Args:
        run: the dry run.
        stages: which unit belongs to which stage.
        of_last: the tensors that the last stage computes.
        of_all: the tensors that each stage computes.
    """

    def __init__(
        self, run: DryRun, stages: Stages, of_last: Iterable[Node], of_all: Iterable[Node]
    ) -> None:
        self._run = run
        self._stages = stages
        self._of_last, self._of_all = list(of_last), list(of_all)
        self._firsts = _firsts(run.calls, stages)
        self._needed: list[dict[Node, None]] = [{} for _ in range(stages.count)]
        self._recomputed: list[set[Node]] = [set() for _ in range(stages.count)]
        self._arguments: list[dict[Node, _Argument]] = [{} for _ in range(stages.count)]

    def program(self) -> Program:
        """Return the program."""
        last = self._stages.count - 1
        asked: list[list[tuple[Node, int]]] = [[] for _ in range(self._stages.count)]
        end = self._run._time + 1
        for stage in range(last, -1, -1):
            roots = [(node, end) for node in self._of_all] + asked[stage]
            roots += [(node, end) for node in self._of_last] if stage == last else []
            self._needs_of(stage, roots)
            for argument in self._arguments[stage].values():
                asked[argument.node.stage].append((argument.node, argument.time))
        self._check_random()
        return self._made()

    def _needs_of(self, stage: int, roots: list[tuple[Node, int]]) -> None:
        """Find the values that a stage needs, without arguments that it computes anyway."""
        banned: set[Node] = set()
        while True:
            arguments = self._candidates(stage, banned)
            walk = _Walk(self._stages, stage, arguments)
            for call in self._run.calls:
                if call.stage == stage:
                    for index, node in call.arguments.items():
                        received = arguments.get(node)
                        if (
                            received is None
                            or (call.unit, call.number, index) not in received.leaves
                        ):
                            walk.visit(node, call.time, call)
            for node, time in roots:
                walk.visit(node, time, None)
            twice = walk.seen & arguments.keys()
            if not twice:
                break
            banned |= twice
        self._needed[stage], self._recomputed[stage] = walk.needed, walk.seen
        self._arguments[stage] = arguments

    def _candidates(self, stage: int, banned: Collection[Node]) -> dict[Node, _Argument]:
        found: dict[Node, _Argument] = {}
        for call in self._run.calls:
            if call.unit != self._firsts.get(stage):
                continue
            for index, node in call.arguments.items():
                is_computed = node.kind == "operation" and 0 <= node.stage < stage
                if not is_computed or node in banned or self._is_larger(node, call.given[index]):
                    continue
                can_keep = index in call.writable
                leaf = call.unit, call.number, index
                if node not in found:
                    found[node] = _Argument(
                        node, stage, call.time, call.given[index], {leaf: None}, can_keep
                    )
                else:
                    found[node].leaves[leaf] = None
        return found

    def _is_larger(self, node: Node, meta: Meta) -> bool:
        """Whether an argument has more bytes than the outputs of units from which it follows."""
        pending, seen, size = [node], set(), 0
        while pending:
            one = pending.pop()
            if one in seen:
                continue
            seen.add(one)
            if one.kind == "operation" and not one.is_random:
                pending += one.inputs
            elif one.kind == "output" and one.meta is not None:
                size += _bytes(one.meta)
            else:  # a stage that has the argument alone can compute it
                return False
        return _bytes(meta) > size

    def _check_random(self) -> None:
        for stage, nodes in enumerate(self._recomputed):
            for node in nodes:
                others = [s for s, seen in enumerate(self._recomputed) if node in seen]
                if node.is_random and len(others) > 1 and stage == others[0]:
                    raise ConfigurationError(
                        f"{node.place} draws random numbers by {node.name} for a tensor of stage "
                        f"{node.stage}, which the stages {', '.join(map(str, others))} all "
                        "compute, with other numbers: expected it in the forward of a module that "
                        "has parameters, or cuts elsewhere (pipeline_cuts)"
                    )

    def _made(self) -> Program:
        count = self._stages.count
        readers: dict[Node, set[int]] = {}
        for stage, nodes in enumerate(self._needed):
            for node in nodes:
                readers.setdefault(node, set()).add(stage)
        calls = {(call.unit, call.number): call for call in self._run.calls}
        run = Run(calls, dict.fromkeys(range(count), 0))
        by_call: dict[Place, list[_Argument]] = {}
        for arguments in self._arguments:
            for argument in arguments.values():
                unit, number, _ = next(iter(argument.leaves))
                by_call.setdefault((unit, number), []).append(argument)
        values: list[Value] = []
        for place, call in calls.items():
            run.work[call.stage] += 1
            for argument in by_call.get(place, ()):
                value = self._add_argument(run, argument)
                values.append(value)
                run.work[value.stage] += 1
            for index, node in call.outputs.items():
                if node.is_changed:
                    run.changed.add(node.key)
                if node in readers:
                    assert node.meta is not None
                    shape, dtype, learns = node.meta
                    key: Any = node.key
                    of_value = tuple(sorted(readers[node]))
                    value = Value(key, call.stage, of_value, shape, dtype, learns)
                    values.append(value)
                    run.outputs.setdefault(place, []).append((index, value))
        later = (call.time for call in self._run.calls if call.stage > 0)
        cut = min(later, default=self._run._time + 1)
        before = any(time < cut for time in self._run.drawn)
        after = any(time > cut for time in self._run.drawn)
        return Program(tuple(values), before, after, run=run)

    def _add_argument(self, run: Run, argument: _Argument) -> Value:
        first = next(iter(argument.leaves))
        shape, dtype, learns = argument.meta
        readers = (argument.stage,)
        key: Any = ("argument", *first)
        value = Value(key, argument.node.stage, readers, shape, dtype, learns)
        for unit, number, index in argument.leaves:
            run.arguments.setdefault((unit, number), []).append((index, value))
            if argument.is_kept:
                run.kept.add((unit, number, index))
        return value


class _Walk:
    """The tensors that a stage computes in user code, and the values that it receives for them.

    Args:
        stages: which unit belongs to which stage.
        stage: the stage.
        arguments: the arguments that its first unit receives.
    """

    def __init__(self, stages: Stages, stage: int, arguments: dict[Node, _Argument]) -> None:
        self._stages, self._stage = stages, stage
        self._arguments = arguments
        self.seen: set[Node] = set()
        self.needed: dict[Node, None] = {}

    def visit(self, root: Node, time: int, call: UnitCall | None) -> None:
        """Visit a tensor that is read at a time, by a unit or by user code."""
        pending = [(root, time)]
        while pending:
            node, time = pending.pop()
            argument = self._arguments.get(node)
            if argument is not None and argument.can_keep and time > argument.time:
                argument.is_kept = True
                continue
            if node in self.seen:
                continue
            self.seen.add(node)
            if node.kind == "operation":
                pending += [(one, node.time) for one in node.inputs]
            elif node.kind == "output":
                self._need(node, call)
            elif node.kind == "parameter":
                self._check_parameter(node)
            elif node.kind == "state":
                self._check_state(node)
            elif node.stage != self._stage:
                raise ConfigurationError(_not_sent(node, self._stage))

    def _need(self, node: Node, call: UnitCall | None) -> None:
        if call is not None and node.stage > self._stage:
            raise ConfigurationError(
                f"the module {call.unit!r} of stage {call.stage} reads a result of {node.name!r} "
                f"of stage {node.stage}: expected cuts in the order in which modules run, and "
                "none inside of a loop that runs modules again. Pass pipeline_cuts=[...], the "
                "names of the first modules of the later stages, or an example_input, by which "
                "their order is found"
            )
        if node.stage != self._stage:
            self.needed[node] = None

    def _check_parameter(self, node: Node) -> None:
        kind, holders = "parameter", self._stages.parameters.get(node.name)
        if holders is None:
            kind = "buffer"
            units = [unit for unit in self._stages.units if node.name.startswith(f"{unit}.")]
            holders = tuple(sorted({self._stages.units[unit] for unit in units}))
        if self._stage not in holders:
            advice = "call the module, not its forward or an operation on its weight"
            if kind == "parameter":
                advice += (
                    "; for a penalty on weights, use weight_decay of the optimizer; or pass an "
                    "example_input, by which all stages hold the parameter"
                )
            raise ConfigurationError(
                f"user code reads the {kind} {node.name!r}, which stage {self._stage} does not "
                f"have, but {' and '.join(f'stage {s}' for s in holders)}: expected that a "
                f"{kind} is read by its own module: {advice}"
            )

    def _check_state(self, node: Node) -> None:
        last = self._stages.count - 1
        if self._stage != last:
            raise ConfigurationError(
                f"training_step sets {node.name!r} from results of modules, or after them, and "
                f"stage {self._stage} reads it in the next micro-batch, before the last stage has "
                "set it: expected that code after the last module alone reads it. Set it in "
                "on_train_batch_end, from values that each rank has, such as the loss"
            )


def _bytes(meta: Meta) -> int:
    shape, dtype, _ = meta
    return prod(shape) * dtype.itemsize


def _not_sent(node: Node, stage: int) -> str:
    if node.kind == "inner":
        return (
            f"user code reads a tensor of the module {node.name!r} of stage {node.stage} that the "
            f"module does not return, and stage {stage} cannot receive it: expected it among the "
            "module's results (tuples, lists, dictionaries, and dataclasses since torch 2.13), not "
            "in an attribute or another object, and unchanged in place: x = x + y, not x += y"
        )
    return (
        f"the module {node.name!r} of stage {node.stage} changes an argument in place, and stage "
        f"{stage} reads the argument afterwards: expected an operation that returns a new tensor"
    )


def _firsts(calls: Iterable[UnitCall], stages: Stages) -> dict[int, str]:
    """Return the first unit of each stage that runs."""
    first: dict[int, str] = {}
    for call in calls:
        first.setdefault(call.stage, call.unit)
    return {stage: unit for stage, unit in first.items() if stage > 0}
