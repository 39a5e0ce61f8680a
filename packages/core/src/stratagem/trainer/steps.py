"""Which kind of step a fit takes: decided once, so that the usual one pays for no other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem.trainer.loaders.dataloader_iter import ReadingStep, reads_itself
from stratagem.trainer.step.contract_check import takes_own_steps
from stratagem.trainer.step.hooked_step import HookedStep, needs_closure, step_hooks_of
from stratagem.trainer.step.step import Step

if TYPE_CHECKING:
    from stratagem.interfaces.prepared_model import PreparedModel
    from stratagem.plan.step_options import GradientClip
    from stratagem.trainer.run import Run


class _WatchedStep(Step):
    """A step under a strategy that takes its steps itself: notes whether it reads how to clip."""

    @property
    def clip(self) -> GradientClip | None:
        """How gradients are to be clipped."""
        self._check.clip_was_read = True
        return self._clip

    @clip.setter
    def clip(self, value: GradientClip | None) -> None:
        self._clip = value


def make_step(run: Run, prepared: PreparedModel) -> Step:
    """Return the step of a fit: one graph if that was asked for; else watched where needed.

    One with hooks where the Module has its own, or that reads its batches itself.
    """
    if reads_itself(run.module.training_step):
        return ReadingStep(run, prepared)
    compilation = run.trainer.step_options.compilation
    if compilation is not None and compilation.whole_step and run.optimizers:
        # It is a Step itself, and only those who ask for it import what makes graphs.
        from stratagem.trainer.step.graph_step import GraphStep

        return GraphStep(run, prepared, compilation)
    own = step_hooks_of(run.module)
    if not run.module.automatic_optimization:
        if "backward" in own:
            prepared.run_backward = run.module.backward
    elif run.optimizers and (own or any(map(needs_closure, prepared.optimizers))):
        return HookedStep(run, prepared)
    return (_WatchedStep if takes_own_steps(type(run.strategy)) else Step)(run, prepared)
