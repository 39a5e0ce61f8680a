"""What holds for a run of the tests as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest


def _is_gpu_session(config: pytest.Config) -> bool:
    return str(config.option.markexpr) == "gpu"


def pytest_sessionstart(session: pytest.Session) -> None:
    """Let `-m gpu` fail where there is no GPU: tests that are skipped would look like a success."""
    if not _is_gpu_session(session.config) or session.config.option.collectonly:
        return
    import torch

    if not torch.cuda.is_available():
        raise pytest.UsageError(
            "-m gpu runs the tests that need a GPU, and torch "
            f"{torch.__version__} finds none here: `nvidia-smi` and `stratagem doctor` say why"
        )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without such a test: a machine with a GPU may lack what others import."""
    if not _is_gpu_session(config) or collection_path.suffix != ".py":
        return None
    return "mark.gpu" not in collection_path.read_text() or None
