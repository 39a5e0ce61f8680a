"""Checks of `stratagem doctor`: DeepSpeed's version, and which ops can be built here.

Neither torch nor DeepSpeed is imported, and no compiler runs: doctor answers at once.
"""

from __future__ import annotations

from collections.abc import Iterator

from stratagem.discovery import Check, torch_build
from stratagem.errors import ConfigurationError
from stratagem_deepspeed import ops
from stratagem_deepspeed.library import installed_version


def checks() -> Iterator[Check]:
    """Yield a check of the installation, and one for each op."""
    try:
        version = installed_version()
    except ConfigurationError as error:
        yield Check("deepspeed", "error", str(error))
        return
    yield Check(f"deepspeed {version}", "ok", "a version that this backend supports")
    torch = torch_build()
    for name, op in ops.OPS.items():
        if not op.needs_nvcc or (torch is not None and torch.cuda is not None):
            yield _check_op(name, op)


def _check_op(name: str, op: ops.Op) -> Check:
    title = f"op {name} ({op.purpose})"
    if ops.is_built(name):
        return Check(title, "ok", "built")
    missing = ops.what_is_missing(name)
    if missing:
        return Check(title, "warning", f"cannot be built here: {missing}")
    return Check(title, "ok", "not built yet; it can be, and will be at its first use (minutes)")
