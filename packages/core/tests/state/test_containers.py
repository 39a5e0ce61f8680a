"""map_items, map_tensors and move_to_device: every container keeps its class and its contents."""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from stratagem import Lite, Module, Trainer
from stratagem.data import map_items, map_tensors, move_to_device
from stratagem.errors import UserCodeError

CPU = torch.device("cpu")


class Keyed(dict[str, Any]):
    """A dict whose constructor has another first argument."""

    def __init__(self, size: int = 0, **items: Any) -> None:
        super().__init__(**items)
        self.size = size


class AttributesAreItems(dict[str, Any]):
    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class KeyErrors(dict[str, Any]):
    __getattr__ = dict.__getitem__


class Boxes(list[Any]):
    def __init__(self, image: str, boxes: tuple[Any, ...] = ()) -> None:
        super().__init__(boxes)
        self.image = image


class Pair(tuple[Any, ...]):
    """A tuple whose `__new__` has other arguments."""

    def __new__(cls, first: Any, second: Any) -> Pair:
        return super().__new__(cls, (first, second))


class Point(NamedTuple):
    names: list[str]
    x: Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    tag: str = "t"


@dataclasses.dataclass
class Computed:
    x: Tensor
    scale: dataclasses.InitVar[int]
    doubled: Tensor = dataclasses.field(init=False)

    def __post_init__(self, scale: int) -> None:
        self.doubled = self.x * scale
        self.note = self.x + 1


