"""The stages of a model, one after another in one process, compared with the whole model."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from queue import Queue
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from stratagem_mesh.pipeline.cuts import find_stages
from stratagem_mesh.pipeline.staged_model import StagedModel
from stratagem_mesh.pipeline.values import Program, Stages, Value

Step = Callable[[nn.Module, Any], Tensor]
Prepare = Callable[[nn.Module, "dict[str, nn.Module] | None"], Any]
"""Changes a model after the other stages are dropped; receives the units, or None for the whole."""


class Positions:
    """Copies of a model, each with the stages of one position of a pipeline.

    Args:
        model: the whole model, which stays as it is.
        stages: the number of stages, or their division.
        virtual: the number of stages at a position.
    """

    def __init__(
        self,
        model: nn.Module,
        count: int,
        cuts: Sequence[str] | None = None,
        *,
        virtual: int = 1,
        example: Any = None,
        prepare: Prepare = lambda model, units: None,
    ) -> None:
        self.whole = model
        positions = count // virtual
        self.stages: Stages
        self.models: list[nn.Module] = []
        self.staged: list[StagedModel] = []
        self.own: list[list[int]] = []
        for position in range(positions):
            part = copy.deepcopy(model)
            self.stages = find_stages(part, count, cuts, example)
            staged = StagedModel(part, self.stages)
            own = [s for s in range(count) if s % positions == position]
            staged.drop_absent(own)
            prepare(part, staged.units)
            self.models.append(part)
            self.staged.append(staged)
            self.own.append(own)

    def programs(self, step: Step, batch: Any) -> list[Program]:
        """Return the program of a step at each position."""
        pairs = zip(self.staged, self.models, strict=True)
        return [
            staged.program(lambda m=model: step(m, batch), batch, trains=True)  # type: ignore[misc]
            for staged, model in pairs
        ]

    def train(self, step: Step, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and the gradients by name, from forward and backward in turn."""
        programs = self.programs(step, batch)
        for program in programs[1:]:
            assert program.values == programs[0].values
        values: dict[Value, Tensor] = {}
        kept: list[tuple[dict[Value, Tensor], dict[Value, Tensor]]] = []
        loss: Any = None
        rng = torch.get_rng_state()
        for stage in range(self.stages.count):
            position = stage % len(self.models)
            program, model = programs[position], self.models[position]
            torch.set_rng_state(rng)
            received = {}
            for value in program.reads(stage):
                tensor = values[value].detach().clone()
                received[value] = tensor.requires_grad_(value.differentiable)
            result, sent, interrupted = self.staged[position].forward(
                program,
                stage,
                received,
                lambda m=model: step(m, copy.deepcopy(batch)),  # type: ignore[misc]
            )
            assert interrupted == (stage < self.stages.count - 1)
            for value in program.sends(stage):
                tensor = sent[value]
                assert (tuple(tensor.shape), tensor.dtype) == (value.shape, value.dtype)
                values[value] = tensor
            kept.append((received, {v: sent[v] for v in program.sends(stage)}))
            loss = result if stage == self.stages.count - 1 else loss
        gradients: dict[Value, Tensor] = {}
        for stage in reversed(range(self.stages.count)):
            received, sent = kept[stage]
            if stage == self.stages.count - 1:
                loss.backward()
            outputs = [v for v in sent if sent[v].requires_grad and v in gradients]
            if outputs:
                torch.autograd.backward([sent[v] for v in outputs], [gradients[v] for v in outputs])
            for value, tensor in received.items():
                if tensor.grad is not None:
                    gradients[value] = gradients.get(value, 0) + tensor.grad
        return loss.detach(), self.gradients()

    def gradients(self) -> dict[str, Tensor]:
        """Return the sum of gradients over positions, by every name of a parameter."""
        by_name: dict[str, Tensor] = {}
        aliases: dict[int, list[str]] = {}
        for name, parameter in self.whole.named_parameters(remove_duplicate=False):
            aliases.setdefault(id(parameter), []).append(name)
        for names in aliases.values():
            parts = []
            for model in self.models:
                here = dict(model.named_parameters(remove_duplicate=False))
                found = {id(here[n]): here[n] for n in names if n in here}
                assert len(found) <= 1
                parts += [p.grad for p in found.values() if p.grad is not None]
            if parts:
                by_name[names[0]] = sum(parts[1:], parts[0])
        return by_name

    def evaluate(self, call: Callable[[nn.Module], Any]) -> list[Any]:
        """Return the result of user code at each position, run at the same time."""
        queues: dict[tuple[Any, int], Queue[Tensor]] = {}
        lock = threading.Lock()
        results: list[Any] = [None] * len(self.models)

        def queue(value: Value, position: int) -> Queue[Tensor]:
            with lock:
                return queues.setdefault((value.key, position), Queue())

        def run(position: int) -> None:
            def exchange(value: Value, tensor: Tensor | None) -> Tensor:
                if tensor is None:
                    return queue(value, position).get(timeout=60)
                for reader in {r % len(self.models) for r in value.readers} - {position}:
                    assert (tuple(tensor.shape), tensor.dtype) == (value.shape, value.dtype)
                    queue(value, reader).put(tensor.clone())
                return tensor

            try:
                with (
                    torch.no_grad(),
                    self.staged[position].evaluating(self.own[position], exchange),
                ):
                    results[position] = call(self.models[position])
            except BaseException as error:
                results[position] = error

        threads = [threading.Thread(target=run, args=(p,)) for p in range(len(self.models))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results:
            if isinstance(result, BaseException):
                raise result
        assert all(queue.empty() for queue in queues.values())
        return results


def difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    """Return the largest relative difference of gradients.

    It is relative to the largest gradient of the parameter, or to a small part of that of all. A
    gradient that one of them lacks counts as zeros.
    """
    largest = 0.0
    overall = max(float(gradient.abs().max()) for gradient in second.values())
    for name in first.keys() | second.keys():
        one, other = first.get(name), second.get(name)
        like = one if one is not None else other
        assert like is not None
        one = torch.zeros_like(like) if one is None else one
        other = torch.zeros_like(like) if other is None else other
        scale = max(float(other.abs().max()), 1e-4 * overall)
        largest = max(largest, float((one - other).abs().max()) / scale)
    return largest


def compare(
    model: nn.Module,
    step: Step,
    batch: Any,
    count: int,
    cuts: Sequence[str] | None = None,
    *,
    virtual: int = 1,
    example: Any = None,
    outputs: Callable[[nn.Module, Any], Any] | None = None,
    prepare: Prepare = lambda model, units: None,
) -> Positions:
    """Compare a step of the stages with the whole model's, and outputs in an evaluation."""
    rng = torch.get_rng_state()
    whole = copy.deepcopy(model)
    prepare(whole, None)
    expected_loss = step(whole, batch)
    expected_loss.backward()
    expected = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    torch.set_rng_state(rng)
    positions = Positions(model, count, cuts, virtual=virtual, example=example, prepare=prepare)
    loss, gradients = positions.train(step, batch)
    assert float((loss - expected_loss.detach()).abs()) <= 1e-10 * max(1.0, float(loss.abs()))
    error = difference(gradients, expected)
    assert error < 1e-10, error
    buffers = dict(whole.named_buffers())
    for part in positions.models:
        for name, buffer in part.named_buffers():
            assert torch.allclose(buffer, buffers[name], rtol=1e-12, atol=1e-12), name
    if outputs is not None:
        whole.eval()
        with torch.no_grad():
            right = tree_leaves(outputs(whole, batch))
        for part in positions.models:
            part.eval()
        for result in positions.evaluate(lambda m: outputs(m, batch)):
            leaves = tree_leaves(result)
            assert len(leaves) == len(right)
            for leaf, other in zip(leaves, right, strict=True):
                if isinstance(other, Tensor):
                    assert torch.allclose(leaf, other, rtol=1e-10, atol=1e-10)
    return positions
