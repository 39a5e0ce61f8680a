"""DivergenceCheck: compares ranks that should be identical."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stratagem.errors import DivergenceError, with_explanation

if TYPE_CHECKING:
    from stratagem.strategies import Ranks

_COMPARED = {"step": "the optimizer step", "has_loss": "whether training_step has a loss"}
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 2**18
_ADVICE = (
    "Ranks must take the same steps from the same start: look for randomness that shapes "
    "the model, for changes to parameters outside of the optimizer, and for branches that "
    "depend on the rank"
)


class DivergenceCheck:
    """Compares the step, the presence of a loss and the parameters of all ranks.

    A check reads each parameter once (about 0.7 s for 100 million parameters on one core), and
    gathers a few numbers from every rank. Only if these differ, it finds the names of the differing
    parameters.

    A parameter that is a plain tensor is compared within `Ranks.replica_groups`. Of a sharded
    parameter (a DTensor), a shard is compared between the ranks that hold a copy of it: those at
    the same index along the dimensions of the device mesh that divide it.

    Args:
        ranks: the ranks to compare.
        module: the module with the parameters.
        every_n_steps: the number of optimizer steps between two comparisons.

    Example:
        >>> from torch import nn
        >>> from stratagem import Lite
        >>> from stratagem.strategies import DivergenceCheck
        >>> ranks = Lite(accelerator="cpu").strategy.ranks
        >>> DivergenceCheck(ranks, nn.Linear(2, 2), every_n_steps=1).check(1, True) is None
        True
    """

    def __init__(self, ranks: Ranks, module: nn.Module, every_n_steps: int) -> None:
        self._ranks = ranks
        self._every = every_n_steps
        self._parameters: dict[str, list[tuple[str, nn.Parameter]]] = {}
        """The parameters of each shard; "" for plain tensors."""
        for name, parameter in module.named_parameters():
            if type(parameter.data) in (Tensor, DTensor):
                self._parameters.setdefault(_shard(parameter), []).append((name, parameter))

    def check(self, step: int, has_loss: bool) -> None:
        """Compare the ranks after an optimizer step, if a comparison is due.

        Raises:
            DivergenceError: if ranks differ. The error names the ranks and the difference.
        """
        if step % self._every:
            return
        hashes = {
            shard: torch.stack([_hash(parameter) for _, parameter in parameters])
            for shard, parameters in self._parameters.items()
        }
        own = {
            "step": step,
            "has_loss": int(has_loss),
            # The position counts: the same numbers in another parameter are something else.
            "hashes": {
                shard: [len(each), int((each * _weights(len(each))).sum())]
                for shard, each in hashes.items()
            },
        }
        of_all = self._ranks.gather_objects(own)
        everyone = range(len(of_all))
        for key, what in _COMPARED.items():
            _check_equal(what, {rank: of_all[rank][key] for rank in everyone})
        for group in self._ranks.replica_groups:
            counts = {rank: sum(c for c, _ in of_all[rank]["hashes"].values()) for rank in group}
            _check_equal("how many parameters they hold", counts)
        if any(self._differences([of_rank["hashes"] for of_rank in of_all])):
            raise self._error(step, hashes)

    def _differences(self, of_ranks: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, int, str]]:
        """Yield each rank whose value of a key is another than that of the first rank with it."""
        for group in self._ranks.replica_groups:
            first: dict[str, int] = {}
            for rank in group:
                for key, value in of_ranks[rank].items():
                    reference = first.setdefault(key, rank)
                    if of_ranks[reference][key] != value:
                        yield reference, rank, key

    def _error(self, step: int, hashes: Mapping[str, Tensor]) -> DivergenceError:
        """Return the error that names the differing parameters; called on every rank."""
        own = {
            f"{shard}|{name}": value
            for shard, parameters in self._parameters.items()
            for (name, _), value in zip(parameters, hashes[shard].tolist(), strict=True)
        }
        found: dict[tuple[int, int], list[str]] = {}
        for reference, rank, key in self._differences(self._ranks.gather_objects(own)):
            found.setdefault((reference, rank), []).append(key.partition("|")[2])
        parts: dict[int, list[str]] = {}
        for (reference, rank), names in found.items():
            more = f" and {len(names) - 1} more" if names[1:] else ""
            parts.setdefault(reference, []).append(f"{self._named(rank)} in {names[0]}{more}")
        told = "; ".join(
            f"those of {self._named(reference)}: {'; '.join(each)}"
            for reference, each in parts.items()
        )
        if not told:
            told = "those of the other ranks: they have other names"
        return _divergence(f"after step {step} parameters differ from {told}. {_ADVICE}")

    def _named(self, rank: int) -> str:
        place = self._ranks.place([rank])
        return f"rank {rank} ({place})" if place else f"rank {rank}"


def _check_equal(what: str, of_ranks: Mapping[int, int]) -> None:
    """Raise an error if a number is not the same on all of these ranks."""
    if len(set(of_ranks.values())) > 1:
        values = ", ".join(f"rank {rank}: {value}" for rank, value in of_ranks.items())
        raise _divergence(f"ranks differ in {what} ({values}). {_ADVICE}")


def _divergence(text: str) -> DivergenceError:
    return DivergenceError(with_explanation(text, "divergence"))


def _shard(parameter: nn.Parameter) -> str:
    """Return the shard of a parameter that this rank holds; the same text on ranks with a copy.

    It has the coordinates along the dimensions of the device mesh that divide the parameter. A mesh
    without names may be another one on other ranks, so that its ranks are named as well.
    """
    if not isinstance(parameter, DTensor):
        return ""
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or [f"{mesh.mesh.tolist()}[{dim}]" for dim in range(mesh.ndim)]
    placed = zip(names, mesh.get_coordinate() or (), parameter.placements, strict=False)
    return ",".join(f"{name}={at}" for name, at, by in placed if not by.is_replicate())


def _hash(parameter: nn.Parameter) -> Tensor:
    """Return a hash of the bits of a parameter, or of its shard, and their places: int64, ()."""
    held = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    bits = torch.view_as_real(held) if held.is_complex() else held
    bits = bits.detach().contiguous().view(_INTEGERS[bits.element_size()]).flatten()
    total = torch.zeros((), dtype=torch.int64)
    # By pieces, since the product of each has 8 bytes an element.
    for number, piece in enumerate(torch.split(bits, _PIECE), 1):
        weights = _weights(len(piece)).to(piece.device)
        total += number * (piece.to(torch.int64) * weights).sum().cpu()
    return total


@lru_cache
def _weights(count: int) -> Tensor:
    # Odd numbers of 62 bits, so that a product loses no factor; it may overflow.
    generator = torch.Generator().manual_seed(count)
    return torch.randint(1, 2**62, (count,), generator=generator) | 1
