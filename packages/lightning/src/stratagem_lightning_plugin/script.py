"""Runs a script in which Lightning's names mean Stratagem.

`stratagem run --as-lightning SCRIPT` starts `python -m stratagem_lightning_plugin.script SCRIPT` on
each rank. New processes of multiprocessing run this main module again, and so the script in it,
under the name `__mp_main__`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from stratagem_lightning_plugin.installed import check_installation

_VARIABLE = "STRATAGEM_AS_LIGHTNING"
"""The script's path, since the script may change the arguments of its processes."""


def command() -> tuple[str, ...]:
    """Return the interpreter's arguments before the script.

    Raises:
        ConfigurationError: a distribution that Lightning's names need is missing or does not fit.
    """
    check_installation()
    return ("-m", "stratagem_lightning_plugin.script")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(f"usage: python {' '.join(command())} SCRIPT [arguments of the script]")
    del sys.argv[0]
    os.environ[_VARIABLE] = str(Path(sys.argv[0]).resolve())
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)

if __name__ in ("__main__", "__mp_main__"):
    import stratagem_lightning  # noqa: F401  # which takes Lightning's names

    __file__ = os.environ[_VARIABLE]
    # Without the __future__ statements of this module, as the interpreter runs a script.
    code = compile(Path(__file__).read_bytes(), __file__, "exec", dont_inherit=True)
    exec(code)  # noqa: S102
