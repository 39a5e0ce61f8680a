"""PyTorchProfiler: torch.profiler over some steps of a run, as a table and as a trace."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch.autograd.profiler_util import EventList
from torch.profiler import profile, record_function, schedule

from stratagem.errors import ConfigurationError
from stratagem.profilers import Profiler

_STEPS = ("validation_step", "test_step", "predict_step")
_TRACE = ".pt.trace.json"
"""How TensorBoard knows a trace."""
_OF_TABLE = inspect.signature(EventList.table).parameters.keys() - {"self", "sort_by", "row_limit"}


class PyTorchProfiler(Profiler):
    """Runs torch.profiler over some batches of a run; actions appear as ranges.

    By default the first batch is skipped, the second warms up, and three are recorded.

    Args:
        dirpath, filename: as for `Profiler`; traces go there too.
        group_by_input_shapes: group operations by the shapes of their inputs.
        export_to_chrome: write a trace for chrome://tracing, Perfetto and TensorBoard to
            `STAGE-trace-N-FILENAME.pt.trace.json`; not with `on_trace_ready`, which writes its own.
        row_limit: rows of the table; -1: all.
        sort_by_key: column that sorts it; None: "cpu_time_total".
        table_kwargs: further arguments of torch's `table`.
        **profiler_kwargs: arguments of `torch.profiler.profile`, such as `activities`, `schedule`,
            `on_trace_ready`, `profile_memory`, `with_stack`.

    Raises:
        ConfigurationError: torch.profiler or its table does not accept an argument.

    Example:
        >>> import torch
        >>> from stratagem.profilers import PyTorchProfiler
        >>> profiler = PyTorchProfiler(export_to_chrome=False, schedule=None)
        >>> with profiler.profile("square"):
        ...     _ = torch.ones(2).square()
        >>> "aten::square" in profiler.summary()
        True
        >>> profiler.teardown()
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        group_by_input_shapes: bool = False,
        export_to_chrome: bool = True,
        row_limit: int = 20,
        sort_by_key: str | None = None,
        table_kwargs: Mapping[str, Any] | None = None,
        **profiler_kwargs: Any,
    ) -> None:
        super().__init__(dirpath, filename)
        self.group_by_input_shapes = group_by_input_shapes
        self.export_to_chrome = export_to_chrome
        self.row_limit = row_limit
        self.sort_by_key = sort_by_key or "cpu_time_total"
        self.table_kwargs = dict(table_kwargs or {})
        if unknown := self.table_kwargs.keys() - _OF_TABLE:
            raise ConfigurationError(
                f"PyTorchProfiler(table_kwargs={self.table_kwargs!r}): torch's table does not take "
                f"{', '.join(sorted(map(repr, unknown)))} from there; expected some of "
                f"{', '.join(sorted(_OF_TABLE))} (row_limit and sort_by_key are arguments)"
            )
        self._on_trace_ready = profiler_kwargs.pop("on_trace_ready", None)
        self._arguments = {
            "schedule": schedule(wait=1, warmup=1, active=3, repeat=1),
            "record_shapes": group_by_input_shapes,
            "acc_events": True,
            **profiler_kwargs,
        }
        self._profile: profile | None = None
        self._ranges: dict[str, ExitStack] = {}
        self._traces = 0
        self._averages: Any = None

    def start(self, action_name: str) -> None:
        """Begin a range; the first one starts torch's profiler."""
        if self._profile is None:
            self._profile = self._make()
            self._profile.start()
        ranges = self._ranges.setdefault(action_name, ExitStack())
        ranges.enter_context(record_function(f"[{type(self).__name__}][profile]{action_name}"))

    def stop(self, action_name: str) -> None:
        """End a range; the end of a batch is a step of torch's profiler."""
        if (ranges := self._ranges.pop(action_name, None)) is not None:
            ranges.close()
        is_step = action_name == "run_training_batch" or (
            action_name.endswith(_STEPS) and "run_training_epoch" not in self._ranges
        )
        if is_step and self._profile is not None:
            self._profile.step()

    def _make(self) -> profile:
        try:
            return profile(on_trace_ready=self._take, **self._arguments)
        except TypeError as error:
            raise ConfigurationError(
                f"PyTorchProfiler({', '.join(sorted(self._arguments))}): torch.profiler.profile "
                f"does not take that ({error}); expected its own arguments"
            ) from error

    def _take(self, recorded: profile) -> None:
        self._averages = recorded.key_averages(group_by_input_shape=self.group_by_input_shapes)
        # Torch writes a trace once: one's own function is given it unwritten.
        if self.export_to_chrome and self._on_trace_ready is None:
            path = self.path_of(_TRACE, f"trace-{self._traces}")
            path.parent.mkdir(parents=True, exist_ok=True)
            recorded.export_chrome_trace(str(path))
            self._traces += 1
        if self._on_trace_ready is not None:
            self._on_trace_ready(recorded)

    def summary(self) -> str:
        """Return torch's table of the last recording, and end the recording."""
        self._end()
        if self._averages is None:
            return ""
        table = self._averages.table(
            sort_by=self.sort_by_key, row_limit=self.row_limit, **self.table_kwargs
        )
        return f"{self._stage.upper()} Profiler Report\n\n{table}\n".lstrip()

    def _end(self) -> None:
        while self._ranges:
            self._ranges.popitem()[1].close()
        if self._profile is not None:
            recording, self._profile = self._profile, None
            recording.stop()

    def teardown(self, stage: str | None = None) -> None:
        """End the recording, and forget it."""
        self._end()
        self._averages, self._traces = None, 0
