"""WandbLogger: values and checkpoints in Weights & Biases."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from stratagem.errors import ConfigurationError
from stratagem.loggers import as_mapping, as_plain, local_folder
from stratagem_extras.loggers.sdk_logger import SDKLogger
from stratagem_extras.loggers.uploads import Upload, Uploads
from stratagem_extras.loggers.values import as_numbers

if TYPE_CHECKING:
    from torch import nn

    from stratagem.callbacks import ModelCheckpoint

_STEP = "trainer/global_step"
"""The name of what values are plotted over."""
_MEDIA = {"log_image": "Image", "log_audio": "Audio", "log_video": "Video"}


class WandbLogger(SDKLogger):
    """Sends values to Weights & Biases, or writes them to `save_dir/wandb` for `wandb sync`.

    `experiment` is the run that `wandb.init` returns. A fit's run has the fit's own id, so that a
    resumed fit continues the same run. If a run is already active, the logger uses this run.

    Args:
        name: the displayed name of the run; None: a name chosen by wandb.
        save_dir: the local folder.
        version: id of the run; an existing run with this id is continued. None: the id of the fit.
        offline: send no data; the same as WANDB_MODE=offline.
        dir: another name for `save_dir`.
        id: another name for `version`.
        project: None: WANDB_PROJECT, or else "stratagem_logs".
        log_model: checkpoints as artifacts: "all": each checkpoint after its save; True: the kept
            checkpoints, at the end of training; False: no checkpoints. Local checkpoints only.
        experiment: an existing run object.
        prefix: prepended to each name, with a "-".
        checkpoint_name: name of the artifact; None: "model-" and the run's id.
        **kwargs: arguments of `wandb.init`, such as `tags` and `entity`.

    Raises:
        MissingPackageError: wandb is not installed.
        ConfigurationError: offline runs cannot send checkpoints; or `save_dir` is a URL.

    Example:
        >>> from stratagem.loggers import WandbLogger
        >>> WandbLogger.extra  # pip install 'stratagem-core[wandb]'
        'wandb'
        >>> logger = WandbLogger(project="mnist", offline=True)    # doctest: +SKIP
    """

    package = "wandb"
    extra = "wandb"
    default_project: ClassVar[str] = "stratagem_logs"

    def __init__(
        self,
        name: str | None = None,
        save_dir: str | Path = ".",
        version: str | None = None,
        *,
        offline: bool = False,
        dir: str | Path | None = None,
        id: str | None = None,
        project: str | None = None,
        log_model: bool | Literal["all"] = False,
        experiment: Any = None,
        prefix: str = "",
        checkpoint_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(prefix)
        if offline and log_model:
            raise ConfigurationError(
                f"WandbLogger(offline=True, log_model={log_model!r}): checkpoints are sent to a "
                "server, and offline nothing is; expected one of the two"
            )
        self._folder = local_folder(type(self).__name__, save_dir if dir is None else dir)
        self.save_dir = str(self._folder)
        self.project = project or os.environ.get("WANDB_PROJECT") or self.default_project
        self._experiment = experiment
        self._id = version or id
        self._checkpoint_name = checkpoint_name
        self._init = {"name": name, "resume": "allow", **kwargs}
        if offline:
            self._init["mode"] = "offline"
        self._uploads = Uploads(log_model, self._send)

    @property
    def name(self) -> str:  # type: ignore[override]  # read-only: it follows from the project
        """The project."""
        return self.project

    @property
    def version(self) -> str | None:  # type: ignore[override]  # known once the run is
        """The run's id, or None before it has one."""
        return self._id if self._experiment is None else str(self._experiment.id)

    @property
    def log_dir(self) -> str:
        """The folder that checkpoints go into: `save_dir/project/id`; it begins the run."""
        return str(self._folder / self.name / str(self.experiment.id))

    def _start(self) -> Any:
        import wandb

        if wandb.run is not None and self._id is None:
            warnings.warn(
                "WandbLogger: a run of wandb is under way already, and is logged to: call "
                "wandb.finish() first, or pass version=, for a run of its own",
                stacklevel=4,
            )
            run = wandb.run
        else:
            options = {"dir": self.save_dir, "project": self.project, **self._init}
            run = wandb.init(id=self._id or self.fit_id or None, **options)
            self._warn_of_repeated(run)
        run.define_metric(_STEP)
        run.define_metric("*", step_metric=_STEP, step_sync=True)
        return run

    def _warn_of_repeated(self, run: Any) -> None:
        """Warn of steps that the run has already, and that the resumed fit takes again."""
        last = run.summary.get(_STEP) if self.resumed_at is not None and run.resumed else None
        if isinstance(last, (int, float)) and last >= (self.resumed_at or 0):
            warnings.warn(
                f"WandbLogger: the run {run.id!r} has values up to step {last:.0f}, and the fit "
                f"resumes at step {self.resumed_at}. W&B keeps them, so that the steps from there "
                "on will be there twice: pass id= for a run of its own",
                stacklevel=5,
            )

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Take the values of one step."""
        self._log(as_numbers(metrics, self.prefix), step)

    def _log(self, values: Mapping[str, Any], step: int | None) -> None:
        self.experiment.log({**values} if step is None else {**values, _STEP: step})

    def log_hyperparams(self, params: Any) -> None:
        """Take hyperparameters: a mapping, an argparse.Namespace or a dataclass."""
        self.experiment.config.update(as_plain(as_mapping(params)), allow_val_change=True)

    def watch(
        self,
        model: nn.Module,
        log: str | None = "gradients",
        log_freq: int = 100,
        log_graph: bool = True,
    ) -> None:
        """Log gradients, parameters or both ("all") of a model at intervals; see `wandb.watch`."""
        self.experiment.watch(model, log=log, log_freq=log_freq, log_graph=log_graph)

    def log_graph(self, model: nn.Module, input_array: Any = None) -> None:
        """Send nothing: `watch` takes a model's graph as it runs."""

    def log_table(
        self,
        key: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Send a table of rows, or of a pandas.DataFrame, that may hold texts and media."""
        import wandb

        table = wandb.Table(columns=columns, data=data, dataframe=dataframe)
        self._log({key: table}, step)

    log_text = log_table

    def log_image(
        self, key: str, images: Sequence[Any], step: int | None = None, **kwargs: Any
    ) -> None:
        """Send pictures (tensors, arrays, PIL images, paths); see `_log_media`."""
        self._log_media("log_image", "images", key, images, step, kwargs)

    def log_audio(
        self, key: str, audios: Sequence[Any], step: int | None = None, **kwargs: Any
    ) -> None:
        """Send sounds (arrays or paths); see `_log_media`."""
        self._log_media("log_audio", "audios", key, audios, step, kwargs)

    def log_video(
        self, key: str, videos: Sequence[Any], step: int | None = None, **kwargs: Any
    ) -> None:
        """Send videos (tensors, arrays or paths); see `_log_media`."""
        self._log_media("log_video", "videos", key, videos, step, kwargs)

    def _log_media(
        self,
        method: str,
        argument: str,
        key: str,
        items: Sequence[Any],
        step: int | None,
        options: Mapping[str, Sequence[Any]],
    ) -> None:
        """Send media; `options` of `wandb.Image` and its kin, a list each, such as `caption`.

        Raises:
            ConfigurationError: an argument is not a list, or lists have different lengths.
        """
        import wandb

        if not isinstance(items, (list, tuple)):
            raise ConfigurationError(
                f"WandbLogger.{method}({argument}={items!r:.80}): expected a list of {argument}, "
                f"received a {type(items).__name__}"
            )
        for name, values in options.items():
            if len(values) != len(items):
                raise ConfigurationError(
                    f"WandbLogger.{method}({name}={values!r:.80}): expected {len(items)} item(s), "
                    f"one for each of {argument}, received {len(values)}"
                )
        make = getattr(wandb, _MEDIA[method])
        made = [
            make(item, **{name: values[number] for name, values in options.items()})
            for number, item in enumerate(items)
        ]
        self._log({key: made}, step)

    def use_artifact(self, artifact: str, artifact_type: str | None = None) -> Any:
        """Say that this run uses an artifact ("name:alias"), and return it."""
        return self.experiment.use_artifact(artifact, type=artifact_type)

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        """Send the saved checkpoints, as `log_model` says."""
        self._uploads.saved(checkpoint_callback)

    def _send(self, upload: Upload) -> None:
        import wandb

        artifact = wandb.Artifact(
            name=self._checkpoint_name or f"model-{self.experiment.id}",
            type="model",
            metadata={
                "score": upload.score,
                "original_filename": upload.path.name,
                "ModelCheckpoint": upload.saver,
            },
        )
        if upload.path.is_dir():
            artifact.add_dir(str(upload.path))
        else:
            artifact.add_file(str(upload.path), name="model.ckpt")
        self.experiment.log_artifact(artifact, aliases=upload.aliases)

    def finalize(self, status: str) -> None:
        """Send the checkpoints that are kept, after a success; the run ends with the process."""
        if self._experiment is not None and status == "success":
            self._uploads.end()
