"""What components of several kinds have to do: travel to the processes that a launch starts."""

from __future__ import annotations

import pickle
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from stratagem.discovery import get_registry
from stratagem_testing.components.bench import Bench, brief


def pickled(bench: Bench) -> None:
    """It can be pickled before a run, because "spawn" and cluster launchers pickle it."""
    made = bench.make()
    if hasattr(made, "bind"):
        on = bench.component.options.get("accelerator", "cpu")
        made.bind(get_registry().find("accelerator", on).spec.build())
    pickler: Any = import_module("cloudpickle") if find_spec("cloudpickle") else pickle
    error = bench.error(lambda: pickle.loads(pickler.dumps(made)))
    assert error is None, (
        f"it cannot be pickled ({brief(error)}): make locks, files, connections and threads where "
        "they are used first, on the rank, and not in __init__"
    )
