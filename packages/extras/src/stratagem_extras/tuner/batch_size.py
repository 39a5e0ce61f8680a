"""The search for the largest batch size that fits."""

from __future__ import annotations

from collections.abc import Callable


def search(
    fits: Callable[[int], int | None],
    *,
    mode: str,
    start: int,
    trials: int,
    margin: float,
    most: int,
) -> int | None:
    """Return the largest size that was found to fit; None: none did.

    Args:
        fits: tries a size, and returns the size that was tried, which is smaller where the data
            has not as many samples; None: it does not fit.
        mode: "power" doubles; "binsearch" then halves the distance to what does not fit.
        start: first size.
        trials: how many to try at most; 0: the first size is taken untried.
        margin: part that "binsearch" takes off the size, where memory has run out.
        most: largest size to try.

    Example:
        >>> def fits(size):
        ...     return size if size <= 100 else None
        >>> options = {"start": 2, "trials": 25, "margin": 0.0, "most": 8192}
        >>> search(fits, mode="power", **options), search(fits, mode="binsearch", **options)
        (64, 100)
    """
    good: int | None = None if trials else start
    bad: int | None = None
    size = start
    for _ in range(trials):
        tried = fits(size)
        if tried is None:
            bad = size
        else:
            good = tried
            if tried < size or tried >= most:
                return good  # there is no more data, or it is not to be larger
        if bad is None:
            size = min(size * 2, most)
        elif good is None:
            size = bad // 2
            if size < 1:
                return None
        elif mode == "power":
            return good
        elif bad - good <= 1:
            break
        else:
            size = (good + bad) // 2
    if good is None or bad is None or mode == "power":
        return good
    return max(1, int(good * (1.0 - margin)))
