"""A module of experts that computes those of its rank, for the tokens of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stratagem.errors import UserCodeError
from stratagem_mesh.expert.collectives import ExpertGroup, divide_gradient, swap


class Dispatch:
    """Takes the place of the forward of a module with experts.

    Each rank sends a token once for each expert that the router chose, together with the weight;
    the module's own forward computes the experts of a rank, with one expert for each row. The rows
    go back, and are summed where they came from.

    Each rank runs the same exchanges for any choice of the router. A rank that received no row
    computes a row of ones, without an effect. So experts without tokens have gradients of zeros.

    Args:
        name: the name of the module.
        module: has parameters of the shape (expert, ...).
        experts: the number of experts of all ranks.
        group: the ranks that divide them.

    Attributes:
        load: the number of rows of this rank's tokens for each expert, in training, since it was
            taken last; None before the first.
        announce: called before the exchanges of a forward pass, with the number of features of a
            token and the dtypes of tokens and weights.
    """

    def __init__(self, name: str, module: nn.Module, experts: int, group: ExpertGroup) -> None:
        self.name = name
        self.experts = experts
        self.local = experts // group.size
        self.load: Tensor | None = None
        self.announce: Callable[[int, torch.dtype, torch.dtype], None] | None = None
        self._module = module
        self._group = group
        self._forward: Callable[..., Any] = module.forward
        self._names = list(signature(module.forward).parameters)
        self._numbers = [
            key
            for key, value in vars(module).items()
            if "experts" in key and type(value) is int and value == experts
        ]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the experts of all ranks on this rank's tokens."""
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        tokens, chosen, weights = (given.pop(name, None) for name in self._names[:3])
        self._check(tokens, chosen, weights, given)
        if self.announce is not None:
            self.announce(tokens.shape[1], tokens.dtype, weights.dtype)
        count, each = chosen.shape
        order = torch.argsort(chosen.flatten(), stable=True)
        counts = self._count(chosen)
        received, to_ranks, from_ranks = self._group.counts(counts)
        if not self._group.has_values:
            to_ranks = from_ranks = _even(count * each, self._group.size)
        rows = swap(tokens[order // each], self._group, to_ranks, from_ranks)
        factors = swap(weights.flatten()[order], self._group, to_ranks, from_ranks)
        results = self._run(rows, self._experts_of(received, from_ranks), factors)
        back = swap(results, self._group, from_ranks, to_ranks)
        # Saves the order after the last exchange, so that a repeated forward repeats them all.
        mine = back[torch.argsort(order)]
        return mine.view(count, each, results.shape[1]).sum(1)

    def take_part(self, features: int, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
        """Compute this rank's experts for the tokens of other ranks, without tokens of its own."""
        device = next(self._module.parameters()).device
        tokens = torch.empty(0, features, dtype=dtypes[0], device=device)
        chosen = torch.empty(0, 1, dtype=torch.int64, device=device)
        self(tokens, chosen, torch.empty(0, 1, dtype=dtypes[1], device=device))

    def take_load(self) -> Tensor | None:
        """Return the load, and count anew."""
        load, self.load = self.load, None
        return load

    def _count(self, chosen: Tensor) -> Tensor:
        """Return the number of rows for each expert, without waiting for the device."""
        flat = chosen.flatten()
        counts = torch.zeros(self.experts, dtype=torch.int64, device=flat.device)
        counts.scatter_add_(0, flat.long(), torch.ones_like(flat, dtype=torch.int64))
        is_repeated = torch._C._current_graph_task_id() != -1
        if self._module.training and torch.is_grad_enabled() and not is_repeated:
            self.load = counts if self.load is None else self.load + counts
        return counts

    def _experts_of(self, received: Tensor, from_ranks: list[int]) -> Tensor:
        """Return the local expert of each received row."""
        own = torch.arange(self.local, device=received.device).repeat(self._group.size)
        if not self._group.has_values:
            return own[:1].expand(sum(from_ranks)).contiguous()
        return own.repeat_interleave(received.flatten(), output_size=sum(from_ranks))

    def _run(self, rows: Tensor, experts: Tensor, factors: Tensor) -> Tensor:
        count = len(rows)
        if not count:
            rows = torch.cat([rows, rows.new_ones(1, *rows.shape[1:])])
            factors = torch.cat([factors, factors.new_ones(1)])
            experts = experts.new_zeros(1)
        with self._own_experts():
            results = self._forward(rows, experts[:, None], factors[:, None])
        if not isinstance(results, Tensor) or results.ndim != 2 or len(results) != len(rows):
            said = tuple(results.shape) if isinstance(results, Tensor) else type(results).__name__
            raise UserCodeError(
                f"the experts {self.name!r} returned {said} for {len(rows)} token(s): expected a "
                "tensor of (tokens, features), each row a sum over the token's experts"
            )
        return results[:count]

    @contextmanager
    def _own_experts(self) -> Iterator[None]:
        """Put this rank's experts and their number in the place of the module's parameters."""
        parameters = self._module._parameters
        whole, module = dict(parameters), self._module
        for key, parameter in whole.items():
            if isinstance(parameter, DTensor):
                own = divide_gradient(parameter.to_local(), self._group.size)
                parameters[key] = own
        for key in self._numbers:
            vars(module)[key] = self.local
        try:
            yield
        finally:
            parameters.update(whole)
            for key in self._numbers:
                vars(module)[key] = self.experts

    def _check(self, tokens: Any, chosen: Any, weights: Any, others: dict[str, Any]) -> None:
        """Raise for arguments that cannot be divided by token.

        Raises:
            UserCodeError: names the module and the shapes.
        """
        given = tokens, chosen, weights
        if all(isinstance(one, Tensor) for one in given):
            is_right = (
                tokens.ndim == chosen.ndim == 2
                and weights.shape == chosen.shape
                and len(tokens) == len(chosen)
                and not chosen.is_floating_point()
                and all(other is None for other in others.values())
            )
            if is_right:
                return
        said = [
            f"{one.dtype} of {tuple(one.shape)}" if isinstance(one, Tensor) else repr(one)
            for one in (*given, *others.values())
        ]
        raise UserCodeError(
            f"the experts {self.name!r} were called with {', '.join(said)}: expert="
            f"{self._group.size} expects tokens of (tokens, features), and the integers of their "
            "experts and the weights of these, both of (tokens, experts of a token), and no more "
            "arguments"
        )


def inner_modules(model: nn.Module) -> set[nn.Module]:
    """Return the modules in divided experts, which read the tokens of all ranks."""
    found = set()
    for part in model.modules():
        forward = vars(part).get("forward")
        # `forward_to_repeat`: under activation checkpointing.
        if isinstance(getattr(forward, "forward_to_repeat", forward), Dispatch):
            found |= {*part.modules()} - {part}
    return found


def _even(rows: int, ranks: int) -> list[int]:
    return [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]