class Graph:
    """As in PyTorch Geometric: no mapping, with `apply` and `__copy__`."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __copy__(self) -> Graph:
        return Graph(self.x)

    def apply(self, function: Any) -> Graph:
        self.x = function(self.x)
        return self

    def to(self, device: Any) -> Graph:
        return self.apply(lambda tensor: tensor.to(device))


class Registered:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class ReadOnly(Mapping[str, Any]):
    def __init__(self, name: str, items: dict[str, Any]) -> None:
        self.items_ = items

    def __getitem__(self, key: str) -> Any:
        return self.items_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


class SharesItems(ReadOnly, MutableMapping[str, Any]):
    """`copy.copy` gives an object with the same dict."""

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_[key]


def halved(data: Any) -> Any:
    return map_tensors(lambda tensor: tensor / 2, data)


ONES, HALVES = torch.ones(2), torch.full((2,), 0.5)


@pytest.mark.parametrize(
    ("container", "read"),
    [
        ({"x": ONES}, lambda c: c["x"]),
        ([1, ONES], lambda c: c[1]),
        ((ONES, "a"), lambda c: c[0]),
        (collections.defaultdict[str, Any](list, {"x": ONES}), lambda c: c["x"]),
        (collections.OrderedDict(x=ONES), lambda c: c["x"]),
        (collections.UserDict({"x": ONES}), lambda c: c["x"]),
        (collections.UserList([ONES]), lambda c: c[0]),
        (collections.deque([ONES], maxlen=3), lambda c: c[0]),
        (types.MappingProxyType({"x": ONES}), lambda c: c["x"]),
        (Keyed(2, x=ONES), lambda c: c["x"]),
        (AttributesAreItems(x=ONES), lambda c: c.x),
        (KeyErrors(x=ONES), lambda c: c.x),
        (Boxes("cat.png", (ONES,)), lambda c: c[0]),
        (Pair(ONES, "b"), lambda c: c[0]),
        (Point(["a"], ONES), lambda c: c.x),
        (torch.ones(2, 1).max(1), lambda c: c.values),
        (Frozen(ONES), lambda c: c.x),
        (Graph(ONES), lambda c: c.x),
    ],
    ids=lambda value: type(value).__name__ if not callable(value) else "",
)
def test_map_tensors_keeps_the_class_and_leaves_the_original(container: Any, read: Any) -> None:
    nested = halved({"a": [container]})["a"][0]
    for mapped in (halved(container), nested):
        assert type(mapped) is type(container)
        assert torch.equal(read(mapped).float(), HALVES)
    assert torch.equal(read(container).float(), ONES)


def test_map_tensors_keeps_other_attributes_and_items() -> None:
    keyed, boxes = halved(Keyed(2, x=ONES, name="n")), halved(Boxes("cat.png", (ONES, None)))
    assert (keyed.size, keyed["name"], boxes.image, boxes[1]) == (2, "n", "cat.png", None)
    mapped = halved(collections.defaultdict[str, Any](list, {"x": ONES}))
    assert mapped["new"] == []
    assert halved(collections.deque([ONES], maxlen=3)).maxlen == 3
    assert halved(Frozen(ONES, "other")).tag == "other"


def test_map_tensors_maps_computed_fields_of_a_dataclass() -> None:
    mapped = halved(Computed(ONES, 4))
    assert mapped.x.tolist() == [0.5, 0.5]
    assert mapped.doubled.tolist() == [2, 2]
    assert mapped.note.tolist() == [1, 1]


def test_map_tensors_uses_the_registration_of_torchs_pytree() -> None:
    from torch.utils import _pytree

    _pytree.register_pytree_node(
        Registered, lambda one: ([one.x], None), lambda items, _: Registered(*items)
    )
    try:
        assert halved([Registered(ONES)])[0].x.tolist() == [0.5, 0.5]
    finally:
        _pytree._deregister_pytree_node(Registered)


def test_map_items_returns_a_container_without_changes_itself() -> None:
    plain = (Keyed(2, x=1), Boxes("cat.png", (1,)), Pair(1, 2), bytearray(2))
    assert all(map_tensors(torch.neg, one) is one for one in plain)
    assert map_items(abs, 3) == 3
    assert type(map_tensors(torch.neg, [torch.Size([2])])[0]) is torch.Size


def test_map_items_calls_the_function_once_for_each_item_in_order() -> None:
    seen: list[int] = []
    for container in ({"a": 1, "b": 2}, Keyed(a=3), Boxes("", (4, 5)), Point(["6"], ONES)):
        map_items(seen.append, container)
    assert seen[:5] == [1, 2, 3, 4, 5]
    assert len(seen) == 7


def test_map_items_refuses_a_copy_that_shares_its_items() -> None:
    shared = SharesItems("n", {"x": ONES})
    with pytest.raises(UserCodeError, match="SharesItems shares its items with the original"):
        halved(shared)
    assert torch.equal(shared["x"], ONES)


def test_map_items_refuses_a_read_only_mapping_with_another_constructor() -> None:
    with pytest.raises(UserCodeError, match="a ReadOnly is a read-only mapping"):
        halved(ReadOnly("n", {"x": ONES}))


def test_map_items_names_a_class_that_cannot_be_copied() -> None:
    class NoCopy(dict[str, Any]):
        def __copy__(self) -> Any:
            raise RuntimeError("not today")

    with pytest.raises(UserCodeError, match=r"NoCopy.*RuntimeError: not today.*method __copy__"):
        halved(NoCopy(x=ONES))


def test_move_to_device_moves_objects_within_containers() -> None:
    meta = torch.device("meta")
    moved = move_to_device((Graph(ONES), {"g": Graph(ONES)}, Keyed(1, x=ONES)), meta)
    assert moved[0].x.device == moved[1]["g"].x.device == moved[2]["x"].device == meta


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_training_step_receives_the_class_of_the_batch(precision: str) -> None:
    received: list[Any] = []

    class Net(Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            received.append(batch)
            return self.layer(torch.ones(1, 2, dtype=self.layer.weight.dtype)).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    batches = [Keyed(2, x=ONES), Boxes("cat.png", (ONES,)), (Frozen(ONES), Point(["a"], ONES))]
    trainer = Trainer(
        accelerator="cpu", devices=1, precision=precision, max_epochs=1, logger=False,
        enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Net(), batches)
    dtype = torch.float32 if precision == "32-true" else torch.bfloat16
    keyed, boxes, (frozen, point) = received
    assert (keyed.size, keyed["x"].dtype, boxes.image, boxes[0].dtype) == (
        2,
        dtype,
        "cat.png",
        dtype,
    )
    assert (frozen.x.dtype, point.x.dtype, point.names) == (dtype, dtype, ["a"])


def test_lite_keeps_the_class_in_collectives() -> None:
    lite = Lite(accelerator="cpu", devices=1)
    keyed = lite.all_gather(Keyed(2, x=ONES))
    assert (type(keyed), keyed["x"].shape, keyed.size) == (Keyed, (1, 2), 2)
    assert lite.all_reduce(Boxes("cat.png", (ONES,))).image == "cat.png"
    assert move_to_device(Frozen(ONES), CPU).x.tolist() == [1, 1]
