"""The unpickler of checkpoints: it makes what it is told of, and calls nothing else.

`torch.load(weights_only=True)` does not execute what it reads, but it may be told to fill the
memory: by `bytearray(2**40)`, or by one long list that is copied in each of a hundred thousand
calls. Python's own may be told so by one index of its memo, and changes classes that it has only
looked up. Here each call is paid for by the bytes of the pickle, of which a pickler has written at
least one for each value; and tuples of tuples are not hashed before they have been counted.
"""

from __future__ import annotations

import dataclasses
import pickle
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch

from stratagem.checkpoint.entries import Refused

# A call takes at least three bytes, and a memoized result one more.
_CALL = 4
# Keys may share their parts: this many more values than bytes of the pickle may be visited.
_FREE_KEYS = 100_000
_MOST_DIMS = 64
# Keys with the hash of another key: a dict of n such keys takes n squared comparisons. The hashes
# of texts and bytes are random, and small integers have different hashes, so real checkpoints have
# no such keys.
_MOST_COLLISIONS = 1000
_SMALL = (1 << 61) - 1
_SIZED = (list, tuple, torch.Size, dict, OrderedDict, Counter, set, str, bytes, bytearray)


def check_dims(size: Sequence[Any]) -> None:
    """Raise if a size has more dims than torch supports, since multiplying them may be slow."""
    if len(size) > _MOST_DIMS:
        raise Refused(f"a tensor has {len(size)} dims, expected at most {_MOST_DIMS}")


