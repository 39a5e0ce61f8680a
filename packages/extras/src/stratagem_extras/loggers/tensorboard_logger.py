"""TensorBoardLogger: values, graphs and hyperparameters in files that TensorBoard shows."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratagem.loggers import (
    VersionFolder,
    as_mapping,
    local_folder,
)
from stratagem_extras.loggers.sdk_logger import SDKLogger
from stratagem_extras.loggers.values import as_numbers, flattened, write_hyperparameters

if TYPE_CHECKING:
    from torch import nn


class TensorBoardLogger(SDKLogger):
    """Writes to `save_dir/name/version_N`, which `tensorboard --logdir save_dir` shows.

    Hyperparameters go to TensorBoard's tab for hyperparameters, and as JSON, which is YAML too, to
    `hparams.yaml`. `experiment` is torch's SummaryWriter: `logger.experiment.add_image("sample",
    image, step)`. A resumed run continues in its own folder, where TensorBoard skips values that
    were logged after the checkpoint.

    Args:
        save_dir: folder of all experiments; `~` and variables ("$SCRATCH/logs") are expanded.
        name: folder of this experiment; None or "": `save_dir` itself.
        version: version of the run (int or str); appends if its folder exists. None: the version of
            the run that a fit resumes, or the next free number.
        log_graph: write the model's graph when a fit begins; requires `example_input_array`.
        default_hp_metric: write a first value (-1) of "hp_metric", for models that log hp_metric.
        prefix: prepended to each name, with a "-".
        sub_dir: a subfolder of the run's folder for the files.
        root_dir: another name for `save_dir`.
        **kwargs: arguments of `torch.utils.tensorboard.SummaryWriter`, such as `max_queue`.

    Raises:
        MissingPackageError: tensorboard is not installed.
        ConfigurationError: `save_dir` is a URL, or given beside `root_dir`.

    Example:
        >>> from stratagem import Trainer
        >>> trainer = Trainer(logger="tensorboard")             # doctest: +SKIP
        >>> from stratagem.loggers import TensorBoardLogger
        >>> TensorBoardLogger.extra  # pip install 'stratagem-core[tensorboard]'
        'tensorboard'
        >>> logger = TensorBoardLogger("logs", name="mnist")    # doctest: +SKIP
    """

    package = "tensorboard"
    extra = "tensorboard"
    NAME_HPARAMS_FILE = "hparams.yaml"

    def __init__(
        self,
        save_dir: str | Path | None = None,
        name: str | None = "stratagem_logs",
        version: int | str | None = None,
        *,
        log_graph: bool = False,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(prefix)
        owner = type(self).__name__
        self.save_dir = local_folder(owner, os.path.expandvars(save_dir or "."))
        self._name = name or ""
        self.sub_dir = "" if sub_dir is None else os.path.expandvars(str(sub_dir))
        self._folder = VersionFolder(owner, self.save_dir / self.name, version)
        self._log_graph = log_graph
        self._default_hp_metric = default_hp_metric
        self._writer_options = kwargs

    @property
    def root_dir(self) -> str:
        """The folder of this experiment."""
        return str(self._folder.root)

    @property
    def name(self) -> str:  # type: ignore[override]  # a subclass may compute it
        """The folder of this experiment, in `save_dir`."""
        return self._name

    @property
    def version(self) -> int | str:  # type: ignore[override]  # chosen on first use
        """The run's number or name; choosing a free one makes its folder."""
        return self._folder.version

    @property
    def log_dir(self) -> str:
        """The folder that is written to; choosing a free version makes it."""
        return str(self._folder.path / self.sub_dir)

    def begin_run(self, run_id: str, resumed_at: int | None = None) -> None:
        """Go on in the folder of a run that is resumed, unless a version was given."""
        self._folder.begin_run(run_id, resumed_at)
        if self._experiment is not None and resumed_at is not None:
            # Only a new writer hides the values of after the checkpoint.
            self._experiment.close()
            self._experiment = None
        super().begin_run(run_id, resumed_at)

    def _start(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        self._folder.make()
        if self.resumed_at is not None:
            self._wait_for_a_later_name()
        # Handed on as they came, so that jsonargparse finds the arguments that a config may have.
        if "purge_step" in self._writer_options:
            return SummaryWriter(self.log_dir, **self._writer_options)
        return SummaryWriter(self.log_dir, purge_step=self.resumed_at, **self._writer_options)

    def _wait_for_a_later_name(self) -> None:
        """Wait out a second in which another file of events began: at most one second.

        TensorBoard reads the files by name, which is second, host, process and a count: "10" is
        before "9". What the second file purges has to be in a file before it.
        """
        while any(Path(self.log_dir).glob(f"events.out.tfevents.{int(time.time()):010d}.*")):
            time.sleep(0.05)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log the values of a step; a dict becomes a chart of several lines."""
        plain = {name: value for name, value in metrics.items() if not isinstance(value, dict)}
        for name, value in as_numbers(plain, self.prefix).items():
            self.experiment.add_scalar(name, value, step)
        for name, value in metrics.items():
            if isinstance(value, dict):
                self.experiment.add_scalars(name, as_numbers(value), step)

    def log_hyperparams(
        self, params: Any, metrics: Mapping[str, Any] | None = None, step: int | None = None
    ) -> None:
        """Take hyperparameters.

        Args:
            params: a mapping, an argparse.Namespace or a dataclass.
            metrics: values to compare runs by; None: "hp_metric", if `default_hp_metric` is True.
            step: the step of these values.
        """
        if not self.writes_here:
            return
        from torch.utils.tensorboard import summary

        hparams: Any = summary.hparams  # not annotated
        given = as_mapping(params)
        values = metrics if metrics is not None else {}
        if metrics is None and self._default_hp_metric:
            values = {"hp_metric": -1.0}
        self.log_metrics(values, 0 if step is None else step)
        kept = {k: v if _fits(v) else str(v) for k, v in flattened(given).items()}
        writer = self.experiment._get_file_writer()
        for each in hparams(kept, as_numbers(values)):
            writer.add_summary(each)
        write_hyperparameters(Path(self.log_dir) / self.NAME_HPARAMS_FILE, given)

    def log_graph(self, model: nn.Module, input_array: Any = None) -> None:
        """Write a model's graph, if `log_graph=True`.

        Args:
            model: the model to trace.
            input_array: the example input; None: the model's `example_input_array`.
        """
        if not self._log_graph or not self.writes_here:
            return
        example = input_array
        if example is None:
            example = getattr(model, "example_input_array", None)
        if example is None:
            warnings.warn(
                "TensorBoardLogger(log_graph=True): the model has no example_input_array, so its "
                "graph is not written: set it in __init__, or leave log_graph out",
                stacklevel=2,
            )
            return
        try:
            with warnings.catch_warnings():
                # That torch.jit.trace is deprecated is torch's business, not the user's.
                warnings.filterwarnings("ignore", ".*torch.jit", DeprecationWarning)
                warnings.filterwarnings("ignore", ".*torch.jit", FutureWarning)
                self.experiment.add_graph(model, _moved(example, model))
        except Exception as error:  # tracing may raise any error of the model
            warnings.warn(
                f"TensorBoardLogger(log_graph=True): the model cannot be traced with "
                f"{type(example).__name__} {example!r:.80}, so its graph is not written "
                f"({type(error).__name__}: {error!s:.300})",
                stacklevel=2,
            )

    def save(self) -> None:
        """Write the values that are held back."""
        if self._experiment is not None:
            self._experiment.flush()

    def finalize(self, status: str) -> None:
        """Write everything and close the file; a value that comes later opens another one."""
        if self._experiment is not None:
            self._experiment.flush()
            self._experiment.close()
            self._folder.end(status, self.steps_taken)


def _fits(value: Any) -> bool:
    """Whether TensorBoard takes it as a hyperparameter."""
    return isinstance(value, (bool, int, float, str))


def _moved(example: Any, model: nn.Module) -> Any:
    from stratagem.data import move_to_device

    device = next((parameter.device for parameter in model.parameters()), None)
    return example if device is None else move_to_device(example, device)
