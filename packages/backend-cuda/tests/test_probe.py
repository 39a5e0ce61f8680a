"""Which GPUs there are, and why none: from stated facts, and from an NVML that is played."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from stratagem import Trainer
from stratagem.discovery import Availability
from stratagem.discovery.installed import TorchBuild, torch_build
from stratagem.errors import ConfigurationError
from stratagem.strategies import DDPStrategy
from stratagem_cuda import probe
from stratagem_cuda.gpu import GPU, visible_gpus
from stratagem_cuda.probe import Driver, availability

H100 = "NVIDIA H100"
GPUS = (GPU(0, "GPU-aa1", H100), GPU(1, "GPU-ab2", H100), GPU(2, "GPU-cc3", H100))
MIG = (GPU(0, "MIG-1", "A100 (MIG)"), GPU(0, "MIG-2", "A100 (MIG)"))


def found(
    visible: str | None = None,
    *,
    build: TorchBuild | None = TorchBuild("2.13.0", "13.0"),  # noqa: B008 - frozen
    driver: Driver | str | None = None,
    amd: list[GPU] | None = None,
) -> Availability:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    answer = Driver("580.65", (13, 0), GPUS) if driver is None else driver
    return availability(environ, lambda: build, lambda: answer, lambda: amd or [])


def test_all_gpus_are_there_by_default() -> None:
    assert found() == Availability(3, f"3 GPU(s): {H100}")


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        ("1", [1]),
        ("2,0", [2, 0]),
        (" 2 , 0 ", [2, 0]),
        ("GPU-cc3", [2]),
        ("GPU-cc,1", [2, 1]),
        ("GPU-a", []),  # the beginning of two
        ("0,7,1", [0]),  # the first unknown one ends the list
        ("0,0", [0]),
        ("0,-1,1", [0]),
        ("nonsense", []),
    ],
)
def test_cuda_visible_devices_selects_like_cuda(visible: str, indices: list[int]) -> None:
    assert [gpu.index for gpu in visible_gpus(GPUS, visible)] == indices
    assert found(visible).count == len(indices)


def test_a_divided_gpu_is_one_instance() -> None:
    assert visible_gpus(MIG, None) == [MIG[0]]
    assert visible_gpus(MIG, "MIG-2") == [MIG[1]]


@pytest.mark.parametrize("visible", ["", " ", "-1", "NoDevFiles"])
def test_hidden_gpus_are_named_in_the_reason(visible: str) -> None:
    assert found(visible) == Availability(0, f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU")


def test_macos_has_no_build_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert found(build=TorchBuild("2", None)) == Availability(
        0, "there is no CUDA on macOS: use accelerator='mps' on Apple silicon, or 'cpu'"
    )


def test_unavailable_gpu_reasons_name_a_remedy() -> None:
    assert found(build=None).reason == "torch is not installed"
    without = found(build=TorchBuild("2", None)).reason
    assert "was built without CUDA and ROCm: install the build for your GPU" in without
    assert found(driver="there is no NVIDIA driver").reason == "there is no NVIDIA driver"
    old = found(driver=Driver("535.54", (12, 2), GPUS)).reason
    assert old == (
        "the driver 535.54 serves CUDA up to 12.2, and torch 2.13.0 was built for 13.0: update the "
        "driver, or install a build of torch for CUDA 12"
    )
    assert found("9").reason.startswith("CUDA_VISIBLE_DEVICES='9' names no GPU that is here: 0 (")
    assert found(driver=Driver("580", (13, 0), ())).reason == "the driver 580 lists no GPU"
    # A driver of the same major version serves newer minor ones.
    assert found(build=TorchBuild("2.13.0", "13.2")).count == 3


def test_gpu_in_exclusive_use_is_reported() -> None:
    held = GPU(0, "GPU-aa1", H100, "is in exclusive use by the process 7")
    assert found(driver=Driver("580", (13, 0), (held,))) == Availability(
        0, f"GPU 0 ({H100}) is in exclusive use by the process 7"
    )
    both = found(driver=Driver("580", (13, 0), (held, GPUS[1])))
    # Its index stays taken: torch counts it as well.
    assert both.count == 2
    assert both.reason.endswith("; device 0 is in exclusive use by the process 7")
    assert both.problems == ((0, "is in exclusive use by the process 7"),)


# -- what a user asks for, on a machine that is played


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let this machine have GPUs, some of them in use, and a torch with CUDA."""

    def play(*problems: str, build: TorchBuild = TorchBuild("2.13.0", "13.0")) -> None:  # noqa: B008
        gpus = tuple(GPU(i, f"GPU-{i}", H100, problem) for i, problem in enumerate(problems))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(probe, "torch_build", lambda: build)
        monkeypatch.setattr(probe, "driver", lambda: Driver("580.65", (13, 0), gpus))

    return play


HELD = "is in exclusive use by the process 7"


