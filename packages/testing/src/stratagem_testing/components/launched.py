"""What programs do whose launcher is tested: each function here is called on every rank."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from stratagem.lite import Lite
from stratagem_testing.components.component import Component
from stratagem_testing.surroundings import Surroundings

PLANTED = "planted by the conformance kit"
GIVEN = "CONFORMANCE_KIT_GIVEN"
"""A variable that the program sets before it launches."""
_VARIABLES = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
_calls = 0


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The launch that a program makes; a JSON file.

    Attributes:
        what: "note", "return", "hostile", "fail", "fail late", "killed" or "wait".
        kind: the launcher, by name or place.
        devices: the number of ranks.
        folder: the folder where processes write their findings.
        new_processes: whether the program itself is not a rank.
        search_path: folders that are searched for modules before others.
    """

    what: str
    kind: str
    devices: int
    folder: str
    new_processes: bool
    search_path: tuple[str, ...] = ()

    def text(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))


def main(path: str) -> None:
    """Launch the function that a file names; the program calls it on each of its ranks."""
    warnings.simplefilter("ignore")
    told = json.loads(Path(path).read_text())
    sys.path[:0] = told["search_path"]
    launch = Launch(**told)
    folder = Path(launch.folder)
    for number in range(2 if launch.what == "note" else 1):
        before = dict(os.environ)
        lite = _lite(launch)
        if launch.what == "note":
            os.environ[GIVEN] = before[GIVEN] = PLANTED
            around = Surroundings.now()
            four = {"tensor": torch.tensor([4.0])}
            returned = lite.launch(note, f"{folder}/rank{number}", 1, "two", three=3.0, four=four)
            changed = sorted(k for k in before.keys() | os.environ.keys()
                             if before.get(k) != os.environ.get(k))  # fmt: skip
            left = around.changes() if launch.new_processes and not changed else []
            _note(f"{folder}/program{number}", changed=changed, returned=returned, left=left)
            if changed and launch.new_processes:
                break  # a mistake, by which the next launch may wait for ranks that do not come
        elif launch.what == "return":
            returned = lite.launch(returns)
            values = [returned["rank"], returned["text"], returned["tensor"].tolist()]
            _note(f"{folder}/returned", returned=values)
        else:
            lite.launch(_FUNCTIONS[launch.what], str(folder))


def _lite(launch: Launch) -> Lite:
    component = Component(kind="launcher", name=launch.kind)
    # A launcher that starts no ranks is not selected: a front end finds it by itself.
    is_found = not getattr(component.spec, "starts_ranks", True)
    lite = Lite(
        accelerator="cpu",
        strategy="ddp" if launch.devices > 1 or "RANK" in os.environ else "single_device",
        devices=launch.devices,
        plugins=None if is_found else [component.given],
    )
    chosen = lite.plan.launcher
    if is_found and chosen.name != launch.kind:
        raise RuntimeError(f"the launcher is {chosen.name!r} ({chosen.why}), not {launch.kind!r}")
    return lite


def note(lite: Lite, place: str, *args: Any, four: dict[str, Any], **kwargs: Any) -> float:
    """Note rank, process and arguments, and print more than a pipe holds; return 0.0."""
    global _calls
    _calls += 1
    calls, _calls = _calls, 0
    variables = {name: os.environ.get(name) for name in (*_VARIABLES, GIVEN)}
    arguments = [args, {**kwargs, "four": four["tensor"].tolist()}]
    _note(place, variables=variables, arguments=arguments, calls=calls, folder=str(Path.cwd()))
    sys.stdout.write(("x" * 99 + "\n") * 2000)
    lite.barrier()
    return 0.0


def returns(lite: Lite) -> dict[str, Any]:
    """Return weights-only-safe data."""
    return {"rank": lite.global_rank, "text": "text", "tensor": torch.tensor([1.0, 2.0])}


class _Hostile:
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (f"{self.folder}/executed",)


def hostile(lite: Lite, folder: str) -> Any:
    """Return an object that executes code when it is unpickled."""
    return _Hostile(folder)


def fails_here(lite: Lite, folder: str) -> None:
    """Let the last rank raise while the others compute, where no lost connection ends them."""
    if lite.global_rank == lite.world_size - 1:
        _note(f"{folder}/failed", at=time.time())
        raise ValueError(PLANTED)
    until = time.monotonic() + 60.0
    while time.monotonic() < until:
        time.sleep(0.05)


def fails_late(lite: Lite, folder: str) -> None:
    """Let the last rank raise when the others have returned."""
    lite.barrier()
    if lite.global_rank == lite.world_size - 1:
        time.sleep(1.5)
        raise ValueError(PLANTED)


def killed(lite: Lite, folder: str) -> None:
    """Let the last rank be killed while the others wait for it."""
    if lite.global_rank == lite.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    lite.barrier()


def wait(lite: Lite, folder: str) -> None:
    """Wait for the end, and note a signal that comes in between."""
    before = signal.signal(signal.SIGUSR1, lambda *_: _note(f"{folder}/signal"))
    _note(f"{folder}/waiting")
    until = time.monotonic() + 60.0
    while time.monotonic() < until and not Path(f"{folder}/end").exists():
        time.sleep(0.05)
    signal.signal(signal.SIGUSR1, before)


_FUNCTIONS = {
    **{"hostile": hostile, "fail": fails_here, "fail late": fails_late},
    **{"killed": killed, "wait": wait},
}


def _note(place: str, **what: Any) -> None:
    """Write a file of this process."""
    rank = os.environ.get("RANK")
    told = {"pid": os.getpid(), "rank": None if rank is None else int(rank), **what}
    temporary = Path(f"{place}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(told))
    temporary.replace(f"{place}.{os.getpid()}.json")
