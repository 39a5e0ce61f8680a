"""Of combined loaders, each of two ranks reads its part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[1] / "scripts" / "combined_loader_ranks.py"

READ = {
    "min_size": [
        [[[0, 2], [100, 102]]],
        [[[1, 3], [101, 103]]],
    ],
    "max_size": [
        [[[0, 2], [100, 102]], [[4, 6], None]],
        [[[1, 3], [101, 103]], [[5, 7], None]],
    ],
    "max_size_cycle": [
        [[[0, 2], [100, 102]], [[4, 6], [100, 102]]],
        [[[1, 3], [101, 103]], [[5, 7], [101, 103]]],
    ],
    "sequential": [
        [[0, 2], [4, 6], [100, 102]],
        [[1, 3], [5, 7], [101, 103]],
    ],
}


def test_of_combined_loaders_each_rank_reads_its_part(run_script: Any, tmp_path: Path) -> None:
    run_script(SCRIPT.read_text(), timeout=240)
    assert json.loads((tmp_path / "results.json").read_text()) == READ
