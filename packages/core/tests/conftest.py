"""Fixtures for the tests of this package: scripts, and a clean global state."""

from script_fixtures import _global_state, run_script, script_environment

__all__ = ["_global_state", "run_script", "script_environment"]
