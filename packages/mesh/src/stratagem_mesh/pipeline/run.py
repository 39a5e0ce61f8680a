"""A step of a pipeline on one position: its actions in order, and the exchange of values.

A value goes from its owner to each position that reads it; gradients go back. Transfers run in two
process groups, one for each direction along the pipeline. So the sends of one rank to another have
one order, in which the other posts its receives. NCCL executes the transfers of a pair of ranks in
the order of the calls: with one direction in a group, no send waits behind a receive.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from stratagem.errors import UserCodeError
from stratagem_mesh.pipeline.schedule import Action
from stratagem_mesh.pipeline.values import Program, Value

__all__ = ["StageWork", "Transfers", "added", "run_schedule"]

AHEAD = 2
"""The receives of so many later actions are posted before an action begins."""


class StageWork(Protocol):
    """The computation of a rank's stages."""

    def forward(self, stage: int, micro_batch: int, received: list[Tensor]) -> list[Tensor]:
        """Run the forward pass of a stage.

        Args:
            stage: the stage.
            micro_batch: the index of the micro-batch in the step.
            received: the values that the stage reads, as leaves, in the order of `Program.reads`.

        Returns:
            The values that it sends, attached to their graph, in the order of `Program.sends`.
        """

    def backward(
        self, stage: int, micro_batch: int, gradients: list[list[Tensor]]
    ) -> list[Tensor | None]:
        """Run the backward pass of a stage.

        Args:
            stage: the stage.
            micro_batch: the index of the micro-batch in the step.
            gradients: for each differentiable value of `Program.sends` one gradient from each
                reader, the last reader first: autograd adds them in this order in one process.

        Returns:
            A gradient for each value that `forward` received, or None.
        """


def added(gradients: Sequence[Tensor]) -> Tensor:
    """Return the sum of the readers' gradients, in their order.

    Args:
        gradients: the gradients of one value.

    Example:
        >>> added([torch.ones(2), torch.ones(2)])
        tensor([2., 2.])
    """
    return reduce(torch.add, gradients)


class Transfers:
    """The exchange of tensors between the ranks of one pipeline.

    Args:
        groups: two process groups of these ranks: for transfers to later positions, and to earlier
            ones. Both carry values and gradients.
        ranks: the global rank of each position.
        position: the position of this rank.
        device: the device of the values. A gloo group sends copies on the CPU.

    Attributes:
        action: the action that this rank runs.
        awaited: the transfer for which it waits.
    """

    def __init__(
        self,
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
        ranks: Sequence[int],
        position: int,
        device: torch.device,
    ) -> None:
        self.ranks = tuple(ranks)
        self.position = position
        self.device = device
        self.action: Action | None = None
        self.awaited: _Transfer | None = None
        self._groups = groups
        self._wire = _wire(groups[0], device)
        self._plans: dict[tuple[int, ...], tuple[_Plan, Any]] = {}

    def doing(self) -> str:
        """Describe this rank's action in a step, for reports of a hang; empty between steps."""
        action, awaited = self.action, self.awaited
        if action is None:
            return f"waits until {awaited.what} has arrived" if awaited else ""
        return f"{action}, waits for {awaited.what}" if awaited else str(action)

    def plan(self, orders: Sequence[Sequence[Action]], programs: Sequence[Program]) -> _Plan:
        """Return the transfers of this position in a step, and keep them for later steps."""
        key = (id(orders), *map(id, programs))
        if key not in self._plans:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            self._plans[key] = _Plan(orders, programs, self.position), (orders, list(programs))
        return self._plans[key][0]

    def send(self, tensor: Tensor, transfer: _Transfer) -> _Pending:
        """Begin a send; the result keeps the tensor alive."""
        sent = tensor.detach().to(self._wire).resolve_conj().resolve_neg().contiguous()
        return _Pending(sent, self._begin(dist.isend, sent, transfer, transfer.target), transfer)

    def receive(self, transfer: _Transfer) -> _Pending:
        """Begin a receive."""
        value = transfer.value
        buffer = torch.empty(value.shape, dtype=value.dtype, device=self._wire)
        return _Pending(
            buffer, self._begin(dist.irecv, buffer, transfer, transfer.source), transfer
        )

    def wait(self, pending: _Pending) -> Tensor:
        """Wait for the end of a transfer; return its tensor."""
        if pending.work is not None:
            self.awaited = pending.transfer
            pending.work.wait()
            self.awaited = None
        return pending.tensor

    def share(self, value: Value, tensor: Tensor | None) -> Tensor:
        """Send a value of an evaluation to the positions that read it; return it on each of them.

        Args:
            value: the value.
            tensor: the value itself on its owner; None on the positions that read it.
        """
        positions = len(self.ranks)
        owner = value.stage % positions
        if tensor is None:
            transfer = _Transfer(value, 0, None, owner, self.position, 0, 0)
            return self.wait(self.receive(transfer)).to(self.device)
        targets = sorted({reader % positions for reader in value.readers} - {owner})
        sends = [self.send(tensor, _Transfer(value, 0, None, owner, t, 0, 0)) for t in targets]
        for pending in sends:
            self.wait(pending)
        return tensor

    def _begin(self, begin: Any, tensor: Tensor, transfer: _Transfer, peer: int) -> Any:
        if not tensor.numel():
            return None
        group = self._groups[transfer.source > transfer.target]
        # As bytes: a backend need not know the type.
        return begin(tensor.reshape(-1).view(torch.uint8), self.ranks[peer], group)


