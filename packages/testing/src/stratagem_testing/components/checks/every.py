"""What components of several kinds have to do: travel to the processes that a launch starts."""

from __future__ import annotations

import pickle
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from stratagem_testing.components.bench import Bench, brief
from stratagem_testing.components.check import check

KINDS = ("accelerator", "precision", "checkpoint_io", "cluster_environment", "logger", "callback")


def _pickled(bench: Bench) -> None:
    """It can be pickled before a run, because "spawn" and cluster launchers pickle it."""
    made = bench.make()
    if hasattr(made, "bind"):
        made.bind(bench.lite().strategy.accelerator)
    pickler: Any = import_module("cloudpickle") if find_spec("cloudpickle") else pickle
    error = bench.error(lambda: pickle.loads(pickler.dumps(made)))
    assert error is None, (
        f"it cannot be pickled ({brief(error)}): make locks, files, connections and threads where "
        "they are used first, on the rank, and not in __init__"
    )


for _kind in KINDS:
    check(_kind, "life/pickled")(_pickled)
