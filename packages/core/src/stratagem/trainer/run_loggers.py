"""The loggers of a run: where its values go, decided before anything else writes."""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING, Any

from stratagem.checkpoint.describe import describe_checkpoint
from stratagem.errors import CheckpointError
from stratagem.storage import paths
from stratagem.trainer.resume.find import find_checkpoint
from stratagem.trainer.resume.restarts import Restarts

if TYPE_CHECKING:
    from stratagem.trainer.run import Run

_RUN_ID = re.compile("[0-9a-f]{16}")


def begin(run: Run) -> None:
    """Say which rank writes; let a fit's loggers choose where, or go on where it was resumed.

    Called on every rank, before a callback asks for the folder of the logs. Sets `run_id`,
    `restarts` and `asked` of a fit, and `resumed_from`, where that is known by now.
    """
    trainer, ranks = run.trainer, run.strategy.ranks
    for logger in trainer.loggers:
        logger.on_rank_zero = ranks.is_global_zero
    if run.stage != "fit":
        return
    run.restarts = Restarts(
        run.strategy,
        paths.to_location(trainer.default_root_dir),
        saves=bool(trainer.checkpoint_callbacks),
    )
    run.asked = run.restarts.begin(run.job.ckpt_path)
    run.resumed_from = _find(run)
    former, step = "", None
    if ranks.is_global_zero and run.resumed_from is not None:
        former, step = _former_run(run.resumed_from)
    run.run_id = ranks.broadcast(former or secrets.token_hex(8))
    if ranks.is_global_zero:
        for logger in trainer.loggers:
            logger.begin_run(run.run_id, step)


def log_graph(run: Run) -> None:
    """Hand the model to the loggers, on rank 0."""
    if run.strategy.ranks.is_global_zero:
        for logger in run.trainer.loggers:
            logger.log_graph(run.module)


def _find(run: Run) -> paths.Location | None:
    """Return what a fit resumes from; None: nothing, or the folder to look into is not chosen."""
    asked, savers = run.asked, run.trainer.checkpoint_callbacks
    if asked is None or (
        asked in ("best", "last") and any(saver.dirpath is None for saver in savers)
    ):
        return None
    return find_checkpoint(run.trainer, asked)


def _former_run(path: paths.Location) -> tuple[str, int | None]:
    """Return the run that saved a checkpoint, and after how many steps; "": it does not say."""
    try:
        manifest: Any = describe_checkpoint(path).manifest
    except (CheckpointError, OSError):
        return "", None  # loading it says what is wrong with it
    former = "" if manifest is None else str(manifest.run)
    if not _RUN_ID.fullmatch(former):
        return "", None
    return former, max(0, manifest.global_step or 0)
