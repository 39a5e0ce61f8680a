"""Restarts: finds the last checkpoint of a run that the cluster restarts.

A ModelCheckpoint saves in a new folder each time a script runs, so rank 0 keeps a small file that
names the newest checkpoints of a run: `.stratagem/*.json` in `default_root_dir`.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratagem import storage
from stratagem.checkpoint import first_whole
from stratagem.errors import ConfigurationError, format_value

if TYPE_CHECKING:
    from stratagem.strategies import Strategy

_KEPT = 5
"""The number of checkpoints in the file, since the newest may have been removed meanwhile."""

_fits = itertools.count()
"""Numbers the fits of this process; a script that runs again counts the same numbers."""


class Restarts:
    """Remembers a fit's newest checkpoints, and finds them after a restart.

    `Trainer.fit` creates one if the cluster restarts runs (`ClusterEnvironment.run_id` is not
    None).

    Args:
        strategy: the strategy of the run, after the launch.
        folder: `default_root_dir`; with several nodes, on a shared file system.
        saves: whether the fit saves checkpoints. If False, the file is written only after a
            checkpoint was saved nevertheless, or if an earlier run has left a file.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from stratagem import Lite
        >>> from stratagem.launch import Restarts
        >>> lite = Lite(accelerator="cpu")
        >>> lite.launch()
        >>> Restarts(lite.strategy, Path(tempfile.mkdtemp()), saves=False).begin(None) is None
        True
    """

    def __init__(self, strategy: Strategy, folder: str | Path, *, saves: bool = True) -> None:
        self._strategy = strategy
        self._run_id = strategy.cluster_environment.run_id()
        # The key includes the script's arguments: torchrun gives every run the id "none" by
        # default. Arguments may be any bytes; Python keeps bytes that are not UTF-8 as surrogates.
        arguments = "\0".join([str(self._run_id), *sys.argv])
        key = zlib.crc32(arguments.encode(errors="surrogatepass"))
        name = f"{re.sub(r'[^A-Za-z0-9.-]', '_', str(self._run_id))}-{key:08x}-{next(_fits)}.json"
        self._file = storage.join(storage.join(storage.absolute(folder), ".stratagem"), name)
        self._saves = saves
        self._agents: list[str] = []
        self._checkpoints: list[str] = []

    def begin(self, requested: str | Path | None) -> str | Path | None:
        """Return the checkpoint to resume from: after a restart the run's own, else `requested`.

        Call it once on every rank. Only rank 0 reads files.

        Raises:
            ConfigurationError: if the folder is not writable.
        """
        environment = self._strategy.cluster_environment
        of_ranks = self._strategy.ranks.gather_objects(
            [environment.restart_count(), environment.agent_id()]
        )
        self._agents = sorted({agent for _, agent in of_ranks if agent is not None})
        found, problem = "", ""
        if self._strategy.ranks.is_global_zero:
            try:
                found = self._find(max(count for count, _ in of_ranks), requested)
                if self._saves or storage.exists(self._file):
                    self._write()
            except (OSError, ValueError) as error:
                problem = str(error)
        found, problem = self._strategy.ranks.broadcast([found, problem])
        if problem:
            raise ConfigurationError(
                f"the run {self._run_id!r} may be started again by the cluster, but where its "
                f"checkpoints are cannot be kept in default_root_dir: {problem}. Pass a "
                "default_root_dir that can be written"
            )
        return found or requested

    def saved(self, path: str | Path) -> None:
        """Record a durable checkpoint; called on every rank."""
        if not self._strategy.ranks.is_global_zero:
            return
        newest = str(storage.absolute(path))
        others = [checkpoint for checkpoint in self._checkpoints if checkpoint != newest]
        self._checkpoints = [newest, *others][:_KEPT]
        self._write()

    def _find(self, restart_count: int, requested: str | Path | None) -> str:
        """On rank 0, return the checkpoint to resume from, or "", and print why."""
        agents, checkpoints = self._read()
        if self._agents:
            # When nodes join or leave, the count stays, and another run may have had this ID.
            restarted = not set(self._agents).isdisjoint(agents)
        else:
            restarted = restart_count > 0
        there = [path for path in checkpoints if storage.exists(path)]
        if not restarted:
            if there:
                self._print(
                    "is not the earlier run of that id, since nothing of it is left: it begins "
                    f"anew. To go on from the earlier one, pass ckpt_path={there[0]!r} to fit"
                )
            return ""
        self._checkpoints = there
        for gone in itertools.takewhile(lambda path: path not in there, checkpoints):
            self._print(f"has saved {gone!r}, which is gone")
        check = self._strategy.checkpoint_io.verify_checkpoint
        whole, rejected = first_whole(map(storage.to_location, there), check)
        for text in rejected:
            self._print(f"has saved what cannot be used: {text}")
        argument = "" if requested is None else f"ckpt_path={str(requested)!r}"
        if not whole:
            begins = f"it begins with {argument}" if argument else "it begins anew"
            self._print(f"was started again and has no checkpoint to go on from: {begins}")
            return ""
        # The ckpt_path of fit is the start of the run, which has continued since.
        instead = f", in the place of {argument}" if argument else ""
        self._print(f"was started again: resuming from {whole!r}{instead}")
        return whole

    def _print(self, what: str) -> None:
        print(f"stratagem: the run {self._run_id!r} {what}", file=sys.stderr, flush=True)

    def _read(self) -> tuple[list[str], list[str]]:
        """Return the agents and the checkpoints that the file names; none if it cannot be read."""
        if not storage.exists(self._file):
            return [], []
        data = storage.read(self._file)
        try:
            record = json.loads(data)
            return _strings(record["agents"]), _strings(record["checkpoints"])
        # It may hold anything: broken JSON, another shape, nesting without end.
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            self._print(
                f"has kept where its checkpoints are in {str(self._file)!r}, which cannot be read "
                f"({type(error).__name__}: {error}) and is taken as empty"
            )
            return [], []

    def _write(self) -> None:
        record = {"run": self._run_id, "agents": self._agents, "checkpoints": self._checkpoints}
        # In one step: the run may be killed at any time.
        storage.write(self._file, json.dumps(record, indent=1).encode())


def _strings(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise TypeError(f"{format_value(value)} is no list of paths")
    return value
