"""CometLogger: values and hyperparameters in Comet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stratagem.loggers import local_folder
from stratagem_extras.loggers.sdk_logger import SDKLogger
from stratagem_extras.loggers.values import as_numbers, flattened

if TYPE_CHECKING:
    from torch import nn


class CometLogger(SDKLogger):
    """Sends values to Comet, or writes them to an archive for `comet upload`.

    `experiment` is the return value of `comet_ml.start`. The key of a fit's experiment is derived
    from the fit's id, so that a resumed fit continues the same experiment.

    Args:
        api_key: None: COMET_API_KEY, or Comet's configuration.
        workspace: None: the default workspace.
        project: None: COMET_PROJECT_NAME, or Comet's default.
        experiment_key: key of an experiment; None: the key of the fit.
        mode: "get": an existing experiment; "create": a new experiment; None: either.
        online: False: write archives; None: Comet's configuration.
        prefix: prepended to each name, with a "-".
        save_dir: folder of the archives; None: Comet's own.
        **kwargs: arguments of `comet_ml.ExperimentConfig`, such as `name` and `tags`.

    Raises:
        MissingPackageError: comet_ml is not installed.
        ConfigurationError: `save_dir` is a URL.

    Example:
        >>> from stratagem.loggers import CometLogger
        >>> CometLogger.extra  # pip install 'stratagem-core[comet]'
        'comet'
        >>> logger = CometLogger(project="mnist", online=False)    # doctest: +SKIP
    """

    package = "comet_ml"
    extra = "comet"

    def __init__(
        self,
        *,
        api_key: str | None = None,
        workspace: str | None = None,
        project: str | None = None,
        experiment_key: str | None = None,
        mode: Literal["get_or_create", "get", "create"] | None = None,
        online: bool | None = None,
        prefix: str | None = None,
        save_dir: str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(prefix)
        self.save_dir = None if save_dir is None else local_folder(type(self).__name__, save_dir)
        self.name = project
        self._key = experiment_key
        self._where = {"api_key": api_key, "workspace": workspace, "project": project}
        self._mode, self._online = mode, online
        self._config = dict(kwargs)
        if save_dir is not None:
            self._config["offline_directory"] = str(save_dir)

    @property
    def version(self) -> str | None:  # type: ignore[override]  # known once the experiment is
        """The experiment's key, or None before it has one."""
        return self._key if self._experiment is None else str(self._experiment.get_key())

    @property
    def log_dir(self) -> str:
        """The folder that checkpoints go into: `save_dir/project/key`; "" without `save_dir`."""
        if self.save_dir is None or not self.writes_here:
            return ""
        return str(Path(self.save_dir) / (self.name or "") / str(self.experiment.get_key()))

    def _start(self) -> Any:
        import comet_ml

        key = self._key
        if key is None and self.fit_id:
            key = self.fit_id * 2  # Comet's keys have 32 characters or more
        return comet_ml.start(
            **self._where,
            experiment_key=key,
            mode=self._mode,
            online=self._online,
            experiment_config=comet_ml.ExperimentConfig(**self._config),
        )

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Take the values of one step; "epoch" becomes Comet's own."""
        values = dict(metrics)
        epoch = values.pop("epoch", None)
        epoch = None if epoch is None else int(epoch)
        self.experiment.log_metrics(as_numbers(values, self.prefix), step=step, epoch=epoch)

    def log_hyperparams(self, params: Any) -> None:
        """Take hyperparameters: a mapping, an argparse.Namespace or a dataclass."""
        self.experiment.log_parameters(flattened(params))

    def log_graph(self, model: nn.Module, input_array: Any = None) -> None:
        """Take the text of a model."""
        self.experiment.set_model_graph(model)

    def save(self) -> None:
        """Send the values that are held back."""
        if self._experiment is not None:
            self._experiment.flush()

    def finalize(self, status: str) -> None:
        """Send everything; the experiment ends with the process."""
        self.save()
