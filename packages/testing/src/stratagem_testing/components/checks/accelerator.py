"""Accelerators: devices, random numbers, what is set and restored, and a training."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stratagem.accelerators import Accelerator
from stratagem.discovery import AcceleratorSpec, Availability, load_target
from stratagem_testing.components.bench import Bench, brief
from stratagem_testing.components.check import check
from stratagem_testing.components.training import losses_of
from stratagem_testing.surroundings import Surroundings

KIND = "accelerator"
_SETTINGS = ("torch.backends.", "the default ", "the precision ", "deterministic ")
"""What descriptions of torch's settings begin with, which no library changes when it is loaded."""

_PROBE = """
import sys
from stratagem.discovery import load_target
found = load_target(sys.argv[1], what="the probe")()
heavy = [name for name in ("torch", "numpy") if name in sys.modules]
print(type(found).__name__, repr(found.reason), heavy, sep="|")
"""


def devices_of(bench: Bench, accelerator: Accelerator) -> list[torch.device]:
    """Return the devices that are used here, set up and with the first as the current one."""
    found = accelerator.availability()
    assert found.count > 0, (
        f"availability() finds no device here ({found.reason}): run the kit where there is one, or "
        "set without_devices = True to check only what needs none"
    )
    count = min(found.count, bench.option("devices")) if found.indexed else 1
    accelerator.setup()
    devices = [accelerator.device(index) for index in range(count)]
    accelerator.setup_device(devices[0])
    return devices


@check(KIND, "availability/reason")
def _reason(bench: Bench) -> None:
    """availability() returns the number of devices and the reason, also if there are no devices.

    Asking changes nothing in the process, and the process can still be forked.
    """
    before = Surroundings.now()
    accelerator = bench.make()
    assert isinstance(accelerator, Accelerator), (
        f"{bench.component.name} made {accelerator!r}: subclass stratagem.accelerators.Accelerator"
    )
    found = accelerator.availability()
    accelerator.device(0)
    changed = before.changes()
    assert not changed, (
        f"making it and asking availability() and device(0) changed {'; '.join(changed)}: the "
        "launching process asks, which may use another accelerator then. Set it in setup()"
    )
    problem = accelerator.fork_problem()
    assert problem is None, (
        f"before a device was used, fork_problem says {problem!r}, and launchers that fork refuse "
        "it: return None until then, and use no device in __init__ and availability()"
    )
    assert isinstance(found, Availability), (
        f"availability() returned {found!r}; expected stratagem.discovery.Availability"
    )
    assert isinstance(found.count, int), f"availability().count is {found.count!r}, no int"
    assert found.count >= 0, f"availability().count is {found.count}; expected 0 where none is here"
    assert found.reason.strip(), (
        f"availability() found {found.count} devices and gives no reason: `stratagem doctor` shows "
        "it, as in Availability(0, 'no driver')"
    )
    assert found.auto_count is None or found.auto_count > 0, (
        f"availability().auto_count is {found.auto_count}: devices='auto' would take none"
    )
    strange = [index for index, _ in found.problems if not 0 <= index < found.count]
    assert not strange, f"availability().problems has the indices {strange} of {found.count}"


@check(KIND, "availability/probe without torch", slow=True)
def _probe(bench: Bench) -> None:
    """The spec's probe returns the same as the class, without importing torch."""
    spec = bench.component.spec
    if not isinstance(spec, AcceleratorSpec):
        return  # not published: its users import its class
    own, class_finds = load_target(spec.probe, what="the probe")(), bench.make().availability()
    assert own.count == class_finds.count, (
        f"the spec's probe finds {own.count} devices ({own.reason}), and the class's "
        f"availability() {class_finds.count} ({class_finds.reason}): a plan is made by the first "
        "and a rank looks with the second"
    )
    target = spec.probe
    place = target if isinstance(target, str) else f"{target.__module__}:{target.__qualname__}"
    done = bench.python("-c", _PROBE, place)
    assert done.returncode == 0, f"the spec's probe {place} fails by itself: {done.stderr[-1500:]}"
    kind, reason, heavy = done.stdout.strip().splitlines()[-1].split("|")
    assert kind == "Availability", f"the spec's probe returned {kind}; expected Availability"
    assert reason.strip("'\" "), "the spec's probe gives no reason; `stratagem doctor` shows it"
    assert heavy == "[]", (
        f"the spec's probe {place} imports {heavy}: it runs while a request is resolved and for "
        "every `stratagem doctor`; look for files and drivers instead"
    )


