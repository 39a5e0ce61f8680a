"""`python -m stratagem_lightning.script SCRIPT`: what `stratagem run --as-lightning` starts.

Ranks that are new processes of multiprocessing run this module again, as they run any main module
that is not called `__main__`; so the script runs in it, under the name that it has there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_VARIABLE = "STRATAGEM_AS_LIGHTNING"
"""The script, for processes whose arguments it may have changed."""

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m stratagem_lightning.script SCRIPT [arguments of the script]")
    del sys.argv[0]
    os.environ[_VARIABLE] = str(Path(sys.argv[0]).resolve())
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)

if __name__ in ("__main__", "__mp_main__"):
    __file__ = os.environ[_VARIABLE]
    # As the interpreter does with a script that it is given.
    exec(compile(Path(__file__).read_bytes(), __file__, "exec"))  # noqa: S102
