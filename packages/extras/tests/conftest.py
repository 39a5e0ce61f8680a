"""The fixtures of these tests, which several distributions share."""

from __future__ import annotations

from fixtures import (
    _global_state as _global_state,
    run_script as run_script,
    script_environment as script_environment,
)
