"""The fixtures of core's tests, which stand in `shared`, where other distributions find them."""

from __future__ import annotations

from fixtures import (
    _global_state as _global_state,
    one_thread as one_thread,
    run_script as run_script,
    script_environment as script_environment,
)
