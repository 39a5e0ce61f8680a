"""Run: one fit, validate, test or predict on this rank, and everything that exists only for it."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from stratagem.data.resumable import Resumable
from stratagem.data.sharding import UNKNOWN, set_epoch
from stratagem.datamodule import DataModule
from stratagem.errors import ConfigurationError, UserCodeError
from stratagem.interfaces.step_module import StepModule
from stratagem.interfaces.strategy import PreparedModel
from stratagem.lite.optimizer import wrap_optimizer
from stratagem.module import Module
from stratagem.trainer import evaluation, fit_loop, loaders, options
from stratagem.trainer.divergence import DivergenceCheck
from stratagem.trainer.hooks import Hooks
from stratagem.trainer.interruption import Interruption
from stratagem.trainer.loaders import LimitedLoader
from stratagem.trainer.metrics import Metrics
from stratagem.trainer.optimizers import SchedulerConfig, configure
from stratagem.trainer.progress import Progress
from stratagem.trainer.resume.checkpoint import read_checkpoint, restore_model, restore_training
from stratagem.trainer.resume.find import find_checkpoint
from stratagem.trainer.resume.rank_state import RankState
from stratagem.trainer.resume.restarts import Restarts
from stratagem.trainer.step import Step

if TYPE_CHECKING:
    from torch import Tensor

    from stratagem.trainer.trainer import Trainer


class Run:
    """One run of a Trainer on this rank.

    Args:
        trainer: holds the options, the callbacks, and what outlives a run.
        stage: "fit", "validate", "test" or "predict".
        module: the model.
        datamodule: its data, or None.
        before: the run before, whose prepared model is used again if it is the same model.
    """

    def __init__(
        self,
        trainer: Trainer,
        stage: str,
        module: Module,
        datamodule: DataModule | None,
        before: Run | None,
    ) -> None:
        self.trainer = trainer
        self.stage = stage
        self.module = module
        self.datamodule = datamodule
        self.strategy = trainer.strategy
        self.progress: Progress = trainer.progress
        same = before is not None and before.module is module
        self.prepared: PreparedModel | None = (
            before.prepared if before is not None and same else None
        )
        self.optimizers: list[Any] = before.optimizers if before is not None and same else []
        """The optimizers as user code sees them: their steps go through the strategy."""
        self.schedulers: list[SchedulerConfig] = (
            before.schedulers if before is not None and same else []
        )
        self.hooks = Hooks(trainer, module, trainer.callbacks)
        self.train_values = Metrics(
            self.strategy,
            trainer.loggers_of_this_rank if stage == "fit" else (),
            every_n_steps=trainer.log_every_n_steps,
        )
        self.train_loader: LimitedLoader | None = None
        self.val_loaders: list[LimitedLoader] = []
        self.sanity_checking = False
        self.run_id = ""
        """In a fit: a name of its own, the same on every rank; a resumed one keeps the first's."""
        self.evaluated_batches = 0
        """Batches of validation or testing in this run; the step of what is logged for each."""
        self.validated_epoch = -1
        """The last epoch that validation ran in; -1: none yet."""
        self.restarts: Restarts | None = None
        """In a fit: what a restart by the cluster goes on from."""
        self._names_of_validation: set[str] = set()
        self.rank_state: RankState | None = before.rank_state if before and same else None
        """After the beginning of a fit: what this rank saves for itself and goes on with."""
        self.step: Step | None = None
        """In a fit: the optimizer step, which may be under way."""
        self.saves_due: list[str | Path] = []
        """Checkpoints that were asked for within the present step, to be saved after it."""
        self.has_failed = False
        self.interruption = Interruption(self.strategy, trainer.max_time)

    def execute(self, *args: Any) -> Any:
        """Set up what all four stages share, run the stage, and take it down."""
        trainer, module, datamodule, stage = (
            self.trainer,
            self.module,
            self.datamodule,
            self.stage,
        )
        stages: dict[str, Callable[..., Any]] = {
            "fit": self._fit,
            "validate": self._evaluate,
            "test": self._evaluate,
            "predict": self._predict,
        }
        restore_modes = options.set_determinism(
            self.strategy.accelerator,
            deterministic=trainer.deterministic,
            benchmark=trainer.benchmark,
        )
        status = "failed"
        self.strategy.report_status(self._position)
        try:
            if datamodule is not None:
                if self.strategy.local_rank == 0:
                    datamodule.prepare_data()
                self.strategy.barrier("prepare_data")
                datamodule.setup(stage)
            self.strategy.setup(trainer)
            self.hooks.call("setup", stage)
            with trainer.lite.init_module():
                module.configure_model()
            with fit_loop.anomaly_detection(trainer.detect_anomaly):
                result = stages[stage](*args)
            self.hooks.call("teardown", stage)
            if datamodule is not None:
                datamodule.teardown(stage)
            status = "success"
            return result
        except BaseException as error:
            self.has_failed = True
            self.hooks.call("on_exception", error)
            self._let_saves_finish()
            raise
        finally:
            # It holds the graph of the last loss, and so what hooks of an engine hold.
            self.step = None
            # What was logged before an error is what explains it.
            self.train_values.flush()
            for logger in trainer.loggers_of_this_rank:
                logger.finalize(status)
            module.__dict__["_logged"] = None
            restore_modes()

    def _let_saves_finish(self) -> None:
        """While an error ends the run: what was saved before it becomes durable."""
        try:
            self.strategy.checkpoint_io.wait_at_error()
        # The run ends with its own error; this one would take its place.
        except Exception as error:
            print(f"stratagem: {type(error).__name__}: {error}", file=sys.stderr, flush=True)

    def _position(self) -> str:
        if self.stage != "fit":
            return f"{self.stage}, batch {self.evaluated_batches}"
        return f"fit, epoch {self.progress.epoch}, step {self.progress.global_step}"

    # -- the stages

    def _fit(self, train: Any, val: Any, ckpt_path: str | Path | None) -> None:
        trainer, module = self.trainer, self.module
        self._check_engine()
        self.run_id = self.strategy.broadcast(secrets.token_hex(8))
        self.restarts = Restarts(self.strategy, trainer.default_root_dir)
        ckpt_path = self.restarts.begin(ckpt_path)
        checkpoint, path = self._read(ckpt_path)
        train_loader, uneven_inputs = loaders.agree(self._training_loader(train), self.strategy)
        data = Resumable(
            train_loader.loader,
            train_loader.name,
            self.strategy.global_rank,
            self.strategy.data_shard,
        )
        self.rank_state = RankState(self.strategy, self.progress, data)
        train_loader = self.train_loader = replace(train_loader, loader=data.loader)
        self.val_loaders = self._validation_loaders(val)
        self.strategy.take_batch_size(loaders.batch_size_of(train_loader.loader))
        self.rank_state.follow_validation([one.loader for one in self.val_loaders])
        step_module = StepModule(module)
        if self.strategy.sync_batchnorm:
            self.strategy.synchronize_batch_norm(step_module)
        prepared = self.prepared = self.strategy.prepare(step_module, self._make_optimizers)
        self.optimizers = [wrap_optimizer(o, prepared, self.strategy) for o in prepared.optimizers]
        if not module.automatic_optimization:
            for optimizer in self.optimizers:
                _count_steps(optimizer, self.progress)
        if checkpoint is not None:
            self.run_id = checkpoint["run"] or self.run_id
            restore_model(self, prepared, checkpoint, path)
            restore_training(self, prepared, checkpoint, path)
        module.__dict__["_logged"] = self.train_values
        if module.hyper_parameters:
            for logger in trainer.loggers_of_this_rank:
                logger.log_hyperparams(module.hyper_parameters)

        self.hooks.call("on_fit_start")
        if checkpoint is None:
            self._check_sanity()
        with self.interruption, closing(self.rank_state):
            fit_loop.fit(self, prepared, train_loader, self.rank_state, uneven_inputs)
        self.hooks.call("on_fit_end")
        self.strategy.checkpoint_io.wait()

    def _make_optimizers(self) -> list[Optimizer]:
        if self.strategy.makes_optimizers and not self.module.defines("configure_optimizers"):
            self.schedulers = []
            return []
        optimizers, self.schedulers = configure(self.module)
        own = {id(parameter) for parameter in self.module.parameters()}
        for optimizer in optimizers:
            held = [p for group in optimizer.param_groups for p in group["params"]]
            gone = sum(id(p) not in own for p in held)
            if gone:
                raise UserCodeError(
                    f"{type(self.module).__name__}.configure_optimizers() returned a "
                    f"{type(optimizer).__name__} that holds {gone} of {len(held)} parameters that "
                    "the model does not have (any more), so its steps would not train the model: "
                    "make it in configure_optimizers(), from self.parameters()"
                )
        return optimizers

    def _evaluate(self, given: Any, ckpt_path: str | Path | None) -> tuple[dict[str, float], int]:
        """Return the values, and the number of loaders that they are of."""
        what = "validation" if self.stage == "validate" else "test"
        method = "val_dataloader" if what == "validation" else "test_dataloader"
        source = loaders.source_of(method, given, self.datamodule, self.module, needed=True)
        ready = self._evaluation_loaders(source, what)
        prepared = self._prepare_to_evaluate(ckpt_path)
        values = evaluation.evaluate(self, prepared, ready, what)
        return {name: float(value) for name, value in values.items()}, len(ready)

    def _predict(self, given: Any, ckpt_path: str | Path | None) -> list[list[Any]]:
        source = loaders.source_of(
            "predict_dataloader", given, self.datamodule, self.module, needed=True
        )
        ready = self._evaluation_loaders(source, "predict")
        return evaluation.predict(self, self._prepare_to_evaluate(ckpt_path), ready)

    def _prepare_to_evaluate(self, ckpt_path: str | Path | None) -> PreparedModel:
        checkpoint, path = self._read(ckpt_path)
        if self.prepared is None:
            self.prepared = self.strategy.prepare(StepModule(self.module))
        if checkpoint is not None:
            restore_model(self, self.prepared, checkpoint, path)
        return self.prepared

    def _read(self, asked: str | Path | None) -> tuple[dict[str, Any] | None, str | Path]:
        """Return the checkpoint that was asked for, and where it is."""
        if asked is None:
            return None, ""
        path = find_checkpoint(self.trainer, asked)
        return read_checkpoint(self.strategy, path), path

    def _check_engine(self) -> None:
        trainer, plan = self.trainer, self.trainer.plan
        if self.module.automatic_optimization:
            return
        if not plan.capabilities.manual_backward:
            raise ConfigurationError(
                f"the strategy {plan.strategy.name!r} runs backward itself, so it cannot train a "
                "Module with automatic_optimization = False"
            )
        if not plan.capabilities.backward_in_forward:
            raise ConfigurationError(
                f"{type(self.module).__name__} has automatic_optimization = False, and under "
                f"{plan.strategy.name!r} a backward within training_step has no effect: gradients "
                "are reduced after the model's forward. Use automatic optimization, "
                "strategy='ddp', or a loop of your own with Lite"
            )
        if trainer.gradient_clip is not None or trainer.accumulation(0) != 1:
            raise ConfigurationError(
                f"{type(self.module).__name__} has automatic_optimization = False, so "
                "gradient_clip_val and accumulate_grad_batches do nothing: clip and accumulate in "
                "training_step"
            )
        if self.strategy.join_uneven_inputs:
            raise ConfigurationError(
                f"{type(self.module).__name__} has automatic_optimization = False, so the Trainer "
                "cannot weight its gradients as join_uneven_inputs=True needs: give every rank as "
                "many batches"
            )

    # -- data

    def _training_loader(self, given: Any) -> LimitedLoader:
        source = loaders.source_of(
            "train_dataloader", given, self.datamodule, self.module, needed=True
        )
        return loaders.attach(
            loaders.training_loader(source),
            name="the training data loader",
            limit=self.trainer.limits["train"],
            limit_name="limit_train_batches",
            strategy=self.strategy,
            use_distributed_sampler=self.trainer.use_distributed_sampler,
            training=True,
        )

    def _validation_loaders(self, given: Any) -> list[LimitedLoader]:
        if self.trainer.limits["val"] == 0 or not self.module.defines("validation_step"):
            return []
        source = loaders.source_of(
            "val_dataloader", given, self.datamodule, self.module, needed=False
        )
        return [] if source is None else self._evaluation_loaders(source, "validation")

    def _evaluation_loaders(self, source: Any, what: str) -> list[LimitedLoader]:
        limit = {"validation": "val"}.get(what, what)
        several = loaders.evaluation_loaders(source)
        return [
            loaders.attach(
                loader,
                name=f"the {what} data loader" + (f" {index}" if len(several) > 1 else ""),
                limit=self.trainer.limits[limit],
                limit_name=f"limit_{limit}_batches",
                strategy=self.strategy,
                use_distributed_sampler=self.trainer.use_distributed_sampler,
                training=False,
            )
            for index, loader in enumerate(several)
        ]

    def set_epoch(self, loader: LimitedLoader) -> None:
        """Tell a loader's samplers the present epoch."""
        set_epoch(loader.loader, self.progress.epoch)

    # -- what the training loop asks

    def validates_in(self, epoch: int) -> bool:
        """Whether an epoch has validation."""
        return bool(self.val_loaders) and (epoch + 1) % self.trainer.check_val_every_n_epoch == 0

    def validate_every(self, batches: float) -> float:
        """Return after how many training batches validation comes; infinity: after the epoch."""
        interval = self.trainer.val_check_interval
        if isinstance(interval, int):
            if interval > batches:
                raise ConfigurationError(
                    f"val_check_interval={interval} is more than the {int(batches)} training "
                    "batches of an epoch, so validation would never run: pass a smaller number, or "
                    "check_val_every_n_epoch"
                )
            return interval
        if batches == UNKNOWN:
            if interval == 1.0:
                return UNKNOWN
            raise UserCodeError(
                f"the training data loader has no length, so val_check_interval={interval} cannot "
                "be taken of it: pass a number of batches (int)"
            )
        return max(1, int(batches * interval))

    def should_stop(self) -> bool:
        """Whether training is to end here, by `Trainer.should_stop`; not before its minimum."""
        trainer, progress = self.trainer, self.progress
        return (
            trainer.should_stop
            and progress.global_step >= trainer.min_steps
            and progress.epoch + progress.epoch_is_done >= trainer.min_epochs
        )

    def look(self) -> Callable[[], bool]:
        """Return what is called after each step: whether the fit is to end here."""
        look, checkpoint_io = self.interruption.look, self.strategy.checkpoint_io
        if not checkpoint_io.asynchronous:
            return look

        def look_at_saves_too() -> bool:
            checkpoint_io.raise_errors()
            return look()

        return look_at_saves_too

    def divergence_check(self, prepared: PreparedModel) -> DivergenceCheck | None:
        """Return what compares the ranks every few steps, if that was asked for."""
        every = self.trainer.detect_divergence
        if not every or self.strategy.world_size == 1:
            return None
        return DivergenceCheck(self.strategy, prepared.original, every)

    @property
    def is_within_step(self) -> bool:
        """Whether an optimizer step is under way; one that an error ended is not."""
        return self.step is not None and self.step.is_under_way and not self.has_failed

    def save_due(self) -> None:
        """Save what was asked for within the step that has just been taken."""
        due, self.saves_due = self.saves_due, []
        for path in dict.fromkeys(due):
            self.trainer.save_checkpoint(path)

    def save_interrupted(self) -> str:
        """Save the run where checkpoints go, before a signal ends it; return the path, or ""."""
        saver = self.trainer.checkpoint_callback
        if saver is None or saver.dirpath is None:
            return ""
        path = saver.save_to_resume_from(self.trainer, "interrupted")
        self.strategy.finish_saves()
        return path

    def step_schedulers(self, interval: str, count: int) -> None:
        """Step the schedulers that are due after the `count`-th epoch or step."""
        for config in self.schedulers:
            if config.is_due(interval, count):
                config.scheduler.step()

    def _step_monitored_schedulers(self, *, after_validation: bool) -> None:
        """Step those that wait for a value of the epoch, once it is there.

        What validation logs is there after it; all else, at the end of the training epoch. Both
        come before checkpoints are saved.
        """
        if not self.progress.epoch_is_done:
            return
        for config in self.schedulers:
            name = config.monitor
            if name is None or (self.progress.epoch + 1) % config.frequency:
                continue
            if (name in self._names_of_validation) is not after_validation:
                continue
            comes_later = bool(self.val_loaders) and self.validated_epoch == -1
            if comes_later and name not in self.trainer.callback_metrics:
                continue
            config.scheduler.step(self.trainer.metric(name, type(config.scheduler).__name__))

    def end_train_epoch(self) -> None:
        """Tell of the epoch's end, and reduce what was logged in it."""
        values, progress = self.train_values, self.progress
        values.in_step = False
        self.hooks.call_all_but_monitors("on_train_epoch_end")
        epoch_values, for_loggers = values.end_epoch()
        self.take_values(epoch_values, values)
        # The epoch's values stand at its last step, with the epoch's number.
        values.write({"epoch": progress.epoch, **for_loggers}, max(0, progress.global_step - 1))
        self._step_monitored_schedulers(after_validation=False)
        self.hooks.call_monitors("on_train_epoch_end")

    def validate_during_fit(self, prepared: PreparedModel) -> None:
        """Run validation between two training steps or after the last of an epoch."""
        self.train_values.flush()
        self.validated_epoch = self.progress.epoch
        self.progress.validated = self.progress.batches
        evaluation.evaluate(self, prepared, self.val_loaders, "validation")

    def _check_sanity(self) -> None:
        """Run a few validation batches before training, so that an error shows at once."""
        steps = self.trainer.num_sanity_val_steps
        if not self.val_loaders or steps == 0:
            return
        assert self.prepared is not None
        limit = UNKNOWN if steps == -1 else steps
        few = [
            LimitedLoader(one.loader, min(one.batches, limit), one.name) for one in self.val_loaders
        ]
        self.sanity_checking = True
        self.hooks.call("on_sanity_check_start")
        try:
            # Training draws the same random numbers, with this check and without it.
            with torch.random.fork_rng(devices=[]):
                evaluation.evaluate(self, self.prepared, few, "validation")
        finally:
            self.sanity_checking = False
            self.evaluated_batches = 0
        self.hooks.call("on_sanity_check_end")

    # -- logged values

    def take_values(self, values: dict[str, Tensor], logged: Metrics) -> None:
        """Make logged values known to callbacks, schedulers and the progress bar."""
        if self.sanity_checking:
            return
        self.trainer.take_values(logged, values)
        if logged is not self.train_values:
            self.train_values.bar.update(logged.bar)
            if self.stage == "fit":
                self._names_of_validation.update(values)
                self._step_monitored_schedulers(after_validation=True)


def _count_steps(optimizer: Any, progress: Progress) -> None:
    """Count the steps that user code takes itself."""
    step = optimizer.step

    def count(closure: Any = None) -> Any:
        result = step(closure)
        progress.global_step += 1
        return result

    optimizer.step = count
