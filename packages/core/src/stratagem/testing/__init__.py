"""What authors of components run against theirs.

`StrategyConformance` needs pytest (`pip install stratagem-core[testing]`); docs/testing-a-plugin.md
shows how it is adopted and what each check means.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stratagem.testing.strategies.conformance import StrategyConformance

__all__ = ["StrategyConformance"]


def __getattr__(name: str) -> Any:
    # `stratagem checkpoint durability` is in here, too, and needs no pytest.
    if name != "StrategyConformance":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from stratagem.testing.strategies.conformance import StrategyConformance

    return StrategyConformance
