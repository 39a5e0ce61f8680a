"""The position of each rank, from the stacks that faulthandler has printed."""

from __future__ import annotations

import re
from collections.abc import Iterator

_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')
_OF_TORCH_OR_PYTHON = re.compile(r"/torch/|/lib/python3\.\d+/(?!site-packages/|dist-packages/)")
_OF_STRATAGEM = re.compile(r"/(stratagem|stratagem_testing)/")
_CHECK = re.compile(r"/stratagem_testing/strategies/rank\.py$")


def waiting(stderr: str) -> list[str]:
    """Return the innermost call of the strategy in each main thread's stack, or else of Stratagem.

    Args:
        stderr: the output of the ranks; each stack has its most recent call first.

    Example:
        >>> waiting('''Thread 0x01 (most recent call first):
        ...   File "/env/torch/distributed/distributed_c10d.py", line 5356 in barrier
        ...   File "/plugins/mine.py", line 76 in release
        ...   File "/env/stratagem_testing/strategies/rank.py", line 123 in _run
        ... ''')
        ['in barrier, called by release (/plugins/mine.py, line 76)']
    """
    return list(dict.fromkeys(_waiting(stderr)))


def _waiting(stderr: str) -> Iterator[str]:
    for stack in re.split(r"^.*\(most recent call first\):$", stderr, flags=re.MULTILINE)[1:]:
        frames = [match.groups() for match in _FRAME.finditer(stack)]
        ends = [i for i, (file, _, name) in enumerate(frames) if _CHECK.search(file)]
        if not ends or not ends[0]:
            continue  # another thread, or a rank that has ended the check
        innermost = frames[0][2]
        within = [frame for frame in frames[: ends[0]] if not _OF_TORCH_OR_PYTHON.search(frame[0])]
        own = [frame for frame in within if not _OF_STRATAGEM.search(frame[0])]
        file, line, name = (own or within or frames)[0]
        called = f"in {innermost}, called by {name}" if innermost != name else f"in {name}"
        yield f"{called} ({file}, line {line})"
