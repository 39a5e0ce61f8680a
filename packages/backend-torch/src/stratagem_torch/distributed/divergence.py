"""DivergenceCheck: compares ranks that should be identical."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from stratagem.errors import DivergenceError, with_explanation

if TYPE_CHECKING:
    from stratagem.strategies import Ranks

_COMPARED = (
    "the optimizer step",
    "whether training_step has a loss",
    "how many whole parameters they hold",
)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 2**18


class DivergenceCheck:
    """Compares the step, the presence of a loss and the parameters of all ranks.

    A check reads each parameter once (about 0.7 s for 100 million parameters on one core), and
    gathers four numbers from every rank. Only if these differ, it finds the names of the differing
    parameters. Sharded parameters differ by design and are left out.

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
        self._parameters = [
            (name, parameter)
            for name, parameter in module.named_parameters()
            if type(parameter.data) is Tensor
        ]

    def check(self, step: int, has_loss: bool) -> None:
        """Compare the ranks after an optimizer step, if a comparison is due.

        Raises:
            DivergenceError: if ranks differ. The error names the ranks and the difference.
        """
        if step % self._every:
            return
        hashes = torch.stack([_hash(p) for _, p in self._parameters]) if self._parameters else None
        # The position counts: the same numbers in another parameter are something else.
        together = 0 if hashes is None else int((hashes * _weights(len(hashes))).sum())
        count = len(self._parameters)
        own = torch.tensor([step, int(has_loss), count, together], dtype=torch.int64)
        of_all = self._ranks.all_gather(own)
        if bool((of_all == of_all[0]).all()):
            return
        raise DivergenceError(with_explanation(self._difference(of_all, hashes), "divergence"))

    def _difference(self, of_all: Tensor, hashes: Tensor | None) -> str:
        advice = (
            "Ranks must take the same steps from the same start: look for randomness that shapes "
            "the model, for changes to parameters outside of the optimizer, and for branches that "
            "depend on the rank"
        )
        # The number of parameters too, since ranks with more of them would exchange more hashes.
        for column, what in enumerate(_COMPARED):
            if len(set(of_all[:, column].tolist())) > 1:
                values = ", ".join(
                    f"rank {r}: {v}" for r, v in enumerate(of_all[:, column].tolist())
                )
                return f"ranks differ in {what} ({values}). {advice}"
        assert hashes is not None
        all_hashes = self._ranks.all_gather(hashes)
        differing = {
            rank: [
                self._parameters[index][0]
                for index in (all_hashes[rank] != all_hashes[0]).nonzero().flatten().tolist()
            ]
            for rank in range(1, len(all_hashes))
        }
        parts = [
            f"rank {rank} in {names[0]}" + (f" and {len(names) - 1} more" if names[1:] else "")
            for rank, names in differing.items()
            if names
        ]
        return (
            f"after step {int(of_all[0, 0])} parameters differ from those of rank 0: "
            f"{'; '.join(parts)}. {advice}"
        )


def _hash(parameter: nn.Parameter) -> Tensor:
    """Return a hash of a parameter's bits and their places, of shape () and type int64."""
    bits = torch.view_as_real(parameter) if parameter.is_complex() else parameter
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
