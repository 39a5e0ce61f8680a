"""Checks of the user's objects and folders, before a run uses them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from stratagem.callbacks import Callback
from stratagem.discovery.registry import nearest_of
from stratagem.errors import ConfigurationError, UserCodeError
from stratagem.interfaces.contract_checks import misspelled_methods
from stratagem.interfaces.strategy import Strategy
from stratagem.launch.process import are_hints_on, print_hint, print_hint_once
from stratagem.launch.rank_zero import rank_zero_warn
from stratagem.module.hyperparameters import HyperParametersMixin, savable
from stratagem.module.module import Module
from stratagem.plan.plan import RunPlan, supports
from stratagem.plan.step_options import StepOptions
from stratagem.runtime.runtime import Runtime, launch_arguments
from stratagem.storage import paths
from stratagem.trainer.context import RunState

if TYPE_CHECKING:
    from stratagem.interfaces.ranks import Ranks
    from stratagem.trainer.context import StepContext
    from stratagem.trainer.job import Job
    from stratagem.trainer.step.step import Step
    from stratagem.trainer.trainer import Trainer


# Methods of Lightning that Stratagem does not call, by stage, and advice for each.
_MODEL = {"configure_sharded_model": "rename it to configure_model"}
_EPOCH_END = "rename it to on_{}_epoch_end, and keep outputs in an attribute"
_VALIDATION = {"validation_epoch_end": _EPOCH_END.format("validation")}
_UNCALLED = {
    "fit": {
        "training_epoch_end": _EPOCH_END.format("train"),
        "training_step_end": "put it into training_step",
        **_VALIDATION,
        **_MODEL,
    },
    "validate": _VALIDATION | _MODEL,
    "test": {"test_epoch_end": _EPOCH_END.format("test"), **_MODEL},
    "predict": _MODEL,
}
_NEEDED = {
    "fit": ("training_step", "configure_optimizers"),
    "validate": ("validation_step",),
    "test": ("test_step",),
    "predict": (),
}


def check_not_running(state: RunState, stage: str) -> None:
    """Raise if a callback or a hook starts a run within another run of the same Trainer.

    The two runs would share progress, metrics and loaders, and the inner run would corrupt the
    outer run.

    Args:
        state: the state of the Trainer.
        stage: the requested run: "fit", "validate", "test" or "predict".

    Raises:
        ConfigurationError: if the Trainer is running.
    """
    if state.status == "running":
        raise ConfigurationError(
            f"{stage}() was called while {state.stage}() of the same Trainer is running: call it "
            f"after {state.stage}() has returned; to validate while training, pass val_dataloaders "
            "to fit() and choose val_check_interval; for another model, make another Trainer"
        )


def _is_defined(model: Module, name: str) -> bool:
    return hasattr(model, name) and (not hasattr(Module, name) or model.defines(name))


def check_module(job: Job, *, makes_optimizers: bool = False) -> None:
    """Check that a model has the methods of its stage.

    Args:
        job: the user's request.
        makes_optimizers: whether the strategy creates the optimizer if the model does not.

    Raises:
        UserCodeError: if the model is not a Module, lacks a method, or defines a method that
            Stratagem would not call.
    """
    model: Any = job.model
    stage = job.stage
    if not isinstance(model, Module):
        what, advice = type(model).__name__, "pass an instance of a subclass of Module"
        if isinstance(model, type):
            what, advice = f"the class {model.__name__}", f"pass an instance: {model.__name__}()"
        elif isinstance(job.loaders, Module):
            advice = f"the arguments are swapped: call trainer.{stage}(model, data)"
        elif isinstance(model, nn.Module):
            advice = (
                "a plain nn.Module is trained with Lite, or wrapped in a Module with training_step "
                "and configure_optimizers"
            )
        raise UserCodeError(
            f"trainer.{stage}() expected a stratagem.Module as model, received {what}: {advice}"
        )
    if "_metrics" not in vars(model):
        raise UserCodeError(
            f"{type(model).__name__}.__init__ does not call super().__init__(); call it first"
        )
    remedy_of = _UNCALLED[stage]
    if uncalled := sorted(name for name in remedy_of if _is_defined(model, name)):
        remedies = (f"for {name}, {remedy_of[name]}" for name in uncalled)
        raise UserCodeError(
            f"{type(model).__name__} defines {', '.join(uncalled)}, which Stratagem does not "
            f"call, so training would differ silently: {'; '.join(remedies)}"
        )
    missing = [method for method in _NEEDED[stage] if not model.defines(method)]
    if makes_optimizers and "configure_optimizers" in missing:
        missing.remove("configure_optimizers")
    if missing:
        added = [name for name in dir(type(model)) if not hasattr(Module, name)]
        near = {name: nearest_of(name, added) for name in missing}
        raise UserCodeError(
            f"{type(model).__name__} does not define {' and '.join(missing)}, which "
            f"trainer.{stage} needs"
            + "".join(f"; rename {own} to {name}" for name, own in near.items() if own)
        )
    taken = signature(model.training_step).parameters if stage == "fit" else {}
    if "optimizer_idx" in taken and taken["optimizer_idx"].default is Parameter.empty:
        raise UserCodeError(
            f"{type(model).__name__}.training_step takes optimizer_idx, which is not passed: for "
            "several optimizers set self.automatic_optimization = False and step those of "
            "self.optimizers() in training_step; for one, remove the argument"
        )


def log_hyperparameters(trainer: Trainer, *owners: HyperParametersMixin | None) -> None:
    """Send the hyperparameters of the model and the DataModule to the loggers, on rank 0.

    Args:
        trainer: the Trainer, with the loggers.
        owners: the model and the DataModule, if any.

    Raises:
        UserCodeError: if both have a hyperparameter of the same name with different values.
    """
    holders = [one for one in owners if one is not None]
    merged: dict[str, Any] = {}
    for holder in holders:
        found = holder.hparams_initial
        if twice := [k for k in found if k in merged and not _same(found[k], merged[k])]:
            raise UserCodeError(
                f"the model and the DataModule both have the hyperparameter(s) {', '.join(twice)},"
                f" with different values ({merged[twice[0]]!r} and {found[twice[0]]!r}), so that "
                "loggers cannot be given both: rename one, or call "
                "save_hyperparameters(logger=False) in one of the two"
            )
        merged.update(found)
    if not trainer.is_global_zero:
        return
    for holder in holders:
        _warn_of_unsavable(holder)
    if merged and trainer.options.enable_autolog_hparams:
        for logger in trainer.loggers:
            logger.log_hyperparams(merged)


def _same(one: Any, other: Any) -> bool:
    """Return whether two values are equal; True if they cannot be compared."""
    try:
        return one is other or bool(one == other)
    except Exception:  # arrays and tensors of several elements
        return True


def _warn_of_unsavable(holder: HyperParametersMixin) -> None:
    """Warn about hyperparameters that checkpoints leave out, before training."""
    reasons = savable(holder.hparams)[1]
    if reasons:
        name, reason = next(iter(reasons.items()))
        warnings.warn(
            f"checkpoints leave out the hyperparameter(s) {', '.join(reasons)} of "
            f"{type(holder).__name__}, which could not be loaded without executing code ({name}: "
            f"{reason}): pass them to load_from_checkpoint again. "
            f"save_hyperparameters(ignore={list(reasons)!r}) says that this is meant",
            stacklevel=3,
        )


def warn_on_refit(trainer: Trainer, before: Job | None, job: Job) -> None:
    """Print on rank 0 that a second fit of a model without a checkpoint starts from step 0.

    In Lightning, a second fit continues from the end of the first, where its limit is reached.

    Args:
        trainer: the Trainer.
        before: the request of the previous run.
        job: the request of the new fit.
    """
    again = before is not None and before.stage == "fit" and before.model is job.model
    if again and job.ckpt_path is None and trainer.is_global_zero:
        # Not a warning: a second fit is often intended, and if warnings are errors, only one rank
        # would raise it.
        print(
            "stratagem: fit() of the same model again: epochs and steps are counted from 0 and "
            "optimizers are made anew, while the weights are those that the last fit has left. To "
            "go on with that one, pass ckpt_path='last' and a larger max_epochs",
            file=sys.stderr,
            flush=True,
        )


def give_hints(strategy: Strategy) -> None:
    """Print the accelerator's hints on rank 0, each once per process."""
    if not strategy.ranks.is_global_zero:
        return
    for hint in strategy.accelerator.hints(strategy.device, strategy.precision.dtype):
        print_hint_once(hint)


