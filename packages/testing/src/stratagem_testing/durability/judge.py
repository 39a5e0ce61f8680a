"""Judge: what runs in the process that looks at what a scenario has left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stratagem.checkpoint import CheckpointIO
from stratagem.errors import CheckpointNotFoundError
from stratagem_testing.child import Report
from stratagem_testing.durability.saver import NAME, Model, Subject, numbers_of


def judge(subject: Subject, folder: Path, durable: int, begun: int, report: Report) -> None:
    """Report the checkpoint's number, or its defect; leave the folder empty.

    Args:
        subject: the format under test.
        folder: the folder of its checkpoints.
        durable: the number of the last durable save; this checkpoint or a later one must exist.
        begun: the number of the last save that was started.
        report: takes `number`, or `wrong`.
    """
    io, path = subject.make(), folder / NAME
    try:
        number = the_number(io, path)
    except CheckpointNotFoundError as error:
        report(wrong=f"missing: {error}")
        return
    except MixedError as error:
        report(wrong=f"mixed: {error}")
        return
    # Loading a damaged checkpoint may raise any error: this check is about that.
    except Exception as error:
        report(wrong=f"corrupt: {type(error).__name__}: {error}")
        return
    if not durable <= number <= begun:
        hint = " (each save is to wait for the one before)" if subject.asynchronous else ""
        said = f"stale: it holds {number}; {durable} was durable, {begun} was begun last"
        report(wrong=f"{said}{hint}")
        return
    try:
        wrong = _next_one(io, path, subject, begun + 1)
    # Nothing is broken any more: whatever the next save raises is wrong.
    except Exception as error:
        wrong = f"unusable: {type(error).__name__}: {error}"
    if wrong:
        report(wrong=wrong)
        return
    report(number=number)


def _next_one(io: CheckpointIO, path: Path, subject: Subject, number: int) -> str:
    """Save once more, as the next run would; return what is wrong then."""
    io.remove_checkpoint(path)
    model = Model(subject.megabytes)
    model.train(number)
    io.save_checkpoint(model.checkpoint(number, shards=io.supports_shards), path)
    io.wait()
    if (found := the_number(io, path)) != number:
        return f"stale: {number} was saved next, and {found} was there"
    io.remove_checkpoint(path)
    io.wait()
    if left := sorted(file.name for file in path.parent.iterdir()):
        return (
            f"leftover: {', '.join(left)}. What a killed save was writing is still there after the "
            "next save and a removal: let the next save of a path use or remove it"
        )
    return ""


class MixedError(Exception):
    """A checkpoint holds numbers of several saves."""


def the_number(io: CheckpointIO, path: Path) -> int:
    """Return the number of the checkpoint at a path.

    Raises:
        MixedError: it holds several.
    """
    checkpoint = io.load_checkpoint(path)
    numbers = set(_numbers(checkpoint["state_dict"]))
    numbers.add(checkpoint["number"])
    numbers.add(int(checkpoint["text"].removeprefix("step ")))
    if len(numbers) > 1:
        raise MixedError(f"it holds the numbers {sorted(numbers)}")
    missing = Model(0).tensors.keys() - checkpoint["state_dict"].keys()
    if missing:
        raise MixedError(f"it lacks {sorted(missing)}")
    return int(numbers.pop())


def _numbers(state: dict[str, Any]) -> list[float]:
    return [number for name, tensor in state.items() for number in numbers_of(name, tensor)]
