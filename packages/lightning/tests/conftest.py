"""The fixtures that these tests share with those of core."""

from __future__ import annotations

from fixtures import (
    _global_state as _global_state,
    run_script as run_script,
    script_environment as script_environment,
)
