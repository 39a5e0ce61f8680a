"""GradientAccumulationScheduler: with the checks that Lightning has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem.launch import rank_zero_warn
from stratagem.trainer import is_users
from stratagem_extras.callbacks import gradient_accumulation
from stratagem_lightning.api.utilities.exceptions import UserRuntimeError

if TYPE_CHECKING:
    from stratagem.module import Module
    from stratagem.trainer import Trainer


class GradientAccumulationScheduler(gradient_accumulation.GradientAccumulationScheduler):
    """Stratagem's; warns of hooks that are not called on every batch.

    Args:
        scheduling: as there.

    Example:
        >>> from stratagem_lightning.pytorch.callbacks import GradientAccumulationScheduler
        >>> GradientAccumulationScheduler({4: 2}).get_accumulate_grad_batches(5)
        2
    """

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        """Look at the model's hooks.

        Raises:
            UserRuntimeError: the model steps its optimizers itself.
        """
        if not module.automatic_optimization:
            raise UserRuntimeError(
                "Automatic gradient accumulation and the `GradientAccumulationScheduler` are not "
                f"for manual optimization, which {type(module).__name__} has: leave the callback "
                "out, or set automatic_optimization = True"
            )
        hooks = ("optimizer_step", "optimizer_zero_grad")
        found = [name for name in hooks if is_users(module, name)]
        if found and self.going_to_accumulate_grad_batches():
            rank_zero_warn(
                f"{type(module).__name__} overrides {' and '.join(found)}: with gradient "
                "accumulation, the hooks will not be called on every batch, but for every step"
            )
