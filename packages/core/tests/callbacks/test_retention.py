"""RetentionPolicy.plan: what a save writes, links and removes, without files."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, Literal

import pytest

from stratagem.callbacks.checkpoints.retention import RetentionPolicy, SaveEvent, SavePlan


class Folder:
    """Chooses paths as `CheckpointNames` does, in a folder without files.

    Attributes:
        taken: the paths that exist.
        may_move: whether a link may be moved.
        asked: the links for which that was asked.
    """

    def __init__(self, *taken: str, may_move: bool = True) -> None:
        self.taken = set(taken)
        self.may_move = may_move
        self.asked: list[str] = []

    def choose(self, name: str, replaceable: Collection[str]) -> str:
        version, path = 0, f"{name}.ckpt"
        while path in self.taken and path not in replaceable:
            version += 1
            path = f"{name}-v{version}.ckpt"
        self.taken.add(path)
        return path

    def ask(self, link: str) -> bool:
        self.asked.append(link)
        return self.may_move


def plan(policy: RetentionPolicy, folder: Folder, filename: str, **event: Any) -> SavePlan:
    event = {"metric": None, **event}
    return policy.plan(SaveEvent(filename=filename, **event), folder.choose, folder.ask)


def policy_of(*saves: tuple[str, float | None], top_k: int, latest_k: int = 0) -> RetentionPolicy:
    """Return a policy after these saves."""
    policy = RetentionPolicy("min", top_k=top_k, latest_k=latest_k)
    folder = Folder()
    for filename, metric in saves:
        policy = plan(policy, folder, filename, metric=metric).policy
    return policy


def test_plan_changes_no_policy() -> None:
    policy = policy_of(("a", 3.0), top_k=1, latest_k=1)
    made = plan(policy, Folder("a.ckpt"), "b", metric=2.0)
    assert (policy.best, policy.latest) == ({"a.ckpt": 3.0}, ["a.ckpt"])
    assert (made.path, made.metric, made.remove) == ("b.ckpt", 2.0, ("a.ckpt",))
    assert (made.policy.best, made.policy.latest) == ({"b.ckpt": 2.0}, ["b.ckpt"])


@pytest.mark.parametrize(("mode", "removed"), [("min", "high.ckpt"), ("max", "low.ckpt")])
def test_plan_removes_the_worst_of_the_best(mode: Literal["min", "max"], removed: str) -> None:
    policy = RetentionPolicy(mode, top_k=2, latest_k=0)
    policy.best = {"low.ckpt": 1.0, "high.ckpt": 3.0}
    assert plan(policy, Folder(), "new", metric=2.0).remove == (removed,)


def test_plan_removes_nan_first() -> None:
    policy = policy_of(("a", 1.0), ("b", math.nan), ("c", 2.0), top_k=3)
    assert plan(policy, Folder(), "d", metric=3.0).remove == ("b.ckpt",)


def test_plan_removes_all_above_top_k_of_a_resumed_state() -> None:
    policy = RetentionPolicy("min", top_k=1, latest_k=0)
    policy.best = {"a.ckpt": 1.0, "b.ckpt": 2.0}
    made = plan(policy, Folder(), "c", metric=0.5)
    assert made.remove == ("a.ckpt", "b.ckpt")
    assert list(made.policy.best) == ["c.ckpt"]


def test_plan_keeps_the_newest_that_is_no_best() -> None:
    policy = policy_of(("a", 1.0), ("b", None), top_k=1, latest_k=2)
    made = plan(policy, Folder(), "c")
    assert made.remove == ()  # a is a best one, b is among the two newest
    assert plan(made.policy, Folder(), "d").remove == ("b.ckpt",)


def test_plan_replaces_a_checkpoint_of_the_same_name_in_place() -> None:
    policy = policy_of(("best", 2.0), top_k=1)
    made = plan(policy, Folder("best.ckpt"), "best", metric=1.0)
    assert (made.path, made.remove) == ("best.ckpt", ())
    assert made.policy.best == {"best.ckpt": 1.0}


def test_plan_keeps_the_file_of_another_run() -> None:
    policy = RetentionPolicy("min", top_k=1, latest_k=0)
    assert plan(policy, Folder("best.ckpt"), "best", metric=1.0).path == "best-v1.ckpt"


def test_plan_replaces_and_removes_no_protected_checkpoint() -> None:
    policy = policy_of(("best", 2.0), top_k=1)
    made = plan(policy, Folder("best.ckpt"), "best", metric=1.0, protected={"best.ckpt"})
    assert (made.path, made.remove) == ("best-v1.ckpt", ())
    assert made.policy.best == {"best-v1.ckpt": 1.0}


def test_plan_removes_a_checkpoint_to_resume_from() -> None:
    policy = RetentionPolicy("min", top_k=1, latest_k=0)
    policy.add_to_resume_from("interrupted-step=3.ckpt")
    made = plan(policy, Folder(), "a", metric=1.0)
    assert made.remove == ("interrupted-step=3.ckpt",)
    assert made.policy.all_paths() == ["a.ckpt"]


def test_plan_of_nonfinite_weights_replaces_only_a_nonfinite_checkpoint() -> None:
    policy = policy_of(("a", 1.0), top_k=1, latest_k=1)
    event: dict[str, Any] = {"metric": 0.5, "is_finite": False, "link_name": "last"}
    first = plan(policy, Folder("a.ckpt"), "a", **event)
    assert (first.path, first.remove, first.link) == ("a-v1.ckpt", (), "")
    assert first.policy.all_paths() == ["a.ckpt", "a.ckpt", "a-v1.ckpt"]
    second = plan(first.policy, Folder(), "b", **event)
    assert (second.path, second.remove, second.link) == ("b.ckpt", ("a-v1.ckpt",), "")
    finite = plan(second.policy, Folder(), "c", metric=0.5)
    assert finite.remove == ("a.ckpt", "b.ckpt")


def test_plan_of_nonfinite_weights_removes_nothing_if_all_are_kept() -> None:
    policy = policy_of(("a", 1.0), top_k=-1)
    made = plan(policy, Folder(), "b", is_finite=False)
    assert made.remove == ()
    assert list(made.policy.best) == ["a.ckpt", "b.ckpt"]
    assert math.isnan(made.policy.best["b.ckpt"])


@pytest.mark.parametrize(
    ("link", "may_move", "moved", "removed"),
    [
        ("", True, "last.ckpt", ()),
        ("last.ckpt", True, "last.ckpt", ()),
        ("last-v2.ckpt", True, "last-v2.ckpt", ()),
        ("3-last.ckpt", True, "last.ckpt", ("3-last.ckpt",)),
        ("last.ckpt", False, "last-v1.ckpt", ()),
        ("3-last.ckpt", False, "last.ckpt", ()),
    ],
)
def test_plan_moves_last_or_chooses_another_link(
    link: str, may_move: bool, moved: str, removed: tuple[str, ...]
) -> None:
    folder = Folder(*filter(None, [link]), may_move=may_move)
    policy = RetentionPolicy("max", top_k=1, latest_k=1)
    made = plan(policy, folder, "a", metric=1.0, link_name="last", link=link)
    assert (made.path, made.link, made.remove) == ("a.ckpt", moved, removed)
    assert folder.asked == ([link] if link else [])


def test_plan_removes_the_former_link_before_checkpoints() -> None:
    policy = policy_of(("a", 2.0), top_k=1)
    event: dict[str, Any] = {"metric": 1.0, "link_name": "last", "link": "3-last.ckpt"}
    assert plan(policy, Folder(), "b", **event).remove == ("3-last.ckpt", "a.ckpt")
    assert plan(policy, Folder(), "b", **event, protected={"3-last.ckpt"}).remove == ("a.ckpt",)


def test_plan_without_save_last_asks_for_no_link() -> None:
    folder = Folder()
    made = plan(policy_of(top_k=1), folder, "a", metric=1.0, link="last.ckpt")
    assert (made.link, folder.asked, folder.taken) == ("", [], {"a.ckpt"})