class SafeUnpickler:
    """Reads one pickle, of the protocols that torch and Python write.

    Args:
        data: the pickle.
        makers: the allowed functions, by qualified name.
        classes: the classes that `__new__` may create and their state may fill, by qualified name;
            calls are allowed as well.
        values: the values that the pickle may refer to but not call, by qualified name.
    """

    def __init__(
        self,
        data: bytes,
        makers: Mapping[str, Callable[..., Any]],
        classes: Mapping[str, Any],
        values: Mapping[str, Any],
    ) -> None:
        self._data = data
        self._at = 0
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._left, self._keys_left = len(data), len(data) + _FREE_KEYS
        self._hashes: dict[int, Any] = {}
        self._collisions = 0
        self._named = {**values, **classes, **makers}
        self._callable = {id(made) for made in (*makers.values(), *classes.values())}
        self._classes = {id(made) for made in classes.values()}

    def load(self) -> Any:
        """Return the contents of the pickle.

        Raises:
            pickle.UnpicklingError: the pickle requests an object that is not allowed.
            Refused: see `Refused`.
            Exception: the pickle is damaged; of any type.
        """
        data, stop = self._data, pickle.STOP[0]
        while (code := data[self._at]) != stop:
            self._at += 1
            operation = _OPERATIONS.get(code)
            if operation is None:
                raise pickle.UnpicklingError(f"the operation {code:#x}")
            operation(self)
        return self._stack.pop()

    def call(self, maker: Any, args: Any) -> Any:
        """Call an allowed function.

        Raises:
            pickle.UnpicklingError: the function is not allowed.
            Refused: the arguments are larger than the remaining size of the pickle.
        """
        if id(maker) not in self._callable or type(args) is not tuple:
            raise pickle.UnpicklingError(f"a call of a {type(maker).__name__}")
        self._left -= _CALL + sum(len(arg) for arg in args if type(arg) in _SIZED)
        if self._left < 0:
            raise Refused("its pickle repeats its contents")
        return maker(*args)

    def hashed(self, key: Any) -> Any:
        """Return a key of a dict or a member of a set, which can be hashed in a bounded time."""
        if type(key) not in (str, bytes) and not (type(key) is int and abs(key) < _SMALL):
            self._check_parts(key)
            first = self._hashes.setdefault(hash(key), key)
            if first is not key and first != key:
                self._collisions += 1
                if self._collisions > _MOST_COLLISIONS:
                    raise Refused("its pickle has keys that were made to collide")
        return key

    def _check_parts(self, key: Any) -> None:
        if isinstance(key, tuple):
            self._keys_left -= len(key) + 1
            if self._keys_left < 0:
                raise Refused("its pickle repeats its keys")
            for part in key:
                self._check_parts(part)
        elif dataclasses.is_dataclass(key):
            self._check_parts(tuple(vars(key).values()))
        elif type(key) is FunctionType:
            raise Refused("a key is what makes a value, and no value")

    def persistent_load(self, pid: Any) -> Any:
        """Raise, because persistent IDs are not supported here."""
        raise pickle.UnpicklingError("a value outside of the pickle")

    # -- shared by the operations

    def _take(self, count: int) -> bytes:
        begin = self._at
        self._at = end = begin + count
        if end > len(self._data):
            raise EOFError
        return self._data[begin:end]

    def _line(self) -> str:
        end = self._data.index(b"\n", self._at)
        line = self._data[self._at : end].decode("utf-8")
        self._at = end + 1
        return line

    def _to_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._marks.pop()
        return items

    def _find(self, module: Any, name: Any) -> None:
        # So Python 2 called it, and so protocol 2 still does.
        module = "builtins" if module == "__builtin__" else module
        found = self._named.get(f"{module}.{name}")
        if found is None:
            raise pickle.UnpicklingError(f"{module}.{name}")
        self._stack.append(found)

    def _target(self, *kinds: type) -> Any:
        target = self._stack[-1]
        if type(target) not in kinds:
            raise pickle.UnpicklingError(f"a change of a {type(target).__name__}")
        return target

    # -- operations

    def _pass_frame(self) -> None:
        self._take(8)

    def _pass_protocol(self) -> None:
        self._take(1)

    def _pop(self) -> None:
        self._stack.pop()

    def _mark(self) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def _float(self) -> None:
        self._stack.append(struct.unpack(">d", self._take(8))[0])

    def _long(self) -> None:
        size = self._take(1)[0]
        self._stack.append(int.from_bytes(self._take(size), "little", signed=True))

    def _tuple(self) -> None:
        items = self._to_mark()
        self._stack.append(tuple(items))

    def _append(self) -> None:
        value = self._stack.pop()
        self._target(list).append(value)

    def _appends(self) -> None:
        values = self._to_mark()
        self._target(list).extend(values)

    def _set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._target(dict, OrderedDict, Counter)[self.hashed(key)] = value

    def _set_items(self) -> None:
        items = self._to_mark()
        target = self._target(dict, OrderedDict, Counter)
        for at in range(0, len(items), 2):
            target[self.hashed(items[at])] = items[at + 1]

    def _memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _global(self) -> None:
        module = self._line()
        self._find(module, self._line())

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise pickle.UnpicklingError("a name that is no text")
        self._find(module, name)

    def _persistent(self) -> None:
        self._stack.append(self.persistent_load(self._stack.pop()))

    def _reduce(self) -> None:
        args = self._stack.pop()
        self._stack[-1] = self.call(self._stack[-1], args)

    def _new(self) -> None:
        args, made = self._stack.pop(), self._stack.pop()
        if id(made) not in self._classes or type(args) is not tuple:
            raise pickle.UnpicklingError(f"a new {type(made).__name__}")
        self._stack.append(made.__new__(made, *args))

    def _build(self) -> None:
        state, made = self._stack.pop(), self._stack[-1]
        if type(made) is not OrderedDict and id(type(made)) not in self._classes:
            raise pickle.UnpicklingError(f"a state of a {type(made).__name__}")
        if hasattr(made, "__setstate__"):
            made.__setstate__(state)
            return
        slots: dict[str, Any] | None = None
        if type(state) is tuple and len(state) == 2:
            state, slots = state
        if type(made) is OrderedDict:
            # A state dict's own attribute; another one could stand in for a method.
            state = {name: value for name, value in (state or {}).items() if name == "_metadata"}
            slots = None
        vars(made).update(state or {})
        for name, value in (slots or {}).items():
            setattr(made, name, value)


