"""Recipes: how tensors are scaled."""

from dataclasses import dataclass


class Recipe:
    def delayed(self):
        return isinstance(self, DelayedScaling)


@dataclass
class DelayedScaling(Recipe):
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"


@dataclass
class Float8CurrentScaling(Recipe):
    pass


@dataclass
class MXFP8BlockScaling(Recipe):
    margin: int = 0