@check(KIND, "devices/identity")
def _identity(bench: Bench) -> None:
    """device(index) always returns the same torch.device for an index."""
    accelerator = bench.make()
    assert isinstance(getattr(accelerator, "name", None), str), "it has no name"
    assert accelerator.name, "its name is empty: strategies list it in their capabilities"
    found = accelerator.availability()
    devices = [accelerator.device(index) for index in range(3)]
    for index, device in enumerate(devices):
        assert isinstance(device, torch.device), (
            f"device({index}) returned {device!r}; expected a torch.device"
        )
        again = accelerator.device(index)
        assert again == device, f"device({index}) returned {device}, and then {again}"
    kinds = {device.type for device in devices}
    assert len(kinds) == 1, f"its devices are of several types: {sorted(kinds)}"
    assert accelerator.is_host == (kinds == {"cpu"}), (
        f"is_host is {accelerator.is_host}, and device(0) is {devices[0]}: batches would "
        + ("stay on the host" if accelerator.is_host else "be copied for nothing")
    )
    if found.indexed:
        assert len(set(devices)) == 3, (
            f"device(0), device(1) and device(2) are {', '.join(map(str, devices))}: ranks would "
            "share one device; say indexed=False in availability() if there is only one"
        )


@check(KIND, "devices/process group backend")
def _backend(bench: Bench) -> None:
    """process_group_backend names backends of torch.distributed, such as 'cpu:gloo'."""
    accelerator = bench.make()
    name = getattr(accelerator, "process_group_backend", None)
    known = sorted(dist.Backend.backend_list)
    assert isinstance(name, str), "it has no process_group_backend, such as 'gloo'"
    named = [part.rpartition(":")[2].casefold() for part in name.split(",")]
    assert set(named) <= set(known), (
        f"process_group_backend is {name!r}, and torch.distributed knows {', '.join(known)}: "
        "register it (torch.distributed.Backend.register_backend) when the accelerator is made"
    )


@check(KIND, "devices/set up", needs_device=True)
def _set_up(bench: Bench) -> None:
    """setup_device makes a device the current device, and tensors on it compute."""
    accelerator = bench.make()
    for device in devices_of(bench, accelerator):
        accelerator.setup_device(device)
        if device.index is not None and not accelerator.is_host:
            current = torch.empty(1, device=device.type).device
            assert current == device, (
                f"after setup_device({device}), a tensor on {device.type!r} is on {current}: make "
                "the device the current one"
            )
        total = torch.arange(5.0, device=device).sum()
        accelerator.synchronize(device)
        assert float(total) == 10.0, f"the sum of 0 to 4 is {float(total)} on {device}"


@check(KIND, "devices/nothing left", needs_device=True)
def _nothing_left(bench: Bench) -> None:
    """After teardown, settings, variables, threads and functions are as before setup."""
    first, begun, variables = bench.make(), Surroundings.now(), dict(os.environ)
    devices_of(bench, first)  # the first call in a process may load permanent modules
    first.teardown()
    changed = [each for each in begun.changes() if each.startswith(_SETTINGS)]
    # The second run would find leftovers of the first.
    os.environ.clear()
    os.environ.update(variables)
    before = Surroundings.now()
    accelerator = bench.make()
    devices_of(bench, accelerator)
    accelerator.teardown()
    accelerator.teardown()
    changed += before.changes()
    assert not changed, f"setup() and teardown() left {'; '.join(changed)}: undo it in teardown()"


@check(KIND, "rng/round trip", needs_device=True)
def _rng(bench: Bench) -> None:
    """rng_state and set_rng_state repeat random numbers exactly, for a single device."""
    accelerator = bench.make()
    devices = devices_of(bench, accelerator)
    state = accelerator.rng_state(devices[0])
    if accelerator.is_host:
        assert state is None, (
            f"rng_state returned {type(state).__name__} although is_host: the host's own state is "
            "saved anyway; return None"
        )
        return
    if state is None:
        # Its kernels draw from the host's generator, so that its state says it all.
        host = torch.get_rng_state()
        first = torch.rand(5, device=devices[0]).tolist()
        torch.set_rng_state(host)
        again = torch.rand(5, device=devices[0]).tolist()
        assert again == first, (
            "rng_state returned None, as of devices that draw from the host's generator, and with "
            f"the host's state restored the numbers are {again}, and were {first}: return the "
            "device's state"
        )
        return
    assert isinstance(state, torch.Tensor), f"rng_state returned {state!r}; expected a tensor"
    assert state.device.type == "cpu", (
        f"rng_state is on {state.device}: a checkpoint holds it, so it has to be in host memory"
    )
    first = torch.rand(5, device=devices[0]).tolist()
    others = [accelerator.rng_state(device) for device in devices[1:]]
    accelerator.set_rng_state(devices[0], state)
    again = torch.rand(5, device=devices[0]).tolist()
    assert again == first, (
        f"after set_rng_state(device, rng_state(device)) the numbers are {again}, and were "
        f"{first}: a resumed run would draw other numbers"
    )
    assert torch.rand(5, device=devices[0]).tolist() != first, "all random numbers are the same"
    for device, before in zip(devices[1:], others, strict=True):
        after = accelerator.rng_state(device)
        assert before is not None and after is not None and torch.equal(before, after), (  # noqa: PT018
            f"random numbers on {devices[0]} changed the state of {device}: use the device that "
            "is given"
        )