_Operation = Callable[[SafeUnpickler], None]


def _constant(value: Any) -> _Operation:
    return lambda reader: reader._stack.append(value)


def _empty(kind: type) -> _Operation:
    return lambda reader: reader._stack.append(kind())


def _number(size: int, *, signed: bool = False) -> _Operation:
    def read(reader: SafeUnpickler) -> None:
        reader._stack.append(int.from_bytes(reader._take(size), "little", signed=signed))

    return read


def _sized(size: int, decode: Callable[[bytes], Any]) -> _Operation:
    def read(reader: SafeUnpickler) -> None:
        length = int.from_bytes(reader._take(size), "little")
        reader._stack.append(decode(reader._take(length)))

    return read


def _text(data: bytes) -> str:
    return str(data, "utf-8", "surrogatepass")


def _tuple_of(count: int) -> _Operation:
    def make(reader: SafeUnpickler) -> None:
        if len(reader._stack) < count:
            raise EOFError
        reader._stack[-count:] = [tuple(reader._stack[-count:])]

    return make


def _get(size: int) -> _Operation:
    def read(reader: SafeUnpickler) -> None:
        reader._stack.append(reader._memo[int.from_bytes(reader._take(size), "little")])

    return read


def _put(size: int) -> _Operation:
    def read(reader: SafeUnpickler) -> None:
        reader._memo[int.from_bytes(reader._take(size), "little")] = reader._stack[-1]

    return read


_OPERATIONS: dict[int, _Operation] = {
    code[0]: operation
    for code, operation in {
        pickle.PROTO: SafeUnpickler._pass_protocol,
        pickle.FRAME: SafeUnpickler._pass_frame,
        pickle.MARK: SafeUnpickler._mark,
        pickle.POP: SafeUnpickler._pop,
        pickle.NONE: _constant(None),
        pickle.NEWTRUE: _constant(True),
        pickle.NEWFALSE: _constant(False),
        pickle.BININT: _number(4, signed=True),
        pickle.BININT1: _number(1),
        pickle.BININT2: _number(2),
        pickle.LONG1: SafeUnpickler._long,
        pickle.BINFLOAT: SafeUnpickler._float,
        pickle.BINUNICODE: _sized(4, _text),
        pickle.SHORT_BINUNICODE: _sized(1, _text),
        pickle.SHORT_BINSTRING: _sized(1, _text),
        pickle.BINBYTES: _sized(4, bytes),
        pickle.SHORT_BINBYTES: _sized(1, bytes),
        pickle.EMPTY_LIST: _empty(list),
        pickle.EMPTY_DICT: _empty(dict),
        pickle.EMPTY_TUPLE: _constant(()),
        pickle.TUPLE: SafeUnpickler._tuple,
        pickle.TUPLE1: _tuple_of(1),
        pickle.TUPLE2: _tuple_of(2),
        pickle.TUPLE3: _tuple_of(3),
        pickle.APPEND: SafeUnpickler._append,
        pickle.APPENDS: SafeUnpickler._appends,
        pickle.SETITEM: SafeUnpickler._set_item,
        pickle.SETITEMS: SafeUnpickler._set_items,
        pickle.MEMOIZE: SafeUnpickler._memoize,
        pickle.BINPUT: _put(1),
        pickle.LONG_BINPUT: _put(4),
        pickle.BINGET: _get(1),
        pickle.LONG_BINGET: _get(4),
        pickle.GLOBAL: SafeUnpickler._global,
        pickle.STACK_GLOBAL: SafeUnpickler._stack_global,
        pickle.BINPERSID: SafeUnpickler._persistent,
        pickle.REDUCE: SafeUnpickler._reduce,
        pickle.NEWOBJ: SafeUnpickler._new,
        pickle.BUILD: SafeUnpickler._build,
    }.items()
}
