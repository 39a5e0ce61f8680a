"""ThroughputMonitor: batches, samples, items and FLOPs per second, in the logs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any

from stratagem.callbacks import Callback
from stratagem.errors import ConfigurationError

if TYPE_CHECKING:
    from stratagem.module import Module
    from stratagem.trainer import Trainer


class Throughput:
    """Rates over a window of the latest batches.

    Args:
        available_flops: the peak FLOPs of a device per second, for `mfu` (model FLOPs utilization);
            None: `mfu` is omitted.
        world_size: the number of ranks; the total rate is the rate of this rank times this number.
        window_size: the number of batches in the window.
        separator: the text after "device" in names.

    Raises:
        ConfigurationError: the window is shorter than two batches.

    Attributes:
        available_flops: the argument `available_flops`.

    Example:
        >>> from stratagem_extras.callbacks.throughput import Throughput
        >>> throughput = Throughput(window_size=2)
        >>> for number in (1, 2, 3):
        ...     throughput.update(time=number * 0.5, batches=number, samples=number * 4)
        >>> throughput.compute()["device/samples_per_sec"]
        8.0
    """

    def __init__(
        self,
        available_flops: float | None = None,
        world_size: int = 1,
        window_size: int = 100,
        separator: str = "/",
    ) -> None:
        if window_size < 2:
            raise ConfigurationError(
                f"window_size={window_size!r}: expected at least 2, since a rate is taken between "
                "two batches"
            )
        self.available_flops = available_flops
        self._world_size = world_size
        self._separator = separator
        self._counts: deque[tuple[float, int, int, int | None]] = deque(maxlen=window_size)
        self._flops: deque[int] = deque(maxlen=window_size)

    def update(
        self,
        *,
        time: float,
        batches: int,
        samples: int,
        lengths: int | None = None,
        flops: int | None = None,
    ) -> None:
        """Take the totals after a batch.

        Args:
            time: seconds.
            batches, samples: how many there were.
            lengths: items (tokens, pixels) in them; None: not known.
            flops: of this batch alone; None: not known.

        Raises:
            ConfigurationError: the totals decrease, or are in the wrong order.
        """
        last = self._counts[-1] if self._counts else (time, 0, 0, lengths)
        if time < last[0] or batches < last[1] or samples < last[2]:
            raise ConfigurationError(
                f"Throughput.update(time={time}, batches={batches}, samples={samples}): Expected "
                f"the value to increase, last: {last[:3]}; call reset() to begin anew"
            )
        if (lengths is None) != (last[3] is None):
            raise ConfigurationError(
                f"Throughput.update(lengths={lengths}): if lengths are passed, there needs to be "
                "the same number of samples: pass lengths each time or never"
            )
        items = samples if lengths is None else lengths
        for name, more, least, fewer in (
            ("samples", samples, "batches", batches),
            ("lengths", items, "samples", samples),
        ):
            if more < fewer:
                raise ConfigurationError(
                    f"Throughput.update: Expected {name} ({more}) to be greater or equal than "
                    f"{least} ({fewer}): pass totals, not those of a batch"
                )
        self._counts.append((time, batches, samples, lengths))
        if flops is not None:
            self._flops.append(flops)

    def compute(self) -> dict[str, float]:
        """Return totals, and rates from the second batch on."""
        if not self._counts:
            return {}
        time, batches, samples, lengths = self._counts[-1]
        metrics: dict[str, float] = {"time": time, "batches": batches, "samples": samples}
        if lengths is not None:
            metrics["lengths"] = lengths
        before = self._counts[0]
        elapsed = time - before[0]
        if len(self._counts) < 2 or elapsed <= 0:
            return metrics
        rates = {
            "batches_per_sec": (batches - before[1]) / elapsed,
            "samples_per_sec": (samples - before[2]) / elapsed,
        }
        if lengths is not None and before[3] is not None:
            rates["items_per_sec"] = (lengths - before[3]) / elapsed
        if self._flops:
            # The operations of the first batch precede the measured time.
            rates["flops_per_sec"] = sum(list(self._flops)[1:]) / elapsed
        for name, rate in rates.items():
            metrics[f"device{self._separator}{name}"] = rate
            if self._world_size > 1:
                metrics[name] = rate * self._world_size
        if self.available_flops and "flops_per_sec" in rates:
            metrics[f"device{self._separator}mfu"] = rates["flops_per_sec"] / self.available_flops
        return metrics

    def reset(self) -> None:
        """Forget everything."""
        self._counts.clear()
        self._flops.clear()


class ThroughputMonitor(Callback):
    """Logs how fast batches, samples and items go through, every `log_every_n_steps` batches.

    Names begin with the stage: `train/device/samples_per_sec`. Time in validation does not count
    for training. The callback does not wait for the device, so that the first figures of an
    asynchronous device are too high. A Module that has `flops_per_batch` (a number, for one device)
    also gets `device/flops_per_sec`, and `device/mfu` if `available_flops` is known.

    Args:
        batch_size_fn: returns the number of samples in a batch.
        length_fn: returns the number of items in a batch, such as tokens; None: items are not
            counted.
        window_size: the number of batches in the window of the rates.
        separator: the text between the parts of a name.
        available_flops: the peak FLOPs of a device per second; None: unknown.

    Raises:
        ConfigurationError: when a run begins, the Trainer has no logger, or never logs.

    Example:
        >>> from stratagem import Trainer
        >>> from stratagem.callbacks import ThroughputMonitor
        >>> monitor = ThroughputMonitor(batch_size_fn=len)
        >>> monitor in Trainer(callbacks=monitor, log_every_n_steps=10).callbacks
        True
    """

    def __init__(
        self,
        batch_size_fn: Callable[[Any], int],
        length_fn: Callable[[Any], int] | None = None,
        *,
        window_size: int = 100,
        separator: str = "/",
        available_flops: float | None = None,
    ) -> None:
        self.batch_size_fn = batch_size_fn
        self.length_fn = length_fn
        self.separator = separator
        self._options = (available_flops, window_size)
        self._throughput: dict[str, Throughput] = {}
        self._totals: dict[str, list[int]] = {}
        self._began: dict[str, float] = {}
        self._left = 0.0
        self._resumed_time = 0.0

    def setup(self, trainer: Trainer, module: Module, stage: str) -> None:
        """Refuse a Trainer that logs nothing; begin anew."""
        if not trainer.loggers or not trainer.options.log_every_n_steps:
            raise ConfigurationError(
                "ThroughputMonitor has nowhere to log to: received a Trainer with "
                f"logger={trainer.logger!r} and log_every_n_steps="
                f"{trainer.options.log_every_n_steps}; pass a logger and a number of steps, or "
                "leave the callback out"
            )
        flops, window = self._options
        for name in ("train", "validate", "test", "predict"):
            self._throughput[name] = Throughput(flops, trainer.world_size, window, self.separator)
            self._totals[name] = [0, 0, 0]

    def on_train_start(self, trainer: Trainer, module: Module) -> None:
        """Begin to count; a resumed run continues its earlier counts."""
        self._began["train"] = monotonic() - self._resumed_time
        self._resumed_time = 0.0

    def on_train_batch_end(
        self, trainer: Trainer, module: Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a batch, and log where this step's values are logged."""
        self._count("train", module, batch)
        step = trainer.global_step
        if not trainer.is_within_step and step and not step % trainer.options.log_every_n_steps:
            trainer.run.metrics.row.update(self._compute("train"))

    def on_validation_start(self, trainer: Trainer, module: Module) -> None:
        """Begin to count; training stands still."""
        self._left = self._began[_stage(trainer)] = monotonic()

    def on_validation_end(self, trainer: Trainer, module: Module) -> None:
        """Log; training goes on."""
        self._write(trainer, _stage(trainer))
        if "train" in self._began:
            self._began["train"] += monotonic() - self._left

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        module: Module,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Count a batch."""
        if not trainer.sanity_checking:
            self._count(_stage(trainer), module, batch)

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers of batches, samples and items by stage, and seconds of training."""
        return {
            "totals": {stage: list(totals) for stage, totals in self._totals.items()},
            "time": monotonic() - self._began["train"] if "train" in self._began else 0.0,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue to count from there; rates are of this run."""
        self._totals |= {stage: list(totals) for stage, totals in state["totals"].items()}
        self._resumed_time = float(state["time"])

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def _count(self, stage: str, module: Module, batch: Any) -> None:
        totals = self._totals[stage]
        totals[0] += 1
        totals[1] += self.batch_size_fn(batch)
        if self.length_fn is not None:
            totals[2] += self.length_fn(batch)
        self._throughput[stage].update(
            time=monotonic() - self._began[stage],
            batches=totals[0],
            samples=totals[1],
            lengths=None if self.length_fn is None else totals[2],
            flops=getattr(module, "flops_per_batch", None),
        )

    def _compute(self, stage: str) -> dict[str, float]:
        values = self._throughput[stage].compute()
        return {f"{stage}{self.separator}{name}": value for name, value in values.items()}

    def _write(self, trainer: Trainer, stage: str) -> None:
        progress = trainer.run.state
        trainer.run.rows.write(self._compute(stage), progress.logged_step, progress.epoch)
        self._throughput[stage].reset()


def _stage(trainer: Trainer) -> str:
    """Return what is evaluated now, as names of values begin."""
    what = trainer.run.evaluation.what
    return "validate" if what == "validation" else what
