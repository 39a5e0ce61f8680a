"""The parts of a model: what each adds to a step in one process, as a pipeline is cut by it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from stratagem_extras.planner.meter import MemoryMeter, storage_of

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class ModuleMemory:
    """The share of a module in the step of one process.

    Attributes:
        name: the name of the module; "": the rest of the model, the batch and the loss.
        parameters: bytes of its parameters. A shared parameter counts in the first module.
        activations: bytes of the tensors that its forward makes, and that are kept until backward.
        flops: floating-point operations of its forward.
        output: bytes of the tensors that its last call in a forward returns.
    """

    name: str
    parameters: int = 0
    activations: int = 0
    flops: int = 0
    output: int = 0


class ModuleWatch:
    """Attributes the tensors and operations of forward to the parts of a model.

    Args:
        stacks: as for `parts_of`.

    Attributes:
        rows: a row for each part in the order of calls, the rest last; after `close`.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(10, 20), nn.Linear(20, 5))
        >>> watch = ModuleWatch()
        >>> with MemoryMeter(lambda: {"parameters": model.parameters()}) as meter:
        ...     watch.begin(model, meter)
        ...     loss = model(torch.ones(3, 10)).sum()
        ...     meter.note_activations()
        >>> watch.close()
        >>> [(row.name, row.parameters, row.activations, row.flops) for row in watch.rows]
        [('0', 880, 240, 1200), ('1', 420, 0, 600), ('', 0, 124, 0)]
    """

    def __init__(self, stacks: Collection[str] = ()) -> None:
        self.stacks = stacks
        self.rows: tuple[ModuleMemory, ...] = ()
        self._called: dict[str, None] = {}
        self._outer: list[str] = []
        self._outputs: dict[str, int] = {}

    def begin(self, model: nn.Module, meter: MemoryMeter) -> None:
        """Follow the calls of a model's parts."""
        self.model, self.meter = model, meter
        self.parts = list(parts_of(model, self.stacks))
        for name in self.parts:
            part = model.get_submodule(name)
            part.register_forward_pre_hook(self._entering(name))
            part.register_forward_hook(self._leaving(name), always_call=True)

    def _entering(self, name: str) -> Any:
        def enter(*_: Any) -> None:
            self._called.setdefault(name)
            self._outer.append(self.meter.owner)
            self.meter.owner = name

        return enter

    def _leaving(self, name: str) -> Any:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self.meter.owner = self._outer.pop()
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            self._outputs[name] = sum(each.numel() * each.element_size() for each in tensors)

        return leave

    def close(self) -> None:
        """Fill in `rows` from the last forward pass."""
        parameters = self._parameters()
        order = [*self._called, *(name for name in self.parts if name not in self._called), ""]
        columns = (parameters, self.meter.kept_by_owner, self.meter.flops_by_owner, self._outputs)
        self.rows = tuple(
            ModuleMemory(name, *(sizes.get(name, 0) for sizes in columns)) for name in order
        )

    def _parameters(self) -> dict[str, int]:
        """Return the bytes of parameters, by the name of the part that holds them."""
        sizes: dict[str, int] = {}
        seen: set[int] = set()
        for name, parameter in self.model.named_parameters():
            storage = storage_of(parameter)
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                owner = next((p for p in self.parts if name.startswith(f"{p}.")), "")
                sizes[owner] = sizes.get(owner, 0) + storage.nbytes()
        return sizes


def parts_of(model: nn.Module, stacks: Collection[str] = (), prefix: str = "") -> Iterator[str]:
    """Yield the names of a model's parts: elements of lists of modules, and outermost modules.

    Args:
        model: the model, or a part.
        stacks: names of lists in the whole model; their elements are parts in any case.
        prefix: the beginning of the names.

    Example:
        >>> model = nn.ModuleDict({"layers": nn.ModuleList([nn.ReLU(), nn.ReLU()])})
        >>> model["head"] = nn.Linear(2, 2)
        >>> list(parts_of(model))
        ['layers.0', 'layers.1', 'head']
    """
    is_list = isinstance(model, (nn.ModuleList, nn.Sequential))
    for child, part in model.named_children():
        name = prefix + child
        has_list = any(isinstance(inner, _CONTAINERS) for inner in part.modules())
        if is_list:
            has_list = any(f"{stack}.".startswith(f"{name}.") for stack in stacks)
        if has_list:
            yield from parts_of(part, stacks, f"{name}.")
        else:
            yield name


def with_all_layers(
    rows: Sequence[ModuleMemory],
    few: Sequence[ModuleMemory],
    more: Sequence[ModuleMemory],
    names: Sequence[str],
) -> tuple[ModuleMemory, ...]:
    """Return rows with all layers of a list, of which only some have been run.

    A further layer equals a middle one, and adds to other parts as much as one more layer.

    Args:
        rows: the rows so far.
        few: the rows of a step with some layers.
        more: the rows of a step with one more.
        names: the names of all layers in the list.
    """
    before, after = ({row.name: row for row in each} for each in (few, more))
    run = [name for name in names if name in before]
    further = len(names) - len(run)
    middle, last = before[run[len(run) // 2]], before[run[-1]]
    found: list[ModuleMemory] = []
    for row in rows:
        if row.name == last.name:
            found += (replace(middle, name=name) for name in names[len(run) - 1 : -1])
            found.append(replace(last, name=names[-1]))
        elif row.name in run or row.name not in before:
            found.append(row)
        else:
            found.append(_grown(row, before[row.name], after[row.name], further))
    return tuple(found)


def _grown(
    row: ModuleMemory, before: ModuleMemory, after: ModuleMemory, further: int
) -> ModuleMemory:
    activations = row.activations + further * (after.activations - before.activations)
    return replace(
        row, activations=activations, flops=row.flops + further * (after.flops - before.flops)
    )
