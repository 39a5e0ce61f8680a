"""Seeds, and the RNG states of a rank as weights-only-safe data."""

from __future__ import annotations

import gc
import importlib
import os
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

from stratagem.errors import ConfigurationError

if TYPE_CHECKING:
    from stratagem.interfaces.accelerator import Accelerator

__all__ = [
    "SEED_VARIABLE",
    "SeededOnce",
    "chosen_seed",
    "generator_states",
    "generators_of",
    "preserve_rng_state",
    "rng_state",
    "seed_devices_by",
    "seed_everything",
    "seeds_workers",
    "set_generator_states",
    "set_rng_state",
]

SEED_VARIABLE = "STRATAGEM_SEED"
WORKERS_VARIABLE = "STRATAGEM_SEED_WORKERS"

_seeders: dict[str, Callable[[int], None]] = {}


def seed_everything(
    seed: int | None = None, *, workers: bool = False, verbose: bool = False
) -> int:
    """Seed Python, NumPy and torch (all devices) alike on every rank; return the seed.

    Args:
        seed: from 0 to 2**32 - 1; None takes STRATAGEM_SEED, or 0 if that is not set.
        workers: also give the workers of data loaders seeds that differ by rank, so that random
            augmentation differs between ranks.
        verbose: print the seed.

    Raises:
        ConfigurationError: the seed is out of range.

    Example:
        >>> from stratagem import seed_everything
        >>> seed_everything(42)
        42
    """
    if seed is None:
        text = os.environ.get(SEED_VARIABLE, "0")
        if not text.isdigit():
            raise ConfigurationError(f"expected a number in {SEED_VARIABLE}, received {text!r}")
        seed = int(text)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ConfigurationError(f"seed={seed!r}: expected a whole number from 0 to 2**32 - 1")
    os.environ[SEED_VARIABLE] = str(seed)
    os.environ[WORKERS_VARIABLE] = str(int(workers))
    seed_host(seed)
    torch.manual_seed(seed)
    for seed_devices in _seeders.values():
        seed_devices(seed)
    if verbose:
        print(f"seed set to {seed}")
    return seed


def seed_host(seed: int) -> None:
    """Seed Python, torch's CPU generator, and NumPy if imported.

    `torch.manual_seed` takes 83 us, for all devices.
    """
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def seed_devices_by(device_type: str, seeder: Callable[[int], None]) -> None:
    """Let `seed_everything` seed devices that `torch.manual_seed` does not reach.

    Args:
        device_type: as in `torch.device`; the latest seeder of a type counts.
        seeder: called with the seed.

    Example:
        >>> from stratagem import seed_everything
        >>> seeds = []
        >>> seed_devices_by("made-up", seeds.append)
        >>> seed_everything(7), seeds
        (7, [7])
    """
    _seeders[device_type] = seeder


def chosen_seed() -> int:
    """Return the seed that `seed_everything` set, or 0."""
    return int(os.environ.get(SEED_VARIABLE, "0"))


def seeds_workers() -> bool:
    """Whether `seed_everything(workers=True)` was called."""
    return os.environ.get(WORKERS_VARIABLE) == "1"


class SeededOnce:
    """A `worker_init_fn` of workers that torch seeds when they start, and nobody for each batch.

    A run that resumes within an epoch then draws other numbers in them.
    """

    def __init__(self, then: Any = None) -> None:
        self.then = then

    def __call__(self, worker_id: int) -> None:
        """Call the user's."""
        if self.then is not None:
            self.then(worker_id)


class WorkerSeed:
    """A `worker_init_fn` that makes a worker's seeds differ by rank, then calls the user's.

    torch seeds each worker from one number that all ranks share after `seed_everything`.
    """

    def __init__(self, rank: int, then: Any = None) -> None:
        self.rank = rank
        self.then = then

    def __call__(self, worker_id: int) -> None:
        """Seed this worker."""
        seed = (torch.initial_seed() + self.rank * 1_000_003) % 2**32
        seed_host(seed)
        torch.manual_seed(seed)
        if self.then is not None:
            self.then(worker_id)


