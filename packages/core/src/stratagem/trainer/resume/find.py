"""ResumePoint: the checkpoint from which a run resumes, and the meaning of "last" and "best"."""

from __future__ import annotations

import re
import secrets
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratagem.checkpoint.catalog import describe_checkpoint, find_all, first_whole
from stratagem.errors import CheckpointError, CheckpointNotFoundError
from stratagem.storage import paths

if TYPE_CHECKING:
    from stratagem.callbacks import ModelCheckpoint
    from stratagem.launch import Restarts
    from stratagem.trainer.job import Job
    from stratagem.trainer.trainer import Trainer

_RUN_ID = re.compile("[0-9a-f]{16}")


@dataclass(frozen=True)
class ResumePoint:
    """The point from which a run resumes.

    Attributes:
        path: the checkpoint to load. None: the run starts from the beginning.
        run_id: the ID of a fit, the same on every rank. A resumed fit keeps the checkpoint's ID.
        restarts: in a fit that the cluster may restart, records the checkpoints.
    """

    path: paths.Location | None = None
    run_id: str = ""
    restarts: Restarts | None = None

    def of_run(self, run_id: str | None) -> ResumePoint:
        """Return this point with the run ID of a checkpoint, if the checkpoint has one."""
        return replace(self, run_id=run_id) if run_id else self


def find_resume_point(trainer: Trainer, job: Job) -> ResumePoint:
    """Return the resume point of a run, and let a fit's loggers choose their folders.

    Call it on every rank, first in the run: a resumed fit continues in the loggers' folders of the
    original fit, and callbacks read these folders.

    Raises:
        CheckpointNotFoundError: if the checkpoint does not exist.
    """
    requested = job.ckpt_path
    for logger in trainer.loggers:
        logger.on_rank_zero = trainer.is_global_zero
    if job.stage != "fit":
        return ResumePoint(None if requested is None else find_checkpoint(trainer, requested))
    savers = trainer.checkpoint_callbacks
    root = paths.to_location(trainer.options.default_root_dir)
    restarts = None
    if trainer.strategy.cluster_environment.run_id() is not None:
        from stratagem.launch import Restarts  # of stratagem-backend-torch

        restarts = Restarts(trainer.strategy, root, saves=bool(savers))
        requested = restarts.begin(requested)
    run_id = ""
    if requested in ("best", "last") and any(saver.dirpath is None for saver in savers):
        # These save beside the logs, so choose the folder of the logs first. A checkpoint in that
        # folder may name the run to continue; then the loggers begin again with it.
        run_id = _begin_loggers(trainer, None)
        for saver in savers:
            saver.choose_folder(trainer)
    path = None if requested is None else find_checkpoint(trainer, requested)
    if path is not None or not run_id:
        run_id = _begin_loggers(trainer, path, run_id)
    return ResumePoint(path, run_id, restarts)


def _begin_loggers(trainer: Trainer, path: paths.Location | None, run_id: str = "") -> str:
    """Begin the run that saved a checkpoint, or else a new one; return its identity."""
    former, step = "", None
    if trainer.is_global_zero and path is not None:
        former, step = _former_run(path)
    run_id = trainer.ranks.broadcast(former or run_id or secrets.token_hex(8))
    if trainer.is_global_zero:
        for logger in trainer.loggers:
            logger.begin_run(run_id, step)
    return run_id


def _former_run(path: paths.Location) -> tuple[str, int | None]:
    """Return the identity and the steps of the run that saved a checkpoint, if it holds them."""
    try:
        manifest: Any = describe_checkpoint(path).manifest
    except (CheckpointError, OSError):
        return "", None  # loading the checkpoint raises an error that names the fault
    former = "" if manifest is None else str(manifest.run)
    if not _RUN_ID.fullmatch(former):
        return "", None
    return former, max(0, manifest.global_step or 0)