_PLANS = 8


def _wire(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Return the device from which the group sends tensors of a device."""
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    return torch.device("cpu") if backends.get(device.type) == "gloo" else device


@dataclass(frozen=True)
class _Transfer:
    """A value on the way to a position, or the gradient of a reader on the way back.

    `made` is the index of the sender's action, `used` the index of the receiver's first action.
    """

    value: Value
    micro_batch: int
    reader: int | None
    source: int
    target: int
    made: int
    used: int

    @property
    def key(self) -> Any:
        return self.value.key, self.micro_batch, self.reader

    @property
    def what(self) -> str:
        if self.reader is None:
            return f"a value of stage {self.value.stage}"
        return f"a gradient of stage {self.reader}"


@dataclass(frozen=True)
class _Pending:
    tensor: Tensor
    work: Any
    transfer: _Transfer


class _Plan:
    """The transfers of one position in a step.

    Attributes:
        sends: the sends of each action.
        receives: the receives from each position, in the order of its sends.
        due: for each action, the number of receives from each position that it needs.
    """

    def __init__(
        self, orders: Sequence[Sequence[Action]], programs: Sequence[Program], position: int
    ) -> None:
        own = orders[position]
        index = {action: number for order in orders for number, action in enumerate(order)}
        self.sends: list[list[_Transfer]] = [[] for _ in own]
        self.receives: dict[int, list[_Transfer]] = defaultdict(list)
        self.due: list[dict[int, int]] = [{} for _ in own]
        for order in orders:
            for action in order:
                for transfer in _made_by(action, programs[action.micro_batch], index, len(orders)):
                    if transfer.source == position:
                        self.sends[transfer.made].append(transfer)
                    elif transfer.target == position:
                        received = self.receives[transfer.source]
                        received.append(transfer)
                        self.due[transfer.used][transfer.source] = len(received)


def _made_by(
    action: Action, program: Program, index: dict[Action, int], positions: int
) -> Iterator[_Transfer]:
    """Yield the transfers that an action makes, in the order of its sends."""
    kind, stage, micro_batch = action
    source = stage % positions
    if kind == "forward":
        for value in program.sends(stage):
            used: dict[int, int] = {}
            for reader in value.readers:
                place = index[Action("forward", reader, micro_batch)]
                target = reader % positions
                used[target] = min(place, used.get(target, place))
            for target in sorted(used.keys() - {source}):
                yield _Transfer(
                    value, micro_batch, None, source, target, index[action], used[target]
                )
        return
    for value in program.reads(stage):
        target = value.stage % positions
        if value.differentiable and target != source:
            place = index[Action("backward", value.stage, micro_batch)]
            yield _Transfer(value, micro_batch, stage, source, target, index[action], place)


def run_schedule(
    orders: Sequence[Sequence[Action]],
    programs: Sequence[Program],
    work: StageWork,
    transfers: Transfers,
) -> None:
    """Run the actions of this rank's position in one step.

    All ranks of the pipeline call it with equal orders and programs.

    Args:
        orders: the actions of all positions, from `actions`; the same object in each step saves
            time.
        programs: the program of each micro-batch; their shapes may differ.
        work: the computation of this rank's stages.
        transfers: the exchange with the other ranks.

    Raises:
        UserCodeError: a stage sends tensors of other shapes or types than its program has.
    """
    step = _Step(orders, programs, transfers)
    for number, action in enumerate(orders[transfers.position]):
        transfers.action = action
        step.post_receives(number)
        program = programs[action.micro_batch]
        if action.kind == "forward":
            received = step.received(action, program)
            outputs = work.forward(action.stage, action.micro_batch, received)
            step.keep_values(action, program, outputs)
        else:
            gradients = step.gradients(action, program)
            step.keep_gradients(
                action, program, work.backward(action.stage, action.micro_batch, gradients)
            )
        step.send(number)
    transfers.action = None
    step.finish()


class _Step:
    """The tensors of a step that have been made or received, and not yet been used."""

    def __init__(
        self, orders: Sequence[Sequence[Action]], programs: Sequence[Program], transfers: Transfers
    ) -> None:
        self._positions = len(orders)
        self._transfers = transfers
        self._plan = transfers.plan(orders, programs)
        self._posted: dict[int, int] = defaultdict(int)
        self._next = 0
        self._receiving: dict[Any, _Pending] = {}
        self._sending: dict[int, deque[_Pending]] = defaultdict(deque)
        self._made: dict[Any, Tensor] = {}
        self._unread: dict[Any, int] = {}

    def post_receives(self, number: int) -> None:
        """Post the receives of an action and of the next ones, in the order of the senders."""
        last = min(number + AHEAD, len(self._plan.due) - 1)
        for due in self._plan.due[self._next : last + 1]:
            for source, count in due.items():
                for transfer in self._plan.receives[source][self._posted[source] : count]:
                    self._receiving[transfer.key] = self._transfers.receive(transfer)
                self._posted[source] = max(count, self._posted[source])
        self._next = last + 1

    def received(self, action: Action, program: Program) -> list[Tensor]:
        """Return the values that a stage reads, each as a leaf."""
        leaves = []
        for value in program.reads(action.stage):
            key = value.key, action.micro_batch, None
            if key in self._receiving:
                self._made[key] = self._wait(key)
                self._unread[key] = self._own_readers(value)
            leaf = self._made[key].detach()
            self._unread[key] -= 1
            if not self._unread[key]:
                del self._made[key], self._unread[key]
            leaves.append(leaf.requires_grad_(value.differentiable))
        return leaves

    def keep_values(self, action: Action, program: Program, outputs: Sequence[Tensor]) -> None:
        """Keep the values that a stage made, for its readers."""
        values = program.sends(action.stage)
        described = [(tuple(tensor.shape), tensor.dtype) for tensor in outputs]
        expected = [(tuple(value.shape), value.dtype) for value in values]
        if described != expected:
            raise UserCodeError(
                f"the {action}, made {_words(described)} for the later stages: expected "
                f"{_words(expected)}, as in the dry run. Shapes between stages may depend on the "
                "shapes of the batch alone"
            )
        for value, tensor in zip(values, outputs, strict=True):
            key = value.key, action.micro_batch, None
            self._made[key] = tensor.detach()
            self._unread[key] = self._own_readers(value)

    def gradients(self, action: Action, program: Program) -> list[list[Tensor]]:
        """Return the gradients of the values that a stage made."""
        result = []
        for value in program.sends(action.stage):
            if value.differentiable:
                keys = [
                    (value.key, action.micro_batch, reader)
                    for reader in sorted(value.readers, reverse=True)
                ]
                result.append(
                    [self._wait(k) if k in self._receiving else self._made.pop(k) for k in keys]
                )
        return result

    def keep_gradients(
        self, action: Action, program: Program, gradients: Sequence[Tensor | None]
    ) -> None:
        """Keep the gradients of the values that a stage read, for their owners."""
        for value, gradient in zip(program.reads(action.stage), gradients, strict=True):
            if value.differentiable:
                if gradient is None:
                    zero = torch.zeros((), dtype=value.dtype, device=self._transfers.device)
                    gradient = zero.expand(value.shape)
                self._made[value.key, action.micro_batch, action.stage] = gradient.detach()

    def send(self, number: int) -> None:
        """Begin the sends of an action, and drop the tensors that no stage of this rank reads."""
        transfers = self._plan.sends[number]
        for transfer in transfers:
            pending = self._transfers.send(self._made[transfer.key], transfer)
            self._sending[transfer.target].append(pending)
        for key in {transfer.key for transfer in transfers}:
            if not self._unread.get(key):
                del self._made[key]
                self._unread.pop(key, None)

    def finish(self) -> None:
        """Wait until all is sent."""
        for sent in self._sending.values():
            for pending in sent:
                self._transfers.wait(pending)

    def _own_readers(self, value: Value) -> int:
        own = self._transfers.position
        return sum(reader % self._positions == own for reader in value.readers)

    def _wait(self, key: Any) -> Tensor:
        pending = self._receiving.pop(key)
        tensor = self._transfers.wait(pending).to(self._transfers.device)
        # Its sender has ended the action that made it, so it has received the values for it.
        sent = self._sending[pending.transfer.source]
        while sent and sent[0].transfer.used <= pending.transfer.made:
            self._transfers.wait(sent.popleft())
        return tensor


def _words(tensors: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{shape} {str(dtype)[6:]}" for shape, dtype in tensors) or "no tensor"
