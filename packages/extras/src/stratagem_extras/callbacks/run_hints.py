"""RunHints: one line on rank 0 for each setting of a run that is probably a mistake."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil, isfinite
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from stratagem.callbacks import Callback, EarlyStopping, ModelCheckpoint
from stratagem.data import CombinedLoader, sampler_of
from stratagem.discovery import nearest_of
from stratagem.errors import format_names
from stratagem.launch import available_cores
from stratagem_extras.callbacks.data_wait import DataWait

if TYPE_CHECKING:
    from stratagem.module import Module
    from stratagem.trainer import SchedulerConfig, Trainer

_LARGER = """
acc accuracy auc auroc auprc ap map f1 fbeta precision recall sensitivity specificity iou jaccard
dice bleu rouge r2 psnr ssim mcc kappa
"""
_SMALLER = "loss error err mse rmse mae mape nll ce bce perplexity ppl wer cer fid eer"
"""Words in the names of metrics that are better if they are larger, or smaller."""
_LENGTHS = ("total_steps", "T_max", "T_0", "total_iters")
"""Attributes of torch's schedulers: the number of steps that their schedule is made for."""
_FEW_STEPS = 10
"""A shorter schedule may be as long as a tiny fit by chance."""
_NEAR = 0.85
"""The least likeness of a monitored name to another, by difflib, to be taken for a slip."""
_MEASURED_EPOCHS = 2
_MANY_STEPS = 100
"""An epoch that ends early is judged after this number of steps."""


