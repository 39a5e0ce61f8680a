"""NeptuneLogger: values and hyperparameters in Neptune."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from stratagem_extras.loggers.sdk_logger import SDKLogger
from stratagem_extras.loggers.uploads import Upload, Uploads
from stratagem_extras.loggers.values import as_numbers, flattened

if TYPE_CHECKING:
    from torch import nn

    from stratagem.callbacks import ModelCheckpoint


class NeptuneLogger(SDKLogger):
    """Sends values to a Neptune server by the package neptune 1, or writes them to `.neptune`.

    Neptune's own service has ended; this logger is for self-hosted servers, and for
    `mode="offline"`. `experiment` is the run that `neptune.init_run` returns. A fit's run has the
    fit's id as its custom id, so that Neptune continues the same run after a resume.

    Args:
        api_key: None: NEPTUNE_API_TOKEN.
        project: "workspace/name"; None: NEPTUNE_PROJECT.
        name: the displayed name of the run.
        run: an existing run object.
        log_model_checkpoints: send the kept checkpoints at the end of training. Local checkpoints
            only.
        prefix: the namespace of all values in the run.
        mode: "offline" sends no data; None: NEPTUNE_MODE, or else "async".
        **kwargs: arguments of `neptune.init_run`, such as `tags` and `with_id`.

    Raises:
        MissingPackageError: neptune is not installed.

    Example:
        >>> from stratagem.loggers import NeptuneLogger
        >>> NeptuneLogger.extra  # pip install 'stratagem-core[neptune]'
        'neptune'
        >>> logger = NeptuneLogger(project="us/mnist", mode="offline")    # doctest: +SKIP
    """

    package = "neptune"
    extra = "neptune"

    def __init__(
        self,
        *,
        api_key: str | None = None,
        project: str | None = None,
        name: str | None = None,
        run: Any = None,
        log_model_checkpoints: bool = True,
        prefix: str = "training",
        mode: Literal["async", "sync", "offline", "read-only", "debug"] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(prefix)
        self.name = name
        self._experiment = run
        given = {"api_token": api_key, "project": project, "name": name, "mode": mode}
        self._init: dict[str, Any] = {
            key: value for key, value in given.items() if value is not None
        } | kwargs
        self._uploads = Uploads(log_model_checkpoints, self._send)

    @property
    def version(self) -> str | None:  # type: ignore[override]  # known once the run is
        """The run's custom id, which is the fit's id; None without one."""
        return self.fit_id or None

    @property
    def log_dir(self) -> str:
        """None: values are sent to a server."""
        return ""

    def _start(self) -> Any:
        import neptune

        own = {"custom_run_id": self.fit_id} if self.fit_id else {}
        named = self._init.keys() & {"with_id", "custom_run_id"}
        return neptune.init_run(**({} if named else own), **self._init)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Take the values of one step."""
        for name, value in as_numbers(metrics).items():
            self.experiment[f"{self.prefix}/{name}"].append(value, step=step)

    def log_hyperparams(self, params: Any) -> None:
        """Take hyperparameters: a mapping, an argparse.Namespace or a dataclass."""
        for name, value in flattened(params).items():
            self.experiment[f"{self.prefix}/hyperparams/{name}"] = str(value)

    def log_graph(self, model: nn.Module, input_array: Any = None) -> None:
        """Take the text of a model."""
        self.experiment[f"{self.prefix}/model/summary"] = str(model)

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        """Note the saved checkpoint."""
        self._uploads.saved(checkpoint_callback)

    def _send(self, upload: Upload) -> None:
        folder = f"{self.prefix}/model/checkpoints/{upload.path.stem}"
        self.experiment[folder].upload(str(upload.path))
        if upload.score is not None and "best" in upload.aliases:
            self.experiment[f"{self.prefix}/model/best_model_score"] = upload.score

    def save(self) -> None:
        """Wait until all logged values are on the disk."""
        if self._experiment is not None:
            self._experiment.wait(disk_only=True)

    def finalize(self, status: str) -> None:
        """Send the checkpoints that are kept, and how the run has ended."""
        if self._experiment is None:
            return
        if status == "success":
            self._uploads.end()
        self._experiment[f"{self.prefix}/status"] = status
        self.save()