def find_checkpoint(trainer: Trainer, requested: str | Path) -> paths.Location:
    """Return the path for "best", "last" or a path; the same on every rank.

    "last" is the newest complete checkpoint of this Trainer's runs. If these runs have not saved
    any, "last" is the newest checkpoint in the same folders. A checkpoint with weights that are not
    finite is the last choice. Rank 0 searches, and warns of checkpoints that it rejects.

    Raises:
        CheckpointNotFoundError: the search found no checkpoint.
    """
    if requested not in ("best", "last"):
        return paths.to_location(requested)
    savers = trainer.checkpoint_callbacks
    if not savers:
        raise CheckpointNotFoundError(
            f"ckpt_path={str(requested)!r} needs a ModelCheckpoint among the callbacks; there is "
            "none: pass a path"
        )
    found, problem = "", ""
    rejected: list[str] = []
    if trainer.is_global_zero:
        try:
            if requested == "best":
                found = next((c.best_model_path for c in savers if c.best_model_path), "")
            else:
                candidates = _candidates(savers)
                found, rejected = first_whole(
                    [entry.path for entry in candidates],
                    trainer.strategy.checkpoint_io.verify_checkpoint,
                )
                rejected += _of_a_later_run(candidates, found) if found else []
        except OSError as error:
            problem = f"{type(error).__name__}: {error}"
    for text in rejected:
        warnings.warn(f"ckpt_path='last': {text}", stacklevel=2)
    searches = trainer.is_global_zero and not (found or problem)
    advice = _advice_if_none(trainer, savers) if searches else ""
    found, problem, advice = trainer.ranks.broadcast([found, problem, advice])
    folders = ", ".join(paths.relative(c.dirpath) for c in savers if c.dirpath is not None)
    if problem:
        raise CheckpointNotFoundError(
            f"ckpt_path={str(requested)!r}: {folders} cannot be searched: {problem}"
        )
    if not found:
        raise CheckpointNotFoundError(
            f"ckpt_path={str(requested)!r}: this Trainer has saved no checkpoint yet"
            f"{f' in {folders}' if folders else ''}"
            f"{', since a fast_dev_run saves none' if trainer.options.fast_dev_run else ''}: "
            + advice
            if not rejected
            else f"ckpt_path='last': none of the {len(rejected)} checkpoint(s) in {folders} is "
            "whole"
        )
    return paths.to_location(found)


def _of_a_later_run(candidates: list[paths.Entry], found: str) -> list[str]:
    """Return a text that names the newest checkpoint if another run saved it, with fewer steps.

    "last" is the highest step. In a folder of several runs it may be that of an earlier run.
    """
    newest = max(candidates, key=lambda entry: entry.modified).path
    run, highest = _former_run(paths.to_location(found))
    other, step = _former_run(newest)
    if not run or not other or run == other or (step or 0) >= (highest or 0):
        return []
    return [
        f"took {paths.relative(found)!r}, which has the highest step. Another run has saved "
        f"{paths.relative(newest)!r} later, at step {step}: to resume that run, pass this path. "
        "Give each run a folder of its own"
    ]


def _advice_if_none(trainer: Trainer, savers: list[ModelCheckpoint]) -> str:
    """Return what to do if no checkpoint is found; beside logs, each run has its own folder."""
    logs = [Path(logger.log_dir) for logger in trainer.loggers if logger.log_dir]
    own = [saver.dirpath.parent for saver in savers if isinstance(saver.dirpath, Path)]
    versions = {folder.parent for folder in own if folder in logs}
    others = (each for folder in versions for each in folder.glob("*/checkpoints"))
    newest = max(find_all(sorted(others)), key=lambda entry: entry.modified, default=None)
    way = "fit first, or pass a path"
    if newest is not None:
        way = f"the newest one of an earlier run is ckpt_path={paths.relative(newest.path)!r}"
    new = ". A new run saves in a new folder, unless ModelCheckpoint is given dirpath="
    return way + (new if versions else "")


def newest_checkpoint(trainer: Trainer) -> str | None:
    """Return the newest checkpoint that this Trainer has saved and kept, as this rank sees it."""
    savers = trainer.checkpoint_callbacks
    kept = {str(paths.absolute(path)) for saver in savers for path in saver.kept_paths}
    saved = (entry.path for entry in _candidates(savers))
    found = (str(path) for path in saved if str(paths.absolute(path)) in kept)
    return next(found, None)


def _candidates(savers: list[ModelCheckpoint]) -> list[paths.Entry]:
    """Return the checkpoints that "last" may mean, the preferred ones first."""
    # Training cannot go on from weights alone.
    savers = [c for c in savers if not c.save_weights_only] or savers
    found = find_all(c.dirpath for c in savers if c.dirpath is not None)
    own = {str(paths.absolute(path)) for c in savers for path in c.kept_paths}
    return sorted(found, key=lambda entry: str(paths.absolute(entry.path)) not in own)