class RunHints(Callback):
    """Prints hints about settings that are probably mistakes, each with its remedy.

    A Trainer adds it on rank 0 to each of its runs, so do not pass it yourself. `Trainer.callbacks`
    does not contain it. It prints hints after measurements only, and it neither changes a run nor

    Args:
        say: the function that prints a hint.

    Example:
        >>> from stratagem.callbacks import RunHints
        >>> hints = RunHints(print)
        >>> hints.state_dict()
        {}
    """

    runs_after_metrics = True

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._values: dict[str, tuple[float, float]] = {}
        """The smallest and the largest value of each monitored name."""
        self._said: set[tuple[str, str]] = set()
        """The monitors whose mode a hint was printed about."""
        self._wait: DataWait | None = None
        self._epochs_left = _MEASURED_EPOCHS
        self._gradients: _Gradients | None = None

    # -- once

    def on_load_checkpoint(
        self, trainer: Trainer, module: Module, checkpoint: dict[str, Any]
    ) -> None:
        """Compare the samples of an optimizer step with those of the resumed run."""
        run, saved = trainer.run, _samples_of_saved_step(checkpoint)
        is_constant = len(trainer.options.step_options.accumulation) == 1
        size = None if run.fit_data is None else run.fit_data.loader.batch_size
        if size is None or saved is None or not is_constant or not module.automatic_optimization:
            return
        batches, count = trainer.num_training_batches, run.strategy.ranks.data_split[1]
        if batches in (0, float("inf")):
            return
        accumulated = run.limits.accumulation(0)
        # Both are means over an epoch; the last step may have fewer batches.
        own = size * count * batches / ceil(batches / accumulated)
        if not 2 / 3 < own / saved < 3 / 2:
            self._say(
                f"a step of this run takes about {own:.0f} samples (batch_size={size}, "
                f"accumulate_grad_batches={accumulated}, data-parallel ranks: {count}), and a step "
                f"of the run that it resumes took about {saved:.0f}: choose these arguments so "
                "that the numbers are equal, or adapt the learning rate"
            )

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        """Check the schedulers and the validation loaders, and measure the reads of batches."""
        if module.automatic_optimization:
            for config in trainer.run.schedulers.configs:
                self._check_length(trainer, config)
        self._check_order("val_dataloaders", trainer.val_dataloaders)
        self._check_cores(trainer)
        self._wait = DataWait(trainer.strategy.device)
        trainer.run.profiling.watches["train_dataloader_next"].append(self._reads)

    def _check_length(self, trainer: Trainer, config: SchedulerConfig) -> None:
        """Hint at a scheduler that is made for the steps of a fit, and is stepped by epochs."""
        steps, batches = trainer.estimated_stepping_batches, trainer.num_training_batches
        name, length = _length_of(config.scheduler)
        if config.interval != "epoch" or not name or not isfinite(steps) or not isfinite(batches):
            return
        of_epoch = ceil(batches / trainer.run.limits.accumulation(0))
        if not of_epoch:
            return
        epochs = ceil(steps / of_epoch)
        taken = max(1, epochs // config.frequency)
        is_of_steps = any(abs(length - n) <= n / 10 for n in (steps, batches * epochs))
        if is_of_steps and length >= max(2 * taken, _FEW_STEPS):
            self._say(
                f"{type(config.scheduler).__name__}({name}={length}) is stepped once an epoch, so "
                f"that this fit takes {taken} of its {length} steps: return {{'scheduler': ..., "
                f"'interval': 'step'}} from configure_optimizers, or pass {name}={taken}"
            )

    def _check_cores(self, trainer: Trainer) -> None:
        """Hint at more processes than the cores of the CPU that they share."""
        plan, cores = trainer.plan, available_cores()
        # A cluster may bind each process to cores of its own.
        is_bound = plan.cluster_environment.name != "plain"
        if plan.accelerator.name == "cpu" and not is_bound and len(plan.devices) > 2 * cores:
            self._say(
                f"devices={len(plan.devices)} starts that many processes on {cores} CPU cores, "
                f"which slow each other down: pass devices={cores} or fewer"
            )

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        """Check the order of the loaders of `Trainer.validate`."""
        if trainer.run.stage != "fit":
            self._check_order("val_dataloaders", trainer.val_dataloaders)

    def on_test_start(self, trainer: Trainer, module: Module) -> None:
        """Check the order of the loaders."""
        self._check_order("test_dataloaders", trainer.test_dataloaders)

    def on_predict_start(self, trainer: Trainer, module: Module) -> None:
        """Check the order of the loaders."""
        self._check_order("predict_dataloaders", trainer.predict_dataloaders)

    def _check_order(self, argument: str, loaders: Any) -> None:
        """Hint at a loader for evaluation that shuffles."""
        if any(_shuffles(loader) for loader in _each(loaders)):
            self._say(
                f"{argument}: a loader has shuffle=True, so that samples come in another order "
                "each time, and a limit of batches leaves out others: pass shuffle=False"
            )

    def on_sanity_check_end(self, trainer: Trainer, module: Module) -> None:
        """Hint at misspelled names of monitored values."""
        logged = trainer.run.validation.names_of_check
        for who in _monitors(trainer):
            near = nearest_of(who.monitor, logged, cutoff=_NEAR)
            if near and near != who.monitor and near[0] == who.monitor[0]:
                self._say(
                    f"{who.name}(monitor={who.monitor!r}): the sanity check logged no value of "
                    f"that name, but {near!r}: pass monitor={near!r}, unless training logs "
                    f"{who.monitor!r}"
                )

    # -- measured in the first epochs

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        """Watch which parameters get gradients in the first epoch."""
        if not trainer.plan.capabilities.engine_steps:
            optimizers = trainer.run.require_prepared().optimizers
            self._gradients = _Gradients(module, optimizers, self._say)

    def _reads(self, batches: Iterator[Any]) -> Iterator[Any]:
        return batches if self._wait is None else self._wait.reads(batches)

    def on_train_epoch_end(self, trainer: Trainer, module: Module) -> None:
        """Say what the epoch has shown."""
        self._end_gradients(trainer, module)
        if self._wait is not None:
            self._check_wait(trainer, self._wait)
        if monitors := list(_monitors(trainer)):
            self._check_modes(monitors, trainer.callback_metrics)

    def _end_gradients(self, trainer: Trainer, module: Module) -> None:
        gradients, self._gradients = self._gradients, None
        if gradients is None:
            return
        gradients.detach()
        progress = trainer.run.state
        is_whole = progress.epoch_is_done or gradients.steps >= _MANY_STEPS
        if module.automatic_optimization and is_whole and not trainer.options.fast_dev_run:
            gradients.check_missing()

    def _check_wait(self, trainer: Trainer, wait: DataWait) -> None:
        """Hint at an epoch that has waited for data most of its time."""
        loader = _each(trainer.train_dataloader)[0]
        in_memory = isinstance(getattr(loader, "dataset", None), TensorDataset)
        if wait.is_most and not in_memory:
            self._say(
                f"epoch {trainer.current_epoch} waited {wait.waited:.1f} of {wait.whole:.1f} "
                f"seconds for training batches: {_faster_reads(loader, trainer)}"
            )
        self._epochs_left -= 1
        is_done = wait.is_most or not self._epochs_left
        self._wait = None if is_done else DataWait(trainer.strategy.device)

    def _check_modes(self, monitors: Sequence[_Monitor], logged: Mapping[str, Tensor]) -> None:
        for name in {one.monitor for one in monitors} & logged.keys():
            value = float(logged[name])
            least, most = self._values.get(name, (value, value))
            self._values[name] = min(least, value), max(most, value)
        for one in monitors:
            self._check_mode(one)

    def _check_mode(self, who: _Monitor) -> None:
        """Hint at a mode that prefers the worse of two values, by the metric's name."""
        least, most = self._values.get(who.monitor, (0.0, 0.0))
        better = better_mode(who.monitor)
        key = who.name, who.monitor
        if not least < most or better in (None, who.mode) or key in self._said:
            return
        self._said.add(key)
        kept, passed = (least, most) if who.mode == "min" else (most, least)
        self._say(
            f"{who.name}(monitor={who.monitor!r}, mode={who.mode!r}) takes {kept:.4g} as better "
            f"than {passed:.4g}, and by its name {who.monitor!r} is better if it is "
            f"{'larger' if better == 'max' else 'smaller'}: pass mode={better!r}"
        )

    # -- at the end

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        """Say which monitored values were never logged; their callbacks have had no effect."""
        logged = trainer.callback_metrics
        for who in _monitors(trainer) if trainer.run.state.has_ended_epoch else ():
            if who.monitor not in logged and not trainer.run.monitor.is_pending(who.monitor):
                self._say(
                    f"{who.name}(monitor={who.monitor!r}) had no effect, because no value of that "
                    f"name was logged; there is {format_names(sorted(logged)) or 'nothing'}: log "
                    f"it with self.log({who.monitor!r}, ...), or monitor another value"
                )

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        """Remove what watches the optimizers."""
        if self._gradients is not None:
            self._gradients.detach()
            self._gradients = None


class _Gradients:
    """Watches in one epoch which parameters get gradients, without a wait for the device.

    Args:
        module: the model.
        optimizers: its optimizers.
        say: the function that prints a hint.
    """

    def __init__(
        self, module: nn.Module, optimizers: Sequence[Optimizer], say: Callable[[str], None]
    ) -> None:
        self._say = say
        self._named = dict(module.named_parameters())
        held = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
        own = {id(parameter) for parameter in self._named.values()}
        self._unheld = {n: p for n, p in self._named.items() if id(p) not in held}
        trained = {n: p for n, p in self._named.items() if id(p) in held and p.requires_grad}
        self._trained = len(trained)
        self._without = trained
        """The parameters that have not had a gradient yet."""
        self.steps = 0
        # An optimizer of copies or shards says nothing about the model's own parameters.
        watched = [o for o in optimizers if isinstance(o, Optimizer)] if held <= own else []
        self._handles = [o.register_step_post_hook(self._after_step) for o in watched]

    def _after_step(self, *_: Any) -> None:
        self.steps += 1
        if self.steps == 1:
            self._check_unheld()
        if self._without:
            self._without = {n: p for n, p in self._without.items() if p.grad is None}
        if self.steps == 1:
            self._check_none()

    def _check_unheld(self) -> None:
        names = [n for n, p in self._unheld.items() if p.requires_grad and p.grad is not None]
        if names:
            self._say(
                f"no optimizer holds {len(names)} of {len(self._named)} parameters that get "
                f"gradients ({format_names(names)}), so that they do not train: pass them to the "
                "optimizer in configure_optimizers, or set requires_grad=False"
            )

    def _check_none(self) -> None:
        """Hint at a first step in which no parameter had a gradient."""
        if self._without and len(self._without) == self._trained:
            self._say(
                f"none of the {self._trained} parameters of the optimizer had a gradient in the "
                "first step, so that the model does not train: keep layers of a list or a dict in "
                "nn.ModuleList or nn.ModuleDict, and compute the loss from the model's output "
                "without detach()"
            )

    def check_missing(self) -> None:
        """Hint at the parameters that had no gradient at all."""
        names = [name for name, parameter in self._without.items() if parameter.requires_grad]
        if self.steps and names and len(names) < self._trained:
            self._say(
                f"{len(names)} of the {self._trained} parameters of the optimizer had no gradient "
                f"in the first epoch ({format_names(names)}): let the loss depend on them, or set "
                "requires_grad=False"
            )

    def detach(self) -> None:
        """Remove the hooks of the optimizers."""
        for handle in self._handles:
            handle.remove()


class _Monitor:
    """An object that monitors a value: a callback or a scheduler.

    Attributes:
        name: the name of its class.
        monitor: the name of the value.
        mode: "min" or "max".
    """

    def __init__(self, owner: object, monitor: str, mode: str) -> None:
        self.name = type(owner).__name__
        self.monitor = monitor
        self.mode = mode


def _monitors(trainer: Trainer) -> Iterator[_Monitor]:
    for one in trainer.callbacks:
        if isinstance(one, EarlyStopping):
            yield _Monitor(one, one.monitor, one.mode)
        elif isinstance(one, ModelCheckpoint) and one.save_top_k != 0:
            name = one.monitor
            if name is not None and name not in ("epoch", "step"):
                yield _Monitor(one, name, one.mode)
    for config in trainer.run.schedulers.configs:
        if config.monitor is not None and hasattr(config.scheduler, "mode"):
            yield _Monitor(config.scheduler, config.monitor, config.scheduler.mode)


def better_mode(monitor: str) -> str | None:
    """Return the mode that the name of a metric stands for; None if it is unknown.

    Example:
        >>> from stratagem_extras.callbacks.run_hints import better_mode
        >>> better_mode("val_accuracy"), better_mode("val/loss"), better_mode("accuracy_loss")
        ('max', 'min', None)
    """
    apart = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", monitor)
    words = set(re.split(r"[^a-z0-9]+", apart.lower()))
    words |= {word.rstrip("0123456789") for word in words}  # "acc5", "map50"
    larger, smaller = words & {*_LARGER.split()}, words & {*_SMALLER.split()}
    if bool(larger) == bool(smaller):
        return None
    return "max" if larger else "min"


def _length_of(scheduler: Any) -> tuple[str, int]:
    """Return the name and the value of the argument that says how many steps a scheduler takes."""
    for name in _LENGTHS:
        if isinstance(length := getattr(scheduler, name, None), int):
            return name, length
    # transformers' functions return a LambdaLR of a partial function.
    for function in getattr(scheduler, "lr_lambdas", ()):
        name = "num_training_steps"
        if isinstance(length := getattr(function, "keywords", {}).get(name), int):
            return name, length
    return "", 0


def _samples_of_saved_step(checkpoint: dict[str, Any]) -> float | None:
    """Return the mean number of samples in a step of the run that saved a checkpoint, or None."""
    try:
        ranks, progress = checkpoint["ranks"], checkpoint["progress"]
        loader = (ranks["first"] if isinstance(ranks, dict) else ranks[0])["loader"]
        if parts := loader.get("parts"):
            loader = parts[0]
        size, count, steps = loader["batch_size"], loader["shards"], progress["global_step"]
        batches = progress.get("batches_before", 0) + progress["batches"]
        samples = size * count * batches / steps
    except (ArithmeticError, AttributeError, LookupError, TypeError):
        return None  # no checkpoint, or the next restored value names the wrong entry
    return samples if isinstance(samples, float) and samples > 0 else None


def _each(loaders: Any) -> list[Any]:
    """Return a list of the loaders in a loader, a list of loaders or a CombinedLoader."""
    if isinstance(loaders, list):
        return [one for loader in loaders for one in _each(loader)]
    return loaders.flattened if isinstance(loaders, CombinedLoader) else [loaders]


def _shuffles(loader: Any) -> bool:
    """Return whether a loader has the sampler that `shuffle=True` makes."""
    if not isinstance(loader, DataLoader):
        return False
    sampler = sampler_of(loader)
    # With several ranks, each reads its part through a sampler around the user's.
    sampler = getattr(sampler, "sampler", sampler)
    whole = getattr(loader.dataset, "__len__", None)
    return type(sampler) is RandomSampler and whole is not None and len(sampler) == whole()


def _faster_reads(loader: Any, trainer: Trainer) -> str:
    """Return the remedy for a loader that is too slow."""
    workers = getattr(loader, "num_workers", None)
    if workers is None:
        return "read them ahead in other processes, as DataLoader(num_workers=...) does"
    cores = available_cores() // len(trainer.plan.devices)
    if workers == 0:
        return (
            f"DataLoader(num_workers={max(1, min(cores, 8))}, persistent_workers=True) reads them "
            "meanwhile"
        )
    return f"pass more than num_workers={workers}, or let the dataset do less for each sample"
