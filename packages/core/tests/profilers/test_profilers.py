"""A profiler of the user's own is told of the actions of a run, and where its report goes."""

from __future__ import annotations

import subprocess
import sys

import pytest
from profiled_runs import Net, loader, trainer

from stratagem.discovery import ProfilerSpec, get_registry
from stratagem.errors import UnknownNameError
from stratagem.profilers import PassThroughProfiler, Profiler


def test_custom_profiler_receives_the_actions() -> None:
    class Names(Profiler):
        def __init__(self) -> None:
            super().__init__()
            self.open: list[str] = []
            self.seen: set[str] = set()

        def start(self, action_name: str) -> None:
            self.open.append(action_name)

        def stop(self, action_name: str) -> None:
            assert self.open.pop() == action_name
            self.seen.add(action_name)

    profiler = Names()
    trainer(profiler).fit(Net(), loader())
    assert profiler.open == []
    assert "run_training_epoch" in profiler.seen


def test_no_profiler_no_tuner_and_no_callback_is_imported_that_is_not_used() -> None:
    program = (
        "import sys\n"
        "from stratagem import Lite, Trainer\n"
        "Trainer(accelerator='cpu', devices=1)\n"
        "print([n for n in sys.modules if n.startswith(('stratagem.profilers', 'stratagem_extras'))"
        " or n.startswith('stratagem.callbacks.')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=90, check=True
    )
    loaded = {name.rpartition(".")[2] for name in eval(done.stdout)}
    unused = {"finetuning", "lr_monitor", "pruning", "throughput", "timer", "weight_averaging"}
    assert not loaded & {"advanced", "lambda_callback", "profiler", "pytorch", "tuner", *unused}


def test_without_a_profiler_nothing_of_a_run_is_touched(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert isinstance(trainer(None).profiler, PassThroughProfiler)
    trainer(PassThroughProfiler()).fit(Net(), loader())
    assert capsys.readouterr().out == ""


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(
        UnknownNameError, match=r"unknown profiler 'simpel'\. Did you mean 'simple'"
    ):
        trainer("simpel")


def test_a_profiler_of_a_plugin_is_chosen_by_its_name() -> None:
    class Named(Profiler):
        def start(self, action_name: str) -> None: ...
        def stop(self, action_name: str) -> None: ...

    registry = get_registry()
    registry.add(ProfilerSpec(name="named", target=Named, api_version=1))
    try:
        assert type(trainer("named").profiler) is Named
    finally:
        registry.remove("profiler", "named")
