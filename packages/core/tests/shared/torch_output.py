"""What torch itself prints, which differs between its versions."""

from __future__ import annotations

import re

# Of torch 2.9's gloo, for every group that it connects. It can go with torch 2.9.
_CONNECTED = re.compile(
    r"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. "
    r"Expected number of connected peer ranks is : \d+\n"
)


def without_torchs_own(stdout: str) -> str:
    """Return what a program printed to stdout, without what torch printed there."""
    return _CONNECTED.sub("", stdout)
