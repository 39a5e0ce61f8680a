"""Sequence parallelism: blocks that hold a part of the sequence between their divided layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from stratagem.data import map_tensors
from stratagem.errors import UserCodeError
from stratagem_mesh.context.comparison import difference
from stratagem_mesh.context.kinds import title
from stratagem_mesh.context.transformers_models import is_model
from stratagem_mesh.randomness import OwnStream, generators_of
from stratagem_mesh.tensor.blocks import Found
from stratagem_mesh.tensor.collectives import (
    copy_to_ranks,
    cut_parts,
    gather_parts,
    join_parts,
    part_length,
)
from stratagem_mesh.tensor.region import Region

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(eq=False)
class Run:
    """A forward pass through the blocks.

    Attributes:
        length: the number of positions of the sequence.
        part: the number of positions of a rank.
        stream: the random numbers of this rank.
    """

    length: int
    part: int
    stream: OwnStream | None = None

    def end(self) -> None:
        """Draw as all ranks do again."""
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.end()


class Blocks:
    """Blocks that follow each other; in training each rank has a part of the sequence there.

    The first block cuts the hidden states along dimension 1, the last one joins them. Modules
    with pairs of divided layers gather the sequence; at the end of a pair each rank gets its part
    of the sum. In evaluation each rank has the whole sequence, as without this class.

    A backward pass that recomputes layers has no run of its own, so the runs that are alive tell
    the length of its sequence.

    Args:
        found: the blocks.
        region: the state that divided layers share.
        check: compare the first forward pass of each block with one over the whole sequence.
    """

    def __init__(self, found: Found, region: Region, *, check: bool) -> None:
        self.found = found
        self.region = region
        self._mesh = region.mesh
        self._names = {block: name for name, block in found.blocks.items()}
        modules = list(found.blocks.values())
        self._first, self._last = modules[0], modules[-1]
        self._unchecked = set(modules) if check else set()
        self._run: Run | None = None
        self._live: WeakSet[Run] = WeakSet()
        self._is_gathered = False
        self._entered: tuple[Tensor, int, Tensor] | None = None

    def __deepcopy__(self, memo: object) -> Blocks:
        return self

    def attach(self) -> None:
        """Hold parts in the blocks from now on."""
        for block in self.found.blocks.values():
            block.register_forward_pre_hook(self._enter, with_kwargs=True)
            block.register_forward_pre_hook(self._compare, with_kwargs=True)
            block.register_forward_hook(self._leave, always_call=True)
        for container in self.found.containers:
            container.register_forward_pre_hook(self._gather, with_kwargs=True)
            container.register_forward_hook(self._gathered, always_call=True)
        self.found.owner.register_forward_hook(self._refuse_rest)

    def has(self, name: str) -> bool:
        """Whether a module of this name is a block or lies in one."""
        return any(f"{name}.".startswith(f"{block}.") for block in self.found.blocks)

    # -- questions of divided layers

    def is_cut(self) -> bool:
        """Whether the layers of blocks compute a part of a sequence now."""
        return self._run is not None or (in_backward() and self._first.training)

    def enter(self, values: Tensor) -> Tensor:
        """Return the whole sequence for a layer with divided outputs.

        Layers that read one tensor share one gathered sequence.
        """
        if self._is_gathered:
            return values
        known = self._entered
        if known is None or known[0] is not values or known[1] != values._version:
            whole = gather_parts(values, self._mesh, self._length(values))
            known = self._entered = values, values._version, whole
        return known[2]

    def end_pair(self) -> None:
        """Forget the sequence that the layers of a pair share."""
        self._entered = None

    # -- blocks

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _enter(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        if not self._first.training:
            self._end()
            return None
        hidden = self._hidden(block, args, kwargs)
        if block is self._first:
            self._begin(hidden)
            own = cut_parts(hidden, self._mesh)
        elif self._run is None and in_backward():
            self._run, own = self._alive(hidden.shape[1]), hidden
        else:
            self._check_part(block, hidden)
            own = hidden

        def enter(tensor: Tensor) -> Tensor:
            if tensor is hidden:
                return own
            return copy_to_ranks(tensor, self._mesh) if tensor.requires_grad else tensor

        arguments: Arguments = map_tensors(enter, (args, kwargs))
        return arguments

    def _hidden(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        found: list[Tensor] = []
        map_tensors(found.append, (args, kwargs))
        if found and found[0].ndim == 3 and found[0].dtype.is_floating_point:
            return found[0]
        received = f"{found[0].dtype} of {tuple(found[0].shape)}" if found else "none"
        raise UserCodeError(
            f"{self._title(block)} was called with {received} as its first tensor: "
            "sequence_parallel=True divides hidden states of (batch, sequence, features); pass "
            "sequence_parallel=False"
        )

    def _begin(self, hidden: Tensor) -> None:
        self._end()
        length = hidden.shape[1]
        self._run = Run(length, part_length(length, self._mesh))
        self._live.add(self._run)
        if self.region.draws and not in_backward():
            self._run.stream = OwnStream(self._mesh.get_local_rank(), generators_of(hidden.device))

    def _check_part(self, block: nn.Module, hidden: Tensor) -> None:
        if self._run is None or hidden.shape[1] != self._run.part:
            expected = "the output of the block before" if self._run else "a call of the first one"
            self._end()
            raise UserCodeError(
                f"{self._title(block)} was called with hidden states of {tuple(hidden.shape)}: "
                f"expected {expected}, since sequence_parallel=True divides the sequence from the "
                "first block to the last one; pass sequence_parallel=False"
            )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _compare(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare a block in parts with the whole one, once."""
        run = self._run
        if run is None or block not in self._unchecked:
            return
        self._unchecked.discard(block)
        hidden = self._hidden(block, args, kwargs)
        with torch.no_grad():
            joined = join_parts(hidden, self._mesh, run.length)
        try:
            found = difference(
                block,
                lambda: self._computed(None, block, args, kwargs, joined),
                lambda: self._in_parts(run, block, args, kwargs, hidden),
            )
        finally:
            self._run, self._is_gathered = run, False
        if found is not None:
            self._end()
            raise self._differs(block, found)

    def _in_parts(self, run: Run, block: nn.Module, args: Any, kwargs: Any, own: Tensor) -> Any:
        try:
            return self._joined(self._computed(run, block, args, kwargs, own), run)
        except (RuntimeError, ValueError, TypeError) as error:
            run.end()
            reason = f"it raised {type(error).__name__}: {error}"
            raise self._differs(block, reason) from error

    def _differs(self, block: nn.Module, found: str) -> UserCodeError:
        return UserCodeError(
            f"{self._title(block)} computes something else when ranks divide its sequence: "
            f"{found}. Something in it, outside of the modules with pairs of divided layers, "
            "reads other positions, or counts them: pass sequence_parallel=False"
        )

    def _computed(
        self, run: Run | None, block: nn.Module, args: Any, kwargs: Any, hidden: Tensor
    ) -> Any:
        """Return the outputs of a block in a run; None: from the whole sequence."""
        self._run = run
        first = self._hidden(block, args, kwargs)
        given_args, given = map_tensors(
            lambda tensor: hidden if tensor is first else tensor.detach(),
            _without_caches(args, kwargs),
        )
        return block.forward(*given_args, **given)

    def _joined(self, output: Any, run: Run) -> Any:
        """Return the outputs of the last block, with the whole hidden states."""
        is_first = True

        def join(tensor: Tensor) -> Tensor:
            nonlocal is_first
            was_first, is_first = is_first, False
            return join_parts(tensor, self._mesh, run.length, run) if was_first else tensor

        return map_tensors(join, output)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _leave(self, block: nn.Module, inputs: Any, output: Any) -> Any:
        run = self._run
        if run is None or output is None:
            self._end()
            return None
        if in_backward():
            self._run = None
        elif block is self._last:
            self._end()
        return self._joined(output, run) if block is self._last else None

    def _end(self) -> None:
        run, self._run = self._run, None
        self._is_gathered, self._entered = False, None
        if run is not None:
            run.end()

    def _refuse_rest(self, owner: nn.Module, inputs: Any, output: Any) -> None:
        if self._run is not None and not in_backward():
            self._end()
            raise UserCodeError(
                f"{self._title(self._last)} was not called after the blocks before it: "
                "sequence_parallel=True joins the sequence at the end of the last block; pass "
                "sequence_parallel=False"
            )

    # -- the modules in blocks that read whole sequences

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _gather(
        self, container: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments | None:
        if not self.is_cut() or self._is_gathered:
            return None
        part = None if self._run is None else self._run.part
        known: dict[int, Tensor] = {}

        def gather(tensor: Tensor) -> Tensor:
            nonlocal part
            if tensor.ndim != 3 or not tensor.dtype.is_floating_point:
                return tensor
            part = part or tensor.shape[1]
            if tensor.shape[1] != part:
                return tensor
            if id(tensor) not in known:
                known[id(tensor)] = gather_parts(tensor, self._mesh, self._length(tensor))
            return known[id(tensor)]

        arguments: Arguments = map_tensors(gather, (args, kwargs))
        self._is_gathered = True
        return arguments

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _gathered(self, container: nn.Module, inputs: Any, output: Any) -> None:
        self._is_gathered = False

    def _length(self, part: Tensor) -> int:
        return (self._run or self._alive(part.shape[1])).length

    def _alive(self, part: int) -> Run:
        """Return the run that a backward pass recomputes, by the number of positions of a rank."""
        found = {run.length: run for run in self._live if run.part == part}
        if len(found) != 1:
            raise UserCodeError(
                f"activation checkpointing recomputes a block over {part} positions of a rank, "
                f"and there are {len(found)} forward passes that it may belong to: expected one "
                "backward pass after each forward pass. Call manual_backward for each, or pass "
                "sequence_parallel=False"
            )
        return next(iter(found.values()))

    def _title(self, block: nn.Module) -> str:
        return title(self._names[block], block)


def refuse_states(model: nn.Module, blocks: Blocks) -> None:
    """Let models of transformers refuse calls that return the outputs of each block."""

    def refuse(part: Any, args: Any, kwargs: dict[str, Any]) -> None:
        returns = kwargs.get("output_hidden_states", part.config.output_hidden_states)
        if part.training and returns:
            raise UserCodeError(
                f"{type(part).__name__} was called with output_hidden_states=True, and "
                "sequence_parallel=True gives each rank a part of them in training: expected "
                "output_hidden_states=False, or sequence_parallel=False"
            )

    for name, part in model.named_modules():
        prefix = f"{name}." if name else ""
        if is_model(part) and any(block.startswith(prefix) for block in blocks.found.blocks):
            part.register_forward_pre_hook(refuse, with_kwargs=True)


def in_backward() -> bool:
    """Whether a backward pass runs, which recomputes layers."""
    return torch._C._current_graph_task_id() != -1


def _without_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Return arguments without the caches of keys and values, which a call would extend."""

    def kept(value: Any) -> Any:
        return None if type(value).__name__.endswith("Cache") else value

    return tuple(map(kept, args)), {name: kept(value) for name, value in kwargs.items()}