@check(KIND, "kernels/restored", needs_device=True)
def _kernels(bench: Bench) -> None:
    """The function that configure_kernels returns restores the previous settings.

    configure_kernels sets no setting of torch.backends to the opposite of what it is given.
    """
    accelerator = bench.make()
    devices_of(bench, accelerator)
    for benchmark in (True, False):
        before, given = Surroundings.now(), {"benchmark": benchmark, "deterministic": not benchmark}
        restore = accelerator.configure_kernels(**given)
        assert callable(restore), f"configure_kernels returned {restore!r}; expected a function"
        wrong = [
            f"{setting} = {value}"
            for setting, value in Surroundings.now().modes.items()
            if value != before.modes[setting]
            and value is (not given.get(setting.rpartition(".")[2], value))
        ]
        assert not wrong, (
            f"configure_kernels(**{given}) set {', '.join(wrong)}, the opposite of what it was "
            "given: set each to its own argument"
        )
        restore()
        changed = before.changes()
        assert not changed, (
            f"after configure_kernels(**{given}) and what it returned there is {'; '.join(changed)}"
        )


@check(KIND, "autocast/context", needs_device=True)
def _autocast(bench: Bench) -> None:
    """autocast(dtype) returns None, or a reusable context in which layers compute in dtype."""
    accelerator = bench.make()
    device = devices_of(bench, accelerator)[0]
    values = torch.ones(4, 4, device=device)
    for dtype in (torch.bfloat16, torch.float16):
        context = accelerator.autocast(dtype)
        if context is None:
            continue  # MixedPrecision refuses the accelerator then
        for nested in (False, True):
            with context, (accelerator.autocast(dtype) if nested else None) or nullcontext():
                inside = (values @ values).dtype
            outside = (values @ values).dtype
            assert inside is dtype, (
                f"in autocast({dtype}) a matrix product is {inside}: return None where operations "
                "cannot be autocast, so that mixed precision is refused"
            )
            assert outside is torch.float32, (
                f"after autocast({dtype}){' within another' if nested else ''} a product is "
                f"{outside}: return a new context from each call, which torch.autocast needs"
            )


@check(KIND, "said/hints", needs_device=True)
def _hints(bench: Bench) -> None:
    """hints() returns sentences."""
    accelerator = bench.make()
    hints = accelerator.hints(devices_of(bench, accelerator)[0], torch.float32)
    assert not isinstance(hints, str) and all(isinstance(hint, str) for hint in hints), (  # noqa: PT018
        f"hints returned {hints!r}; expected a sequence of sentences"
    )


@check(KIND, "said/forking")
def _forking(bench: Bench) -> None:
    """fork_problem returns a text, or None if no device was used yet."""
    accelerator = bench.make()
    problem = accelerator.fork_problem()
    assert problem is None or isinstance(problem, str), (
        f"fork_problem returned {problem!r}; expected a text that completes \"the launcher 'fork' "
        'copies this process, which ...", or None'
    )
    assert problem is None or accelerator.availability().count, (
        f"fork_problem says {problem!r} where there is no device"
    )


@check(KIND, "training/as on the CPU", needs_device=True)
def _training(bench: Bench) -> None:
    """A model on the device has the losses of the CPU, or single_device raises an error."""
    accelerator = bench.make()

    def train() -> list[float]:
        return losses_of(bench.lite(accelerator=bench.component.given))

    if accelerator.requires_dedicated_strategies:
        error = bench.error(train)
        assert type(error).__name__ == "ConfigurationError", (
            "requires_dedicated_strategies=True, and strategy='single_device' was not refused: "
            + brief(error)
        )
        assert "single_device" in str(error), f"the refusal does not name the strategy: {error}"
        return
    devices_of(bench, accelerator)
    own, expected = train(), losses_of(bench.lite())
    tolerance = bench.option("tolerance")
    for step, (mine, other) in enumerate(zip(own, expected, strict=True)):
        assert abs(mine - other) <= tolerance * max(1.0, abs(other)), (
            f"the loss of step {step} is {mine:.7g} on the device and {other:.7g} on the CPU "
            f"(tolerance {tolerance:g}): {own}, expected {expected}"
        )


@check(KIND, "training/inference mode", needs_device=True)
def _inference(bench: Bench) -> None:
    """Tensors work under torch.inference_mode, unless the accelerator has inference_mode=False."""
    accelerator = bench.make()
    if not accelerator.inference_mode:
        return  # evaluation runs under no_grad
    device = devices_of(bench, accelerator)[0]
    layer: Any = nn.Linear(3, 2).to(device)

    def evaluate() -> None:
        with torch.inference_mode():
            layer(torch.ones(1, 3, device=device)).sum().item()

    error = bench.error(evaluate)
    assert error is None, f"inference_mode=True, and evaluation under it ended in {brief(error)}"
