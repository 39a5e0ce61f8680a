"""Optimizers with 8-bit states: resumed bit for bit, or refused before training."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures import run_file

SCRIPT = Path(__file__).parent / "scripts" / "packed_states.py"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torchao", "bitsandbytes"])
@pytest.mark.parametrize(
    ("name", "ranks"),
    [("single_device", 1), ("ddp", 2), ("ddp_sharded", 2), ("fsdp", 2), ("mesh", 2)],
)
def test_states_are_resumed_bit_for_bit_or_refused(
    name: str, ranks: int, kind: str, tmp_path: Path
) -> None:
    pytest.importorskip(kind)
    env = {"TORCHDYNAMO_DISABLE": "1"}  # torchao would compile its step for a minute
    shown = run_file(SCRIPT, str(tmp_path), name, str(ranks), kind, folder=tmp_path, env=env).stdout
    if name in ("fsdp", "mesh"):
        assert f"{kind}.optim.AdamW8bit packs its state in a form that cannot be divided" in shown
        assert "use stratagem_extras.optimizers.AdamW8bit, whose 8-bit state is sharded" in shown
    elif (name, kind) == ("ddp_sharded", "torchao"):
        assert "torchao.optim.AdamW8bit packs its state in a form that ranks cannot send" in shown
        assert "use stratagem_extras.optimizers.AdamW8bit, or strategy='ddp'" in shown
    else:
        assert "single_file: True" in shown
        assert "directory: True" in shown
