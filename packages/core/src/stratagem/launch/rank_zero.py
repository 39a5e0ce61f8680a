"""Functions that run on rank 0 only, for code without a Trainer. Standard library only."""

from __future__ import annotations

import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_VARIABLES = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK", "OMPI_COMM_WORLD_RANK")

logger = logging.getLogger("stratagem")


class RankZeroOnly:
    """A decorator: the function runs on rank 0 only.

    On the other ranks it returns None.

    Attributes:
        rank: this process's rank. By default, each call reads it from the launcher's environment
            variables; without them the rank is 0.

    Example:
        >>> from stratagem.launch.rank_zero import rank_zero_only
        >>> @rank_zero_only
        ... def download():
        ...     return "done"
        >>> download()
        'done'
    """

    _rank: int | None = None

    @property
    def rank(self) -> int:
        """This process's rank."""
        if self._rank is not None:
            return self._rank
        given = (os.environ.get(name, "") for name in _VARIABLES)
        return next((int(text) for text in given if text.isdigit()), 0)

    @rank.setter
    def rank(self, rank: int | None) -> None:
        self._rank = rank

    def __call__(
        self, function: Callable[Arguments, Result], default: Result | None = None
    ) -> Callable[Arguments, Result | None]:
        """Return a function that calls `function` on rank 0, and returns `default` elsewhere."""

        @functools.wraps(function)
        def on_rank_zero(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result | None:
            return function(*args, **kwargs) if self.rank == 0 else default

        return on_rank_zero


rank_zero_only = RankZeroOnly()


@rank_zero_only
def rank_zero_info(message: object, *args: object, **options: Any) -> None:
    """Log an INFO message on rank 0; without logging handlers, print it to stderr.

    Args:
        message, *args, **options: the arguments of `logging.Logger.info`.
    """
    if logger.hasHandlers():
        logger.info(message, *args, **{"stacklevel": 3, **options})
    else:
        print(str(message) % args if args else message, file=sys.stderr)


@rank_zero_only
def rank_zero_debug(message: object, *args: object, **options: Any) -> None:
    """Log a DEBUG message on rank 0.

    Args:
        message, *args, **options: the arguments of `logging.Logger.debug`.
    """
    logger.debug(message, *args, **{"stacklevel": 3, **options})


@rank_zero_only
def rank_zero_warn(
    message: str | Warning, category: type[Warning] = UserWarning, stacklevel: int = 3
) -> None:
    """Issue a warning on rank 0."""
    warnings.warn(message, category, stacklevel=stacklevel)