def hints_of_run(trainer: Trainer) -> list[Callback]:
    """Return the callback of `stratagem-extras` that measures and prints hints, on rank 0."""
    if not (trainer.is_global_zero and trainer._gives_hints and are_hints_on()):
        return []
    try:
        from stratagem.callbacks import RunHints
    except ImportError:
        return []
    return [RunHints(print_hint_once)]


def hint_at_mistakes(trainer: Trainer, job: Job) -> None:
    """Print hints about probable mistakes in a fit, on rank 0."""
    if not trainer.is_global_zero:
        return
    if isinstance(job.loaders, Dataset):
        print_hint(
            f"a {type(job.loaders).__name__} was passed instead of a loader, so that each "
            "sample is a batch: pass DataLoader(dataset, batch_size=...)"
        )
    for owner in (job.model, job.datamodule, *trainer.callbacks):
        for hint in misspelled_methods(type(owner)):
            print_hint(hint)


def hint_at_log_interval(trainer: Trainer, batches: float) -> None:
    """Print a hint on rank 0 if `log_every_n_steps` exceeds the batches of an epoch.

    The hint is printed once per process.

    Args:
        trainer: the Trainer of the fit.
        batches: the number of this rank's batches in an epoch; infinity if unknown.
    """
    every = trainer.options.log_every_n_steps
    if not trainer.loggers or trainer.options.fast_dev_run or not trainer.is_global_zero:
        return
    if every > batches > 0 and trainer.policy.hints_at_log_interval:
        print_hint_once(
            f"loggers are given the values of every {every}th step (log_every_n_steps), and an "
            f"epoch has {batches:.0f} training batches: pass a smaller number to see more of them"
        )


