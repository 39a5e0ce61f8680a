"""Text of files and peers is escaped and bounded wherever it is shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from program import Program
from torch import nn

from stratagem.checkpoint import CheckpointIO
from stratagem.errors import CheckpointError, CheckpointMismatchError
from stratagem.lite import Lite
from stratagem.state.state_dict import load_named_state, load_weights, named_state
from stratagem_torch.distributed.diagnosis import status_exchange
from stratagem_torch.distributed.diagnosis.status_exchange import RankStatus, Survey

HOSTILE = "\x1b]0;title\x07\x1b[2J\r\nstratagem: all is well\u202e"
LONG = "x" * 5_000_000


def load_group(name: str) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = named_state(optimizer, model)
    state["param_groups"][0]["params"] = [name]
    load_named_state(optimizer, model, state)


def load_option(name: str) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = named_state(optimizer, model)
    state["param_groups"][0][name] = state["param_groups"][0].pop("lr")
    load_named_state(optimizer, model, state)


LOADS: dict[str, Callable[[str], None]] = {
    "weight": lambda name: load_weights(nn.Linear(2, 1), {name: torch.ones(1)}),
    "group": load_group,
    "option": load_option,
}


@pytest.mark.parametrize("text", [HOSTILE, LONG], ids=["hostile", "long"])
@pytest.mark.parametrize("place", LOADS)
def test_a_name_in_a_checkpoint_is_escaped_and_cut(place: str, text: str) -> None:
    with pytest.raises(CheckpointMismatchError) as caught:
        LOADS[place](text)
    message, _, _ = str(caught.value).partition("\nFor an explanation: ")
    assert message.isprintable()
    assert len(message) < 2000
    assert ("xxx..." if text is LONG else r"\x1b]0;title\x07\x1b[2J\r\nstratagem: ") in message


def test_every_message_about_a_checkpoint_is_escaped_and_bounded() -> None:
    message = str(CheckpointError(HOSTILE + LONG))
    assert message.isprintable()
    assert len(message) < 11_000


def test_inspect_escapes_text_of_a_checkpoint(tmp_path: Path) -> None:
    checkpoint: dict[str, Any] = {HOSTILE: 1, "run": HOSTILE, LONG: 2}
    io: CheckpointIO = Lite(accelerator="cpu").strategy.checkpoint_io
    io.save_checkpoint(checkpoint, tmp_path / "one.ckpt")
    said = Program(tmp_path)("checkpoint", "inspect", str(tmp_path / "one.ckpt")).stdout
    assert said.replace("\n", "").isprintable()
    assert "\nstratagem: all is well" not in said
    assert r"\x1b]0;title\x07\x1b[2J" in said


def test_status_text_of_another_rank_is_escaped() -> None:
    status = RankStatus(0, HOSTILE, HOSTILE, HOSTILE, f"Traceback\n{HOSTILE}")
    encoded = status_exchange._encode(Survey({0: status}, error=status)).encode()
    survey = status_exchange._decode(encoded)
    assert str(survey.answers[0]).isprintable()
    assert survey.error is not None
    assert survey.error.failure.startswith("Traceback\n\\x1b]0;title")
