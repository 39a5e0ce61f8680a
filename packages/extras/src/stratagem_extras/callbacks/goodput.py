"""Goodput: the time of a run by activity, over all restarts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from math import inf
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from stratagem import storage
from stratagem.callbacks import Callback
from stratagem.errors import ConfigurationError, StratagemError, format_names
from stratagem_extras.callbacks.data_wait import DataWait
from stratagem_extras.callbacks.memory_history import MemoryHistory
from stratagem_extras.callbacks.step_flops import StepFlops, counting, peak_of
from stratagem_extras.callbacks.stragglers import Stragglers
from stratagem_extras.callbacks.time_ledger import Attempt, TimeLedger, read_attempt

if TYPE_CHECKING:
    from stratagem.module import Module
    from stratagem.trainer import Trainer

FILE = "goodput.json"
"""The file in the folder of a run, which spans its restarts."""
_STARTING_STEPS = 2
"""Steps that belong to the start: they compile, and the first one counts operations."""
_WRITE_SECONDS = 30.0
"""The time between two writes of the file. A killed run has ended at its last write."""


class Goodput(Callback):
    """Measures the time of a fit by activity, and the part of the time that trained the model.

    `goodput` is the time of training steps that count, over the time since the first start of the
    run. The values are logged every `log_every_n_steps` steps, and the progress bar prints a
    sentence at the end. `stratagem report` shows them. A resumed fit continues the measurement: the
    steps that it trains again do not count, and neither does the time between the end of the last
    attempt and the new start.

    Logged values, all of rank 0: `goodput`, seconds as `goodput/training`, `goodput/starting`,
    `goodput/data`, `goodput/validation`, `goodput/saving`, `goodput/repeated`, `goodput/down` and
    `goodput/other`, `goodput/restarts`, and `goodput/mfu` if the peak of the device is known.

    A step reads the clock, and does not wait for the device. The operations of a step are counted
    in the first step of a fit.

    Args:
        peak_flops: the peak of a device in floating-point operations per second, for MFU. None: by
            a table of GPUs, for the precision of the run.
        compare_ranks_every: the number of steps between two comparisons of the ranks' times. 0: no
            comparison.
        slower: the factor above the time of the other ranks from which a rank is named, if two
            comparisons in a row find it.
        memory_snapshot: record the allocations of a CUDA device, and write them to the folder of
            the run if an out-of-memory error ends training.

    Attributes:
        ledger: the seconds of the current or last fit.
        mfu: the model FLOPs utilization of this attempt; None: unknown.
        ending: the sentence at the end of a fit.

    Raises:
        ConfigurationError: an argument is out of its range.

    Example:
        >>> from stratagem import Trainer
        >>> from stratagem.callbacks import Goodput
        >>> goodput = Goodput()
        >>> goodput in Trainer(accelerator="cpu", callbacks=goodput).callbacks
        True
    """

    def __init__(
        self,
        *,
        peak_flops: float | None = None,
        compare_ranks_every: int = 50,
        slower: float = 1.25,
        memory_snapshot: bool = True,
    ) -> None:
        if peak_flops is not None and not peak_flops > 0:
            raise ConfigurationError(
                f"Goodput(peak_flops={peak_flops!r}): expected operations per second of a device, "
                "such as 989e12, or None"
            )
        if compare_ranks_every < 0 or not slower > 1:
            raise ConfigurationError(
                f"Goodput(compare_ranks_every={compare_ranks_every!r}, slower={slower!r}): "
                "expected a number of steps, or 0, and a factor above 1"
            )
        self.peak_flops = peak_flops
        self._every = compare_ranks_every
        self._slower = slower
        self._snapshot = memory_snapshot
        self._born: float | None = perf_counter()
        """The time at which the callback was made, for the first fit of a script."""
        self.ledger = TimeLedger(perf_counter())
        self.mfu: float | None = None
        self.ending = ""
        self._saved: Attempt | None = None

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        """Begin to measure a fit."""
        if stage != "fit":
            return
        now = perf_counter()
        since, self._born = now if self._born is None else self._born, None
        self.ledger = TimeLedger(since)
        self._began = time.time() - (now - since)
        self._saved, self.mfu, self.ending = None, None, ""
        self._place: storage.Location | None = None
        self._steps = self._counted = 0
        """The steps of this attempt, and the operations of one of them."""
        self._window = (0, 0.0)
        """The steps and seconds of training at the last logged row."""
        self._warm = (0, 0.0)
        """The same after the start."""
        self._settled = 0.0
        self._due = now + _WRITE_SECONDS
        self._left = "starting"
        self._stragglers: Stragglers | None = None
        self._history: MemoryHistory | None = None

    def on_fit_start(self, trainer: Trainer, module: Module) -> None:
        """Continue the measurement of a resumed run, and watch the actions of this one."""
        run, ranks, strategy = trainer.run, trainer.ranks, trainer.strategy
        self._run_id, self._metrics = run.resume_point.run_id, run.metrics
        if ranks.is_global_zero:
            self._place = _place_of(trainer)
        if self._saved is not None:
            last = None if self._place is None else read_attempt(self._place, self._run_id)
            self.ledger.resume(self._saved, last, self._began)
        precision = strategy.precision.name
        self._peak = self.peak_flops or peak_of(strategy.device, precision)
        self._wait = DataWait(strategy.device)
        if self._every and ranks.world_size > 1:
            try:
                self._stragglers = Stragglers(ranks, self._every, self._slower)
            except ConfigurationError:
                self._stragglers = None  # these ranks have no store
        if self._snapshot:
            self._history = MemoryHistory(strategy)
        self._log_every = trainer.options.log_every_n_steps
        watches = run.profiling.watches
        watches["train_dataloader_next"].append(self._wait.reads)
        watches["run_training_epoch"].append(self._epochs)
        watches["run_training_batch"].append(lambda step: self._trained(trainer, module, step))
        watches["save_checkpoint"].append(self._saves)
        self._write("running")

    # -- the actions

    def _epochs(self, train_epoch: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: Any) -> None:
            self.ledger.enter("training" if self._steps >= _STARTING_STEPS else "starting")
            try:
                train_epoch(*args)
            finally:
                self._settle()
                is_starting = self._steps < _STARTING_STEPS
                self.ledger.enter("starting" if is_starting else "other")

        return timed

    def _saves(self, save: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: Any) -> None:
            before = self.ledger.enter("saving")
            try:
                save(*args)
            finally:
                self.ledger.enter(before)
            self._write("running")

        return timed

    def _trained(
        self, trainer: Trainer, module: Module, run_step: Callable[..., None]
    ) -> Callable[..., None]:
        """Return a function that takes an optimizer step, and counts it."""
        state, every = trainer.run.state, self._log_every
        special = 0.0
        """The next step that is measured otherwise than by the clock."""

        def timed(prepared: Any, step: Any, micro_batches: Any) -> None:
            nonlocal special
            if self._steps < special:
                run_step(prepared, step, micro_batches)
                self._steps += 1
            else:
                self._take_special(trainer, module, run_step, prepared, step, micro_batches)
                special = self._next_special()
            if every and not state.global_step % every:
                self._log()
            if perf_counter() >= self._due:
                self._write("running")

        return timed

    def _take_special(
        self, trainer: Trainer, module: Module, run_step: Callable[..., None], *step: Any
    ) -> None:
        """Take a step of the start, or a step in which ranks are compared."""
        slow, number = self._stragglers, self._steps
        if number == 0 and self._peak is not None:
            with counting() as flops:
                run_step(*step)
            self._note_flops(trainer, module, flops, step[1].expected)
        elif slow is not None and slow.is_due(number):
            if trainer.is_global_zero and (sentence := slow.compare(number)):
                trainer.print(f"stratagem: {sentence}")
            with slow.measuring(number, self._wait, step[1]):
                run_step(*step)
        else:
            run_step(*step)
        self._steps = number + 1
        if self._steps == _STARTING_STEPS:
            self._settle()
            self.ledger.enter("training")
            self._warm = self._window = (self._steps, self._training())

    def _next_special(self) -> float:
        if self._steps < _STARTING_STEPS:
            return self._steps
        return inf if self._stragglers is None else self._stragglers.next_due(self._steps)

    def _note_flops(
        self, trainer: Trainer, module: Module, flops: StepFlops, micro_batches: int
    ) -> None:
        """Keep the mean of the operations that ranks take for a step."""
        own = getattr(module, "flops_per_batch", None)
        counted = flops.model if own is None else int(own * micro_batches)
        (total,) = trainer.ranks.all_reduce_ints([counted], "sum")
        self._counted = total // trainer.world_size
        if flops.missed and own is None and trainer.is_global_zero:
            trainer.print(
                "stratagem: goodput/mfu is too low, since it leaves out operations whose number "
                f"is not known ({format_names(sorted(flops.missed))}): set flops_per_batch in the "
                "Module to a number of your own"
            )
        if flops.recomputed and trainer.is_global_zero:
            part = flops.recomputed / (flops.recomputed + flops.model)
            trainer.print(
                f"stratagem: activation checkpointing runs {part:.0%} of a step's operations "
                "again, which do not count in goodput/mfu"
            )

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        """Count the time of a validation as such."""
        if trainer.run.stage == "fit":
            self._left = self.ledger.enter("validation")

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        """Count the time from here on as before."""
        if trainer.run.stage == "fit":
            self.ledger.enter(self._left)

    # -- the end

    def on_train_end(self, trainer: Trainer, module: Module) -> None:
        """Log the last values, and form the sentence that the progress bar prints."""
        self._settle()
        steps, seconds = self._steps - self._warm[0], self._training() - self._warm[1]
        self.mfu = self._utilization(steps, seconds)
        mfu = "" if self.mfu is None else f"; MFU {self.mfu:.1%}"
        self.ending = self.ledger.sentence() + mfu
        state = trainer.run.state
        values = self._values(self.mfu)
        trainer.run.rows.write(values, state.logged_step, max(0, state.epoch - 1))

    def on_fit_end(self, trainer: Trainer, module: Module) -> None:
        """Count the wait for pending writes as saving."""
        self.ledger.enter("saving")

    def on_exception(self, trainer: Trainer, module: Module, exception: BaseException) -> None:
        """Note the end of the attempt, and write a snapshot of memory after an error of memory."""
        if trainer.run.stage != "fit":
            return
        self._write("failed")
        if self._history is not None:
            folder = _folder_of(trainer)
            local = folder if isinstance(folder, Path) else None
            if path := self._history.write_after(exception, local):
                print(
                    f"stratagem: what memory held is in {str(path)!r}: open it at "
                    "https://pytorch.org/memory_viz",
                    flush=True,
                )
            self._history.stop()

    def teardown(self, trainer: Trainer, module: Module, stage: str) -> None:
        """Note that the run has finished."""
        if stage == "fit":
            self._write("finished")
            if self._history is not None:
                self._history.stop()

    # -- the state

    def state_dict(self) -> dict[str, Any]:
        """Return the seconds until now."""
        self._settle()
        return Attempt.of(self.ledger, getattr(self, "_run_id", ""), "running").data()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the seconds of the attempt that saved a checkpoint."""
        self._saved = Attempt.from_data(state)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, without the objects of a run of this process."""
        kept = ("_metrics", "_stragglers", "_history", "_wait")
        return {name: value for name, value in vars(self).items() if name not in kept}

    # -- the values

    def _settle(self) -> None:
        """Count the time until now, and the waits for data apart from training."""
        self.ledger.update()
        if (wait := getattr(self, "_wait", None)) is not None:
            waited, self._settled = wait.waited - self._settled, wait.waited
            if self._steps >= _STARTING_STEPS:
                self.ledger.move(waited, "training", "data")

    def _training(self) -> float:
        """Return the seconds of the training loop, with its waits for data."""
        return self.ledger.seconds["training"] + self.ledger.seconds["data"]

    def _utilization(self, steps: int, seconds: float) -> float | None:
        if self._peak is None or not self._counted or steps < 1 or seconds <= 0:
            return None
        return steps * self._counted / seconds / self._peak

    def _values(self, mfu: float | None) -> dict[str, float]:
        ledger = self.ledger
        values = {f"goodput/{kind}": seconds for kind, seconds in ledger.seconds.items()}
        values |= {"goodput": ledger.goodput(), "goodput/restarts": float(ledger.restarts)}
        if mfu is not None:
            values["goodput/mfu"] = mfu
        if self._stragglers is not None:
            values |= self._stragglers.values
        return values

    def _log(self) -> None:
        """Add the values to the row of this step."""
        self._settle()
        now = self._steps, self._training()
        mfu = self._utilization(now[0] - self._window[0], now[1] - self._window[1])
        if self._steps > _STARTING_STEPS:
            self._window = now
        self._metrics.row.update(self._values(mfu))

    def _write(self, ended: str) -> None:
        """Write the seconds to the file of the run, on rank 0."""
        self._due = perf_counter() + _WRITE_SECONDS
        if self._place is None:
            return
        self._settle()
        data = Attempt.of(self.ledger, self._run_id, ended).data()
        try:
            if isinstance(self._place, Path):
                self._place.parent.mkdir(parents=True, exist_ok=True)
            storage.write(self._place, json.dumps(data).encode())
        except (OSError, StratagemError):
            self._place = None  # the run goes on; checkpoints have the same values


def _folder_of(trainer: Trainer) -> storage.Location | None:
    """Return the folder of the logs of a run, else the folder of its checkpoints."""
    logs = [storage.to_location(one.log_dir) for one in trainer.loggers if one.log_dir]
    saved = [one.dirpath for one in trainer.checkpoint_callbacks if one.dirpath is not None]
    return next(iter([*logs, *saved]), None)


def _place_of(trainer: Trainer) -> storage.Location | None:
    folder = _folder_of(trainer)
    return None if folder is None else storage.join(folder, FILE)