def devices_of(**options: Any) -> tuple[int, ...]:
    return Trainer(
        accelerator="gpu", enable_checkpointing=False, logger=False, **options
    ).plan.devices


def test_a_gpu_that_others_hold_is_passed_over(machine: Callable[..., None]) -> None:
    machine(HELD, "", "")
    assert devices_of(devices=1) == (1,)
    assert devices_of(devices=2, strategy="ddp") == (1, 2)
    assert devices_of() == (1, 2)
    assert devices_of(strategy="single_device") == (1,)
    assert devices_of(devices=[2]) == (2,)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"devices": [0, 1]},
            rf"devices=\[0, 1\] asks for 2 cuda device\(s\), and device 0 {HELD}: pass "
            r"devices=\[1, 2\]",
        ),
        (
            {"devices": "0,1"},  # which names them, as the list does
            rf"devices='0,1' asks for 2 cuda device\(s\), and device 0 {HELD}: pass "
            r"devices=\[1, 2\]",
        ),
        ({"devices": 3}, rf"devices=3 asks for 3 .* device 0 {HELD}: pass devices=\[1, 2\]"),
        ({"devices": -1}, rf"devices=-1 asks for 3 .* device 0 {HELD}: pass devices=\[1, 2\]"),
        ({"devices": 4}, "devices=4 asks for cuda device 3, but there are 3 here"),
        ({"devices": [7]}, r"devices=\[7\] asks for cuda device 7, but there are 3 here .*from 0"),
        ({"devices": 0}, "devices=0 leaves nothing to train on: pass a number"),
    ],
)
def test_gpus_that_cannot_be_had_are_refused_before_processes_start(
    options: dict[str, Any], expected: str, machine: Callable[..., None]
) -> None:
    machine(HELD, "", "")
    with pytest.raises(ConfigurationError, match=expected):
        devices_of(**options)


def test_gpu_is_unavailable_if_other_processes_hold_all(machine: Callable[..., None]) -> None:
    machine(HELD)
    with pytest.raises(
        ConfigurationError, match=rf"'gpu' is not available .*\(NVIDIA H100\) {HELD}"
    ):
        devices_of(devices=1)


def test_old_driver_is_refused_before_processes_start(
    machine: Callable[..., None],
) -> None:
    machine("", build=TorchBuild("2.15.0", "14.0"))
    with pytest.raises(
        ConfigurationError, match=r"driver 580\.65 serves CUDA up to 13\.0, and torc"
    ):
        devices_of(devices=1)


def test_hidden_gpus_are_refused_before_processes_start(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine("")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigurationError, match="CUDA_VISIBLE_DEVICES='' hides every GPU"):
        devices_of(devices=1)


def test_nccl_on_the_processor_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"process_group_backend='nccl' (is not in|commun)"
    ):
        Trainer(
            accelerator="cpu",
            devices=2,
            strategy=DDPStrategy(process_group_backend="nccl"),
            enable_checkpointing=False,
        )


