"""Profilers: actions within actions, reports where they are asked for, and no change of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from stratagem.profilers import Profiler
from stratagem.trainer import Trainer
from stratagem_testing.components.bench import Bench, brief
from stratagem_testing.components.check import check
from stratagem_testing.strategies.models import Learner, loader
from stratagem_testing.surroundings import Surroundings

KIND = "profiler"


def _fit(
    bench: Bench, profiler: Profiler | None, model: Learner | None = None, **options: Any
) -> Learner:
    torch.manual_seed(0)
    model = model or Learner()
    trainer = Trainer(
        accelerator="cpu",
        profiler=profiler,
        max_epochs=1,
        logger=False,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=bench.folder.parent / "root",
        **{"strategy": "single_device", "devices": 1, **options},
    )
    trainer.fit(model, loader(32, 1), loader(16, 1))
    return model


class _Counts:
    """Counts the actions that a profiler is told of, and those that are still open."""

    def __init__(self, profiler: Profiler) -> None:
        self.open: list[str] = []
        self.begun: list[str] = []
        start, stop = profiler.start, profiler.stop

        def counted_start(action_name: str) -> None:
            self.open.append(action_name)
            self.begun.append(action_name)
            start(action_name)

        def counted_stop(action_name: str) -> None:
            self.open.remove(action_name)
            stop(action_name)

        profiler.start, profiler.stop = counted_start, counted_stop  # type: ignore[method-assign]


@check(KIND, "life/made")
def _made(bench: Bench) -> None:
    """It is a Profiler. Its constructor writes no file and starts no thread."""
    before = Surroundings.now()
    profiler = bench.make()
    assert isinstance(profiler, Profiler), (
        f"{bench.component.name} made {profiler!r}: subclass stratagem.profilers.Profiler"
    )
    assert not bench.files(), f"making a profiler wrote {', '.join(bench.files())}"
    changed = before.changes()
    assert not changed, f"after making a profiler there is {'; '.join(changed)}"


@check(KIND, "actions/nested")
def _nested(bench: Bench) -> None:
    """Actions can be nested and repeated. The report is a text."""
    profiler = bench.make()
    profiler.setup("fit", None, str(bench.folder))

    def act() -> None:
        for _ in range(2):
            with profiler.profile("run_training_epoch"):
                for _ in range(3):
                    with profiler.profile("run_training_batch"):
                        torch.ones(2).sum()

    error = bench.error(act)
    assert error is None, f"actions within an action ended in {brief(error)}"
    report = profiler.summary()
    assert isinstance(report, str), f"summary() is {report!r}; expected a str"
    error = bench.error(lambda: (profiler.describe(), profiler.teardown("fit")))
    assert error is None, f"describe() and teardown() ended in {brief(error)}"


@check(KIND, "actions/passed through")
def _passed(bench: Bench) -> None:
    """Profiling does not change results of functions, batches of loaders, or errors."""
    profiler = bench.make()
    profiler.setup("fit", None, str(bench.folder))
    batches = [object(), object()]
    seen = list(profiler.profile_iterable(batches, "train_dataloader_next"))
    assert seen == batches, f"profile_iterable() yielded {seen}, expected {batches}"
    result = profiler.wrap("function", lambda value: value)(batches)
    assert result is batches, f"a wrapped function returned {result!r}, expected its own result"

    def fails() -> None:
        with profiler.profile("fails"):
            raise ValueError("planted by the conformance kit")

    for _ in range(2):
        error = bench.error(fails)
        assert "planted" in str(error), f"an error within an action became {brief(error)}"
    profiler.teardown("fit")


@check(KIND, "runs/same training")
def _same(bench: Bench) -> None:
    """A profiled run has the same weights, and ends every action that it starts."""
    profiler = bench.make()
    counts = _Counts(profiler)
    weights = _fit(bench, profiler).net.state_dict()
    others = _fit(bench, None).net.state_dict()
    assert counts.begun, "a run began no action"
    assert not counts.open, f"after a run the action {counts.open[0]!r} is still open"
    different = [name for name, value in weights.items() if not torch.equal(value, others[name])]
    assert not different, (
        f"a profiled run ends with other weights ({different[0]}): it draws random numbers or "
        "changes what functions return"
    )


@check(KIND, "runs/nothing left")
def _left(bench: Bench) -> None:
    """Two runs leave no thread, process or changed setting of torch."""
    _fit(bench, bench.make())  # torch's profiler initialises itself on first use
    profiler, before = bench.make(), Surroundings.now()
    for _ in range(2):
        _fit(bench, profiler)
    changed = before.changes()
    assert not changed, f"after two runs there is {'; '.join(changed)}: end it in `teardown`"


@check(KIND, "runs/a run that fails")
def _fails(bench: Bench) -> None:
    """An error in training_step ends the run. The next run is profiled like the first."""

    class Fails(Learner):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            raise ValueError("planted by the conformance kit")

    profiler = bench.make()
    error = bench.error(lambda: _fit(bench, profiler, Fails()))
    assert isinstance(error, ValueError), (
        f"a training step raised ValueError, and the run ended in {brief(error)}"
    )
    error = bench.error(lambda: _fit(bench, profiler))
    assert error is None, (
        f"after a run that failed the next one ended in {brief(error)}: forget open actions in "
        "`teardown`"
    )


@check(KIND, "reports/file")
def _file(bench: Bench) -> None:
    """With a filename, the report of each stage is written to one file in the folder."""
    profiler = bench.make()
    profiler.dirpath, profiler.filename = bench.folder / "reports", "report"
    _fit(bench, profiler)
    outside = [name for name in bench.files() if not name.startswith("reports")]
    assert not outside, f"with dirpath='reports' it wrote {', '.join(outside)}"
    for name in bench.files():
        if (bench.folder / name).is_file():
            assert Path(name).name.startswith("fit-"), (
                f"the file {name} does not begin with the stage: name files by `path_of`, or a "
                "second stage overwrites them"
            )


@check(KIND, "reports/each of its own")
def _own(bench: Bench) -> None:
    """The report of a second run has no actions of the first run."""
    profiler = bench.make()
    profiler.setup("fit", None, str(bench.folder))
    with profiler.profile("only_in_the_first_run"):
        pass
    profiler.describe()
    profiler.teardown("fit")
    profiler.setup("validate", None, str(bench.folder))
    with profiler.profile("second"):
        pass
    report = profiler.summary()
    profiler.teardown("validate")
    assert "only_in_the_first_run" not in report, (
        "the report of a second run has an action of the first: forget them in `teardown`"
    )


@check(KIND, "runs/two ranks", slow=True)
def _two_ranks(bench: Bench) -> None:
    """A run with two ranks ends normally, and the ranks write to different files."""
    profiler = bench.make()
    profiler.dirpath, profiler.filename = bench.folder / "reports", "report"
    error = bench.error(lambda: _fit(bench, profiler, strategy="ddp_fork", devices=2))
    assert error is None, f"a run on two ranks ended in {brief(error)}"
    reports = [path for path in bench.files() if path.endswith(".txt")]
    assert len(reports) != 1, f"two ranks wrote one report, {reports[0]}: name it by `path_of`"