def rng_state(
    accelerator: Accelerator | None = None, device: torch.device | None = None
) -> dict[str, Any]:
    """Return the RNG states of Python, NumPy, torch on the host, and a device, as safe data.

    NumPy's is included if NumPy is imported. Generators that user code holds are not; see
    `generators_of`.

    Args:
        accelerator: reads the device's; None: the host's only.
        device: this rank's; given with the accelerator.

    Example:
        >>> import torch
        >>> state = rng_state()
        >>> first = torch.rand(1)
        >>> set_rng_state(state)
        >>> bool(torch.rand(1) == first)
        True
    """
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        # Numbers of 32 bits without a sign, as a tensor that has these bits.
        "python": [
            version,
            torch.tensor(words, dtype=torch.int64, device="cpu").to(torch.int32),
            gauss,
        ],
        "torch": torch.get_rng_state(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        # As a tensor: an array of NumPy's is no weights-only-safe data.
        keys = torch.from_numpy(keys.view("int32"))
        state["numpy"] = [kind, keys, int(position), int(has_gauss), float(cached)]
    if accelerator is not None and device is not None:
        own = accelerator.rng_state(device)
        if own is not None:
            state["device"] = [device.type, own]
    return state


def set_rng_state(
    state: dict[str, Any],
    accelerator: Accelerator | None = None,
    device: torch.device | None = None,
) -> None:
    """Restore a state from `rng_state`.

    The state of a device is restored on a device of the same type with any index. On a device of
    another type, the RNG stays unchanged.

    Args:
        state: the result of `rng_state`, from this or an earlier run.
        accelerator, device: as in `rng_state`.
    """
    version, words, gauss = state["python"]
    words = torch.as_tensor(words, dtype=torch.int64) & 0xFFFFFFFF  # older ones: a list
    random.setstate((version, tuple(words.tolist()), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state and "numpy" in sys.modules:
        kind, keys, position, has_gauss, cached = state["numpy"]
        words = keys.numpy().astype("uint32")
        sys.modules["numpy"].random.set_state((kind, words, position, has_gauss, cached))
    if accelerator is not None and device is not None and "device" in state:
        kind, own = state["device"]
        if kind == device.type:
            accelerator.set_rng_state(device, own)


def try_rng_state(
    state: dict[str, Any], generators: Sequence[Any] = (), states: Sequence[Any] = ()
) -> None:
    """Raise if states from a checkpoint cannot be restored; nothing changes.

    Args:
        state: the argument of `set_rng_state` to test.
        generators, states: the arguments of `set_generator_states` to test.

    Raises:
        AttributeError, LookupError, OverflowError, TypeError, ValueError: a state is invalid.
    """
    before = generator_states(generators)
    try:
        with preserve_rng_state():
            set_rng_state(state)
            set_generator_states(generators, states)
    except RuntimeError as error:  # torch's, of the size of a state
        raise ValueError(str(error)) from error
    finally:
        set_generator_states(generators, before)


def inherited_rng() -> dict[str, Any]:
    """Return the RNG state for `inherit_rng` in a child process, as weights-only-safe data.

    Example:
        >>> import torch
        >>> inherited = inherited_rng()
        >>> first = torch.rand(1)
        >>> inherit_rng(inherited)
        >>> bool(torch.rand(1) == first)
        True
    """
    return {"seed": torch.initial_seed(), "host": rng_state()}


def inherit_rng(inherited: Mapping[str, Any]) -> None:
    """Continue with the random numbers of the process that called `inherited_rng`.

    Devices, of which that process may have used none yet, are seeded as it was.
    """
    torch.manual_seed(inherited["seed"])
    if SEED_VARIABLE in os.environ:
        for seed_devices in _seeders.values():
            seed_devices(chosen_seed())
    if "numpy" in inherited["host"]:
        importlib.import_module("numpy")
    set_rng_state(inherited["host"])


@contextmanager
def preserve_rng_state(
    accelerator: Accelerator | None = None, device: torch.device | None = None
) -> Iterator[None]:
    """Restore the RNG states of the host, and of a device, when the block ends.

    Args:
        accelerator, device: as in `rng_state`.
    """
    before = rng_state(accelerator, device)
    try:
        yield
    finally:
        set_rng_state(before, accelerator, device)


def generators_of(*holders: Any) -> list[Any]:
    """Return the generators that objects hold as attributes, each once, in a stable order.

    Generators are torch.Generator, random.Random, and NumPy's Generator and RandomState.

    Example:
        >>> import random
        >>> from torch.utils.data import DataLoader
        >>> class Sampler:
        ...     def __init__(self):
        ...         self.numbers = random.Random(7)
        >>> generators_of(DataLoader([1]), Sampler())[0].random() < 1
        True
    """
    kinds = _kinds()
    held = (v for holder in holders for v in getattr(holder, "__dict__", {}).values())
    return list({id(value): value for value in held if isinstance(value, kinds)}.values())


def _kinds() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")
    of_numpy = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return (torch.Generator, random.Random, *of_numpy)


def generators_held_by_data(loader: Any) -> list[Any]:
    """Return the generators that a loader's dataset and `collate_fn` hold, at any depth.

    The search follows attributes, closures, bound methods and containers of up to 100 elements,
    10,000 objects in all. The global generators are left out, since `rng_state` has their states.
    """
    kinds, dataset = _kinds(), getattr(loader, "dataset", None)
    found = {id(held): held for held in generators_of(*_chain(dataset, "dataset"))}
    # Generators that several threads or modules share have no single owner.
    seen = {id(random.random.__self__), id(torch.default_generator)}  # type: ignore[attr-defined]
    if "numpy" in sys.modules:
        seen.add(id(sys.modules["numpy"].random.rand.__self__))
    queue = deque([dataset, getattr(loader, "collate_fn", None)])
    while queue and len(seen) < 10_000:
        held = queue.popleft()
        is_long = isinstance(held, (list, tuple, dict, set)) and len(held) > 100
        # A DataModule leads to its Trainer, which holds generators of other data.
        is_ours = type(held).__module__.startswith(("stratagem.", "stratagem_torch."))
        skips = is_long or is_ours or isinstance(held, (type, ModuleType, CodeType))
        if skips or id(held) in seen:
            continue
        seen.add(id(held))
        if isinstance(held, kinds):
            found[id(held)] = held
            continue
        if isinstance(held, FunctionType):
            seen.add(id(held.__globals__))
        queue.extend(gc.get_referents(held))
    return list(found.values())


def generators_of_loader(loader: Any) -> list[Any]:
    """Return the generators that a loader and its samplers hold."""
    samplers = (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
    return generators_of(loader, *(s for sampler in samplers for s in _chain(sampler, "sampler")))


def generators_of_data(loader: Any) -> list[Any]:
    """Return the generators that a loader, its samplers and its dataset hold, each once."""
    found = generators_of_loader(loader)
    held_by_data = generators_held_by_data(loader)
    return found + [g for g in held_by_data if all(g is not other for other in found)]


def generator_states(generators: Sequence[Any]) -> list[Any]:
    """Return the states of generators from `generators_of`, as weights-only-safe data."""
    return [_generator_state(generator) for generator in generators]


def set_generator_states(generators: Sequence[Any], states: Sequence[Any]) -> None:
    """Restore states from `generator_states`, as far as the two lists correspond."""
    for generator, state in zip(generators, states, strict=False):
        if isinstance(generator, torch.Generator):
            generator.set_state(state)
        elif isinstance(generator, random.Random):
            version, words, gauss = state
            generator.setstate((version, tuple(words), gauss))
        elif hasattr(generator, "bit_generator"):
            generator.bit_generator.state = state
        else:
            generator.set_state(state)


def _generator_state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return [version, list(words), gauss]
    if hasattr(generator, "bit_generator"):
        return _without_arrays(generator.bit_generator.state)
    return _without_arrays(generator.get_state(legacy=False))


def _without_arrays(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _without_arrays(value) for key, value in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state


def _chain(thing: Any, attribute: str) -> list[Any]:
    """Return a thing, what it holds under `attribute`, and so on, ten deep at most."""
    found: list[Any] = []
    while thing is not None and len(found) < 10 and not any(thing is other for other in found):
        found.append(thing)
        thing = getattr(thing, attribute, None)
    return found