def check_manual_optimization(
    module: Module, plan: RunPlan, strategy: Strategy, options: StepOptions
) -> None:
    """Check that the strategy and the options support a Module's manual optimization.

    Raises:
        ConfigurationError: if the strategy does not support it, or if an option would have no
            effect.
    """
    if module.automatic_optimization:
        return
    name, problem = plan.strategy.name, ""
    if not plan.capabilities.manual_backward:
        advice = "use automatic optimization, and one optimizer with parameter groups"
        problem = f"and the strategy {name!r} runs backward itself: {advice}"
    elif not plan.capabilities.backward_in_forward:
        problem = (
            f"and under {name!r} a backward within training_step has no effect: gradients are "
            "reduced after the model's forward. Use automatic optimization, strategy='ddp', or a "
            "loop of your own with Lite"
        )
    elif options.clip is not None or options.accumulation.get(0) != 1:
        problem = (
            "so gradient_clip_val and accumulate_grad_batches do nothing: clip and accumulate in "
            "training_step"
        )
    elif strategy.join_uneven_inputs:
        problem = (
            "so the Trainer cannot weight its gradients as join_uneven_inputs=True needs: give "
            "every rank as many batches"
        )
    if problem:
        raise ConfigurationError(
            f"{type(module).__name__} has automatic_optimization = False, {problem}"
        )


