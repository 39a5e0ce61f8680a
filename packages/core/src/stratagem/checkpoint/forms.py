"""Forms of data in a checkpoint: the kind of each entry, compared before anything uses it.

A form is one of these:

- a type: `int` is any whole number of 64 bits, `Count` such a number from 0 on, `Positive` from 1
  on, `float` any real number, `Scalar` a number or a tensor of one element, `object` anything;
- a tuple: one of several forms;
- a list: a list or tuple of any length if it has one form, of exactly these forms if it has more;
- a dict: entries by name. A name that ends with "?" may be absent. The form under the key `str` is
  that of all other names; without it, other entries are not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stratagem.errors import CheckpointMismatchError, format_names, format_value

Form = Any
Nothing = type(None)


class Count:
    """The form of whole numbers from 0 to 2**63 - 1."""


class Positive:
    """The form of whole numbers from 1 to 2**63 - 1."""


class Scalar:
    """The form of numbers, and of tensors of one element."""


_WORDS: dict[Any, str] = {
    Count: "a number from 0 on",
    Positive: "a number from 1 on",
    Nothing: "None",
    Scalar: "a number or a tensor of one element",
    int: "a whole number",
    float: "a number",
}
_LEAST = {int: -(2**63), Count: 0, Positive: 1}


def require_form(value: Any, form: Form, name: str) -> Any:
    """Compare data from a checkpoint with their form, and return the data.

    Args:
        value: the data.
        form: see this module.
        name: the name of the data in the error, such as "progress"; "" for a complete checkpoint.

    Raises:
        CheckpointMismatchError: an entry is missing or has another form; the message names the
            entry and suggests a remedy.
    """
    if fault := find_mismatch(value, form, name):
        raise CheckpointMismatchError(f"{fault}. Load the weights alone, or use another checkpoint")
    return value


def find_mismatch(value: Any, form: Form, name: str) -> str:
    """Describe the first entry with an unexpected form; "" if all entries match.

    Args:
        value, form, name: as for `require_form`.

    Example:
        >>> find_mismatch({"epoch": "one"}, {"epoch": int, "seed?": int}, "progress")
        "progress['epoch'] is 'one', expected a whole number"
    """
    forms = form if isinstance(form, tuple) else (form,)
    form = next((each for each in forms if _has_kind(value, _kind(each))), None)
    if form is None:
        kinds = map(_kind, forms)
        expected = " or ".join(_WORDS.get(kind, f"a {kind.__name__}") for kind in kinds)
        return f"{name} is {format_value(value)}, expected {expected}"
    parts: Any = ()
    if isinstance(form, list):
        if len(form) > 1 and len(form) != len(value):
            return f"{name} has {len(value)} items, expected {len(form)}"
        each = form if len(form) > 1 else form * len(value)
        parts = ((item, each[i], f"{name}[{i}]") for i, item in enumerate(value))
    elif isinstance(form, dict):
        needed = [key for key in form if key is not str and not key.endswith("?")]
        if missing := [key for key in needed if key not in value]:
            return f"{name or 'it'} lacks {format_names(missing)}"
        if str in form and (keys := [key for key in value if type(key) is not str]):
            return f"{name} has the key {format_value(keys[0])}, expected a str"
        others = form.get(str, object)
        parts = (
            (
                item,
                form.get(key, form.get(f"{key}?", others)),
                f"{name}[{format_value(key)}]" if name else key,
            )
            for key, item in value.items()
        )
    return next(filter(None, (find_mismatch(*part) for part in parts)), "")


def _kind(form: Form) -> type:
    return form if isinstance(form, type) else type(form)


def _has_kind(value: Any, kind: type) -> bool:
    if kind in _LEAST:
        return type(value) is int and _LEAST[kind] <= value < 2**63
    if kind in (float, Scalar) and type(value) in (int, float):
        return abs(value) < 2**63 or type(value) is float
    if kind is Scalar:
        return hasattr(value, "numel") and value.numel() == 1
    return isinstance(value, (list, tuple) if kind is list else Mapping if kind is dict else kind)
