"""docs/reference/strategies.md has what the specs of our distributions say."""

from __future__ import annotations

import runpy
from pathlib import Path

from stratagem.discovery.registry import get_registry

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = "packages/core/scripts/strategies_table.py"


def test_strategy_tables_agree_with_the_specs() -> None:
    script = runpy.run_path(str(ROOT / SCRIPT))
    guide = script["GUIDE"].read_text()
    assert guide == script["with_tables"](guide, get_registry()), f"regenerate: python {SCRIPT}"


def test_every_strategy_of_ours_is_in_a_table() -> None:
    script = runpy.run_path(str(ROOT / SCRIPT))
    text = "\n".join(script["tables"](get_registry()).values())
    ours = [c for c in get_registry().candidates("strategy") if c.distribution in script["OURS"]]
    assert [c.spec.name for c in ours if f"`{c.spec.name}`" not in text] == []