def check_parameters(optimizers: Sequence[Optimizer], module: nn.Module) -> None:
    """Check that all parameters of the optimizers belong to the model.

    Raises:
        UserCodeError: if an optimizer holds parameters that the model does not have.
    """
    own = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        gone = sum(id(p) not in own for p in held)
        if gone:
            raise UserCodeError(
                f"{type(module).__name__}.configure_optimizers() returned a "
                f"{type(optimizer).__name__} that holds {gone} of {len(held)} parameters that "
                "the model does not have (any more), so its steps would not train the model: "
                "make it in configure_optimizers(), from self.parameters()"
            )


class EpochChecks:
    """Checks the parameters at the start of each epoch, and the steps at its end.

    Args:
        context: the objects of the fit.
        step: the optimizer step.
    """

    def __init__(self, context: StepContext, step: Step) -> None:
        self._context, self._step, self._state = context, step, context.state
        self._steps = context.module.automatic_optimization and bool(context.optimizers)
        self._is_alone = context.strategy.ranks.world_size == 1
        # A parameter may get another name later, for example by pruning.
        named = context.module.named_parameters()
        self._known = {each for name, p in named for each in (name, id(p))}
        self._began: tuple[int, int] | None = None
        """The batches and the optimizer steps before this epoch's first step in this run."""

    def begin_epoch(self) -> None:
        """Raise if no parameter trains, or if some are unknown to the strategy.

        Gradients of parameters that were added after preparation would not be reduced over ranks.

        Raises:
            UserCodeError: names the parameter.
        """
        module = self._context.module
        self._began = self._state.batches, self._state.global_step
        # Those of another rank may train.
        can_train = self._context.trainer.plan.capabilities.parameters == "divided"
        can_train = can_train or any(each.requires_grad for each in module.parameters())
        if self._steps and not can_train:
            raise UserCodeError(
                f"no parameter of {type(module).__name__} trains: requires_grad is False for each. "
                "Leave some to train. Precisions such as 'nf4' freeze the layers that they "
                "quantise: add an adapter, name the layers to train in ignore_modules, or freeze "
                "the others before, so that only those are quantised"
            )
        for name, parameter in () if self._is_alone else module.named_parameters():
            if name not in self._known and id(parameter) not in self._known:
                raise UserCodeError(
                    f"the parameter {name!r} was added after the strategy "
                    f"{self._context.trainer.plan.strategy.name!r} prepared the model, so that its "
                    "gradients would stay on each rank: add it in __init__ or configure_model"
                )

    def end_epoch(self) -> None:
        """Warn after an epoch without an optimizer step; raise if the fit would never end.

        Raises:
            UserCodeError: if `training_step` has no loss, and only `max_steps` limits the fit.
        """
        context, began = self._context, self._began
        if began is None or not context.module.automatic_optimization:
            return
        options, count = context.trainer.options, self._state.batches - began[0]
        if self._state.global_step != began[1] or count == 0:
            return
        if self._step.has_loss:
            rank_zero_warn(
                f"the gradients of all steps in an epoch of {count} batches overflowed, so loss "
                "scaling skipped the steps and nothing was optimized. The scale falls with each; "
                "if it does not help, look for NaN with detect_anomaly=True, or pass "
                "precision='bf16-mixed'"
            )
            return
        name = type(context.module).__name__
        why = f"{name}.training_step returned None for all {count} batches of an epoch"
        if not context.optimizers:
            why = f"{name}.configure_optimizers() returned None"
        if options.max_epochs == -1 and options.max_time is None and options.max_steps != -1:
            raise UserCodeError(
                f"{why}, and only max_steps={options.max_steps}, which counts optimizer steps, "
                "would end this fit: return a loss and an optimizer, or pass max_epochs"
            )
        if context.optimizers:
            rank_zero_warn(f"{why}, so nothing was optimized: end the method with `return loss`")


