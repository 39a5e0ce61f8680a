"""MLFlowLogger: values, hyperparameters and checkpoints in MLflow."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stratagem.discovery import require_package
from stratagem.loggers import local_folder
from stratagem_extras.loggers.sdk_logger import SDKLogger
from stratagem_extras.loggers.uploads import Upload, Uploads
from stratagem_extras.loggers.values import as_numbers, flattened

if TYPE_CHECKING:
    from stratagem.callbacks import ModelCheckpoint

_RUN_TAG = "stratagem.run"
"""A tag of the run: the id of the fit."""
_LONGEST_VALUE = 250
"""Of a parameter, in characters: what any server takes."""
_MOST_PARAMETERS, _MOST_METRICS = 100, 1000
"""In one call, as MLflow's server has it."""
_OTHER_CHARACTERS = re.compile(r"[^A-Za-z0-9_/. :-]")
_STATES = {"success": "FINISHED", "finished": "FINISHED", "failed": "FAILED"}


class MLFlowLogger(SDKLogger):
    """Sends values to MLflow: a server, or a database in `save_dir`.

    `experiment` is an `MlflowClient`, to be used with `logger.run_id`. The run has the tag
    "stratagem.run" with the id of the fit, by which a resumed fit continues the same run. Rows of
    two seconds are sent in one request.

    Args:
        experiment_name: name of the experiment, which is created if missing.
        run_name: the displayed name of the run; None: a name chosen by MLflow.
        tracking_uri: URI of the server; None: MLFLOW_TRACKING_URI, or else a SQLite database
            `mlflow.db` in `save_dir`, which needs sqlalchemy and alembic.
        tags: tags of the run.
        save_dir: the local folder.
        log_model: checkpoints as artifacts: "all": each checkpoint after its save; True: the kept
            checkpoints, at the end of training; False: no checkpoints. Local checkpoints only.
        prefix: prepended to each name, with a "-".
        artifact_location: the location of artifacts of a new experiment; None: the location of the
            server, or `save_dir/artifacts`.
        run_id: id of an existing run to continue; None: the run of the resumed fit, or a new run.
        synchronous: False: a thread of MLflow sends values; None: MLflow's default.

    Raises:
        MissingPackageError: mlflow (or mlflow-skinny) or a package for its database is missing.
        ConfigurationError: `save_dir` is a URL.

    Example:
        >>> from stratagem.loggers import MLFlowLogger
        >>> MLFlowLogger.extra  # pip install 'stratagem-core[mlflow]'
        'mlflow'
        >>> logger = MLFlowLogger("mnist", tracking_uri="http://localhost:5000")  # doctest: +SKIP
    """

    package = "mlflow"
    extra = "mlflow"

    def __init__(
        self,
        experiment_name: str = "stratagem_logs",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, Any] | None = None,
        save_dir: str | Path | None = "./mlruns",
        log_model: bool | Literal["all"] = False,
        prefix: str = "",
        artifact_location: str | None = None,
        run_id: str | None = None,
        synchronous: bool | None = None,
    ) -> None:
        super().__init__(prefix)
        uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        self.save_dir = save_dir if uri is None or uri.startswith(("file:", "sqlite:")) else None
        self._folder = local_folder(type(self).__name__, save_dir or "mlruns")
        self._tracking_uri = uri
        self._experiment_name = experiment_name
        self._run_name = run_name
        self._tags = dict(tags or {})
        self._artifact_location = artifact_location
        self._given_run_id = run_id
        self._synchronous = {} if synchronous is None else {"synchronous": synchronous}
        self._experiment_id: str | None = None
        self._run_id: str | None = None
        self._collected: list[tuple[int, Mapping[str, Any]]] | None = None
        """Rows of one call of `log_rows`."""
        self._uploads = Uploads(log_model, self._send)

    @property
    def name(self) -> str | None:  # type: ignore[override]  # known once the run is
        """The experiment's id, which begins the run."""
        assert self.experiment is not None
        return self._experiment_id

    @property
    def version(self) -> str | None:  # type: ignore[override]  # known once the run is
        """The run's id, which begins it."""
        assert self.experiment is not None
        return self._run_id

    @property
    def run_id(self) -> str | None:
        """The same as `version`, for calls of the client; it begins the run."""
        return self.version

    @property
    def log_dir(self) -> str:
        """The folder that checkpoints go into: `save_dir/EXPERIMENT/RUN`; it begins the run."""
        return str(self._folder / str(self.name) / str(self.version))

    def _start(self) -> Any:
        from mlflow.tracking import MlflowClient

        client = MlflowClient(self._uri())
        if self._given_run_id is not None:
            run = client.get_run(self._given_run_id)
        else:
            experiment_id = self._find_experiment(client)
            run = self._find_run(client, experiment_id) or client.create_run(
                experiment_id, tags=self._tags, run_name=self._run_name
            )
        self._experiment_id, self._run_id = run.info.experiment_id, run.info.run_id
        if run.info.status != "RUNNING":
            client.update_run(self._run_id, "RUNNING")
        if self.fit_id:
            client.set_tag(self._run_id, _RUN_TAG, self.fit_id)
        return client

    def _uri(self) -> str:
        """Return where runs are stored, and make the folder of a database of ours."""
        if self._tracking_uri is not None:
            return self._tracking_uri
        for package in ("sqlalchemy", "alembic"):
            require_package("MLFlowLogger without tracking_uri", package, self.extra)
        self._folder.mkdir(parents=True, exist_ok=True)
        return f"sqlite:///{self._folder / 'mlflow.db'}"

    def _find_experiment(self, client: Any) -> str:
        """Return the id of the experiment, which is made if it is not there."""
        found = client.get_experiment_by_name(self._experiment_name)
        if found is not None:
            return str(found.experiment_id)
        location = self._artifact_location
        if location is None and self._tracking_uri is None:
            location = str(self._folder.absolute() / "artifacts")
        return str(client.create_experiment(self._experiment_name, artifact_location=location))

    def _find_run(self, client: Any, experiment_id: str) -> Any:
        """Return the run of the fit that is resumed, or None."""
        if self.resumed_at is None or not self.fit_id:
            return None
        tagged = f"tags.`{_RUN_TAG}` = '{self.fit_id}'"
        return next(iter(client.search_runs([experiment_id], tagged, max_results=1)), None)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Take the values of one step."""
        row = (0 if step is None else step, metrics)
        if self._collected is None:
            self._log([row])
        else:
            self._collected.append(row)

    def log_rows(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Take the values of several steps, in as few requests as MLflow allows."""
        self._collected = []
        try:
            super().log_rows(rows)
            self._log(self._collected)
        finally:
            self._collected = None

    def _log(self, rows: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        if not self.writes_here:
            return
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        values = [
            Metric(_OTHER_CHARACTERS.sub("_", name), value, now, step)
            for step, row in rows
            for name, value in as_numbers(row, self.prefix).items()
        ]
        client = self.experiment
        for first in range(0, len(values), _MOST_METRICS):
            piece = values[first : first + _MOST_METRICS]
            client.log_batch(self._run_id, metrics=piece, **self._synchronous)

    def log_hyperparams(self, params: Any) -> None:
        """Take hyperparameters: a mapping, an argparse.Namespace or a dataclass.

        MLflow keeps the first value of each, as a text; one that is longer than 250 characters is
        cut, and a later value of one that is there is not taken.
        """
        if not self.writes_here:
            return
        from mlflow.entities import Param

        client = self.experiment
        there = client.get_run(self._run_id).data.params
        texts = {
            _OTHER_CHARACTERS.sub("_", str(name)): str(value)[:_LONGEST_VALUE]
            for name, value in flattened(params).items()
        }
        new = [Param(name, text) for name, text in texts.items() if name not in there]
        for first in range(0, len(new), _MOST_PARAMETERS):
            piece = new[first : first + _MOST_PARAMETERS]
            client.log_batch(self._run_id, params=piece, **self._synchronous)

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        """Send the saved checkpoints, as `log_model` says."""
        self._uploads.saved(checkpoint_callback)

    def _send(self, upload: Upload) -> None:
        folder = f"model/checkpoints/{upload.path.stem}"
        client = self.experiment
        send = client.log_artifacts if upload.path.is_dir() else client.log_artifact
        send(self._run_id, str(upload.path), folder)
        about = {"score": upload.score, "aliases": upload.aliases, **upload.saver}
        client.log_dict(self._run_id, about, f"{folder}/metadata.json")

    def finalize(self, status: str) -> None:
        """Send the checkpoints that are kept, after a success, and end the run."""
        if self._experiment is None:
            return
        if status == "success":
            self._uploads.end()
        self._experiment.set_terminated(self._run_id, _STATES.get(status, status))