# -- NVML, whose answers are played


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let NVML answer with two GPUs; arguments take the place of its functions."""

    def unsupported(*_: Any) -> Any:
        raise pynvml.NVMLError_NotSupported

    def play(**functions: Any) -> None:
        answers: dict[str, Any] = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlSystemGetCudaDriverVersion_v2": lambda: 12_040,
            "nvmlSystemGetDriverVersion": lambda: "550.90",
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetName": lambda handle: H100,
            "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
            "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=80 - handle),
            "nvmlDeviceGetMigMode": unsupported,
            "nvmlDeviceGetComputeMode": lambda handle: pynvml.NVML_COMPUTEMODE_DEFAULT,
            **functions,
        }
        for name, function in answers.items():
            monkeypatch.setattr(pynvml, name, function)
        monkeypatch.setattr(probe, "driver_is_missing", lambda: False)

    return play


def test_the_driver_lists_its_gpus(nvml: Callable[..., None]) -> None:
    nvml()
    gpus = (GPU(0, "GPU-0", H100, memory=80), GPU(1, "GPU-1", H100, memory=79))
    assert probe.driver() == Driver("550.90", (12, 4), gpus)
    assert found(driver=Driver("580", (13, 0), gpus)).memory == 79


def test_the_instances_of_a_divided_gpu_stand_in_its_place(nvml: Callable[..., None]) -> None:
    def instance(handle: int, number: int) -> str:
        if number == 1:
            raise pynvml.NVMLError_NotFound
        return f"{handle}/{number}"

    nvml(
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetMigMode=lambda handle: (pynvml.NVML_DEVICE_MIG_ENABLE, 0),
        nvmlDeviceGetMaxMigDeviceCount=lambda handle: 3,
        nvmlDeviceGetMigDeviceHandleByIndex=instance,
        nvmlDeviceGetUUID=lambda handle: f"MIG-{handle}" if "/" in str(handle) else "GPU-0",
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=10),
    )
    answer = probe.driver()
    assert isinstance(answer, Driver)
    assert [(gpu.uuid, gpu.memory) for gpu in answer.gpus] == [("MIG-0/0", 10), ("MIG-0/2", 10)]


def test_compute_modes_that_keep_us_out_are_problems(nvml: Callable[..., None]) -> None:
    modes = [pynvml.NVML_COMPUTEMODE_PROHIBITED, pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS]
    running = [SimpleNamespace(pid=4711), SimpleNamespace(pid=os.getpid())]
    nvml(
        nvmlDeviceGetComputeMode=lambda handle: modes[handle],
        nvmlDeviceGetComputeRunningProcesses=lambda handle: running,
    )
    answer = probe.driver()
    assert isinstance(answer, Driver)
    assert answer.gpus[0].problem.startswith("lets no process compute")
    assert answer.gpus[1].problem.startswith("is in exclusive use by the process 4711 (")


def test_a_gpu_that_does_not_say_its_memory_is_used(nvml: Callable[..., None]) -> None:
    def unknown(handle: int) -> Any:
        raise pynvml.NVMLError_Unknown

    nvml(nvmlDeviceGetMemoryInfo=unknown)
    answer = probe.driver()
    assert isinstance(answer, Driver)
    assert [(gpu.memory, gpu.problem) for gpu in answer.gpus] == [(None, ""), (None, "")]


def test_missing_or_broken_driver_is_named(nvml: Callable[..., None]) -> None:
    def missing() -> None:
        raise pynvml.NVMLError_LibraryNotFound

    def broken() -> None:
        raise pynvml.NVMLError_DriverNotLoaded

    nvml(nvmlInit=missing)
    assert "there is no NVIDIA driver" in str(probe.driver())
    nvml(nvmlInit=broken)
    assert str(probe.driver()).startswith("the NVIDIA driver does not answer: Driver Not Loaded")


def test_without_a_driver_nvidias_bindings_are_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.setitem(sys.modules, "pynvml", None)  # importing it is an ImportError
    assert probe.driver() == "there is no NVIDIA driver (libnvidia-ml.so.1 was not found)"


def test_one_gpu_that_cannot_be_opened_hides_no_other(nvml: Callable[..., None]) -> None:
    def handle(index: int) -> int:
        if index == 0:
            raise pynvml.NVMLError_GpuIsLost
        return index

    nvml(nvmlDeviceGetHandleByIndex=handle)
    answer = probe.driver()
    assert isinstance(answer, Driver)
    assert answer.gpus[0].problem.startswith("cannot be used: ")
    assert not answer.gpus[1].problem


# -- this machine


def test_torch_build_is_read_without_importing_torch() -> None:
    code = (
        "import sys; from stratagem_cuda.probe import cuda_availability\n"
        "from stratagem.discovery.installed import torch_build\n"
        "cuda_availability(); print(torch_build()); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    import torch

    assert done.stdout.strip() == str(TorchBuild(str(torch.__version__), torch.version.cuda))


PROBE = """
import sys, time
import stratagem.discovery.registry  # what whoever asks has imported before
from stratagem.discovery.installed import TorchBuild

before, began = set(sys.modules), time.process_time()
from stratagem_cuda import probe
probe.torch_build = lambda: TorchBuild("2.13.0", "13.0")  # so that NVML is asked
probe.cuda_availability()
spent = time.process_time() - began
print(spent, *sorted(set(sys.modules) - before))
"""


def test_asking_the_driver_imports_its_bindings_and_little_else() -> None:
    """20 ms of CPU time is what it may take; counted are modules, since time is the machine's.

    Those 45 are ctypes, the bindings, and what ctypes.util imports; without a driver, ctypes alone.
    """
    times, modules = [], set()
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", PROBE], capture_output=True, text=True, check=True
        )
        spent, *imported = done.stdout.split()
        times.append(float(spent))
        modules = set(imported)
    missing = probe.driver_is_missing()
    assert ("pynvml" in modules) is not missing
    assert not {"torch", "numpy", "pathlib", "packaging", "importlib.metadata"} & modules
    assert len(modules) <= (15 if missing else 45)
    assert min(times) < 0.1  # five times that: on a machine that does much else


def test_torch_build_without_torch_returns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert torch_build() is None


@pytest.mark.skipif(
    probe.cuda_availability().count > 0, reason="there is a GPU; `nox -s tests` needs none"
)
def test_trainer_without_a_gpu_names_the_reason() -> None:
    with pytest.raises(ConfigurationError, match="accelerator='gpu' is not available on this"):
        Trainer(accelerator="gpu", devices=2, enable_checkpointing=False)
    # And one that leaves it open takes what there is.
    chosen = Trainer(accelerator="auto", devices=1, enable_checkpointing=False)
    assert chosen.plan.accelerator.name == "cpu"