def check_launch_arguments(plan: RunPlan, options: StepOptions) -> None:
    """Check a Trainer's arguments against the file of `stratagem run --accelerate-config`.

    Raises:
        ConfigurationError: if the file and the Trainer's arguments differ.
    """
    own = {
        "accelerator": plan.accelerator.name,
        "precision": plan.precision.name,
        "accumulate_grad_batches": options.accumulation.get(0),
    }
    for name, value in launch_arguments().items():
        if name in own and own[name] != value:
            raise ConfigurationError(
                f"the file of --accelerate-config means {name}={value!r}, which reaches Lite only, "
                f"and this Trainer has {name}={own[name]!r}: pass {name}={value!r} to the Trainer, "
                "or start the script with --devices instead"
            )


def check_divergence_detection(plan: RunPlan, ranks: Ranks, every_n_steps: int) -> None:
    """Check that the strategy supports `detect_divergence`; 0 means off.

    Ranks with other parameters can be compared if their axes say which ranks hold the same.

    Raises:
        ConfigurationError: if parameters differ between ranks under the strategy.
    """
    parameters = plan.capabilities.parameters
    if every_n_steps and parameters != "same" and not (parameters == "divided" and ranks.axes):
        raise ConfigurationError(
            f"detect_divergence={every_n_steps!r} compares the parameters of all ranks, "
            f"which the strategy {plan.strategy.name!r} lets differ (parameters="
            f"{parameters!r} in its capabilities): leave detect_divergence out"
        )
    if every_n_steps and plan.world_size > 1:
        from stratagem.strategies import DivergenceCheck  # noqa: F401 - or what to install


def check_folders_before_launch(trainer: Trainer, runtime: Runtime, stage: str) -> None:
    """Check the folders of a run before the launch, if all ranks will run on this machine.

    Raises:
        ConfigurationError: if a folder cannot be created or written to. No process was started
            then.
    """
    plan = trainer.plan
    is_elsewhere = plan.num_nodes > 1 or supports(plan.launcher, "devices_elsewhere")
    if runtime.is_launched or is_elsewhere or not supports(plan.launcher, "starts_ranks"):
        return
    if trainer.is_global_zero and (problem := _find_unwritable(trainer, stage)):
        raise ConfigurationError(problem)


def check_folders_on_ranks(trainer: Trainer, stage: str) -> None:
    """Check the folders of a run on rank 0, which writes to them; called on every rank.

    Raises:
        ConfigurationError: on every rank, if a folder cannot be created or written to.
    """
    found = _find_unwritable(trainer, stage) if trainer.is_global_zero else ""
    if problem := trainer.ranks.broadcast(found):
        raise ConfigurationError(problem)


def _find_unwritable(trainer: Trainer, stage: str) -> str:
    """Return an error message for the first folder that is not writable, or ""."""
    for folder, argument in _folders(trainer, stage):
        if paths.is_url(folder):
            continue  # the first save contacts its server
        is_root = paths.to_location(folder) == paths.to_location(trainer.options.default_root_dir)
        what = "default_root_dir" if is_root else argument
        try:
            paths.try_folder(folder)
        except OSError as error:
            return (
                f"{what}={str(folder)!r} is no folder that can be written to "
                f"({type(error).__name__}: {error}): pass one that can, or make room or rights "
                "for it" + ("; None means the current folder" if what == "default_root_dir" else "")
            )
    return ""


def _folders(trainer: Trainer, stage: str) -> Iterator[tuple[paths.Location, str]]:
    """Yield the folders that a run writes to, each with the argument that names it."""
    if stage == "predict":
        return
    for logger in trainer.loggers:
        if logger.save_dir is not None:
            yield paths.to_location(logger.save_dir), f"{type(logger).__name__}: save_dir"
    saves = stage == "fit" and not trainer.options.fast_dev_run
    for saver in trainer.checkpoint_callbacks if saves else ():
        if saver.dirpath is not None:
            yield saver.dirpath, f"{type(saver).__name__}: dirpath"
        elif not trainer.loggers:  # with loggers, checkpoints go next to the logs
            yield paths.to_location(trainer.options.default_root_dir), "default_root_dir"
