"""Which kind of step a fit takes: decided once, so that the usual one pays for no other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem.trainer.step.batch_feed import refuse_dataloader_iter
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
    """Return the step of a fit.

    One graph if `compile="step"`, a HookedStep if the Module overrides a part of the step, and a
    Step otherwise, which is watched if the strategy takes its steps itself.

    Raises:
        UserCodeError: `training_step` takes `dataloader_iter`.
    """
    refuse_dataloader_iter(run.module.training_step)
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
