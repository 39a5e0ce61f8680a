"""Pictures of a step of a pipeline: stages by time, as text and as SVG. No torch is imported."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from stratagem_mesh.pipeline.schedule import Span, Timeline, actions, timeline

__all__ = ["ScheduleDrawing"]

_TITLES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved 1F1B"}


@dataclass(frozen=True)
class ScheduleDrawing:
    """The picture of a schedule: a backward pass takes twice the time of a forward pass.

    The unit of time is a forward pass over all stages of a rank, so a stage takes less if a rank
    has several. Transfers take no time.

    Args:
        schedule: the name of the schedule.
        positions: the number of ranks along the pipeline.
        virtual_stages: the number of stages on each rank.
        micro_batches: the number of micro-batches of a step.

    Raises:
        ConfigurationError: the schedule does not exist; see `actions`.

    Example:
        >>> print(ScheduleDrawing("gpipe", 2, 1, 2).text())
        stage 0  F0F1......B0--B1--
        stage 1  ..F0F1B0--B1--....
    """

    schedule: str
    positions: int
    virtual_stages: int
    micro_batches: int

    def __post_init__(self) -> None:
        self.step()

    def step(self) -> Timeline:
        """Return the times of the step."""
        stages = self.positions * self.virtual_stages
        sizes = self.positions, self.virtual_stages, self.micro_batches
        forward = 1 / self.virtual_stages
        return timeline(actions(self.schedule, *sizes), [forward] * stages, [2 * forward] * stages)

    @property
    def title(self) -> str:
        """The schedule and its sizes in words."""
        stages = self.positions * self.virtual_stages
        on = f" on {_count(self.positions, 'rank')}" if self.virtual_stages > 1 else ""
        return (
            f"{_TITLES[self.schedule]}: {_count(stages, 'stage')}{on}, "
            f"{_count(self.micro_batches, 'micro-batch')}"
        )

    @property
    def words(self) -> tuple[str, str]:
        """The time of the step and its bubble; the micro-batches in flight.

        Example:
            >>> for sentence in ScheduleDrawing("1f1b", 4, 1, 8).words:
            ...     print(sentence)
            A step takes 33 forward passes of a rank; ranks wait for 27.3% of the time (the bubble).
            In flight at most, from the first rank to the last: 4, 3, 2, 1 micro-batches.
        """
        step = self.step()
        held = ", ".join(f"{round(number / self.virtual_stages, 2):g}" for number in step.in_flight)
        return (
            f"A step takes {round(step.time, 6):g} forward passes of a rank; ranks wait for "
            f"{step.bubble:.1%} of the time (the bubble).",
            f"In flight at most, from the first rank to the last: {held} micro-batches.",
        )

    def text(self, width: int = 100) -> str:
        """Return a line for each stage; `F3` is a forward pass of micro-batch 3, dots are waiting.

        Args:
            width: the number of columns; a longer step continues below.
        """
        step = self.step()
        stages = self.positions * self.virtual_stages
        column = len(str(self.micro_batches - 1)) + 1
        units = round(step.time * self.virtual_stages)
        cells = [["." * column] * units for _ in range(stages)]
        for stage, start, span in self._blocks(step):
            length = 1 if span.action.kind == "forward" else 2
            for other in range(stage % self.positions, stages, self.positions):
                cells[other][start : start + length] = [" " * column] * length
            letter = span.action.kind[0].upper()
            words = f"{letter}{span.action.micro_batch}".ljust(length * column, "-")
            pieces = [words[n * column : (n + 1) * column] for n in range(length)]
            cells[stage][start : start + length] = pieces
        label = len(f"stage {stages - 1}")
        fitting = max((width - label - 2) // column, 1)
        bands = []
        for start in range(0, units, fitting):
            lines = [
                f"{f'stage {stage}':<{label}}  {''.join(row[start : start + fitting])}".rstrip()
                for stage, row in enumerate(cells)
            ]
            bands.append("\n".join(lines))
        return "\n\n".join(bands)

    def _blocks(self, step: Timeline) -> Iterator[tuple[int, int, Span]]:
        """Yield each pass with its stage, and its start in forward passes of a stage."""
        for spans in step.spans:
            for span in spans:
                yield span.action.stage, round(span.start * self.virtual_stages), span

    def svg(self, *, dark: bool = False) -> str:
        """Return an SVG image: a row for each rank, micro-batch numbers, a shade for each stage.

        Args:
            dark: whether the page has a dark background.
        """
        colours = _DARK if dark else _LIGHT
        step = self.step()
        scale = (_WIDTH - _LEFT - 20) / step.time
        parts = [_text(20, 28, self.title, colours.text, size=16)]
        for position, spans in enumerate(step.spans):
            y = _TOP + position * _ROW
            stages = range(position, self.positions * self.virtual_stages, self.positions)
            name = "stages " if self.virtual_stages > 1 else "stage "
            label = name + ", ".join(map(str, stages))
            parts.append(_text(20, y + 20, label, colours.text))
            parts.append(_box(_LEFT, y, step.time * scale, colours.idle))
            for span in spans:
                fill = colours.of(span, span.action.stage // self.positions, self.virtual_stages)
                x, width = _LEFT + span.start * scale, (span.end - span.start) * scale
                parts.append(_box(x, y, width, fill, colours.ground))
                number = str(span.action.micro_batch)
                if width >= 8 * len(number):
                    middle = x + width / 2
                    parts.append(_text(middle, y + 20, number, _on(fill), anchor="middle"))
        y = _TOP + self.positions * _ROW + 12
        for x, fill, meaning in (
            (_LEFT, colours.forward, "forward pass"),
            (_LEFT + 140, colours.backward, "backward pass"),
            (_LEFT + 290, colours.idle, "waits"),
        ):
            parts.append(_box(x, y, 20, fill, height=16))
            parts.append(_text(x + 28, y + 13, meaning, colours.muted))
        if self.virtual_stages > 1:
            meaning = "lighter: later stages of the rank"
            parts.append(_text(_LEFT + 380, y + 13, meaning, colours.muted))
        for line, sentence in enumerate(self.words):
            parts.append(_text(20, y + 44 + 20 * line, sentence, colours.text))
        height = y + 80
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
            f'width="{_WIDTH}" height="{height}" font-family="{_FONT}" role="img">\n'
            f"<title>{escape(self.title)}. {escape(' '.join(self.words))}</title>\n"
            f'<rect width="100%" height="100%" fill="{colours.ground}"/>\n'
            + "\n".join(parts)
            + "\n</svg>\n"
        )


_FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
_WIDTH, _LEFT, _TOP, _ROW = 960, 130, 44, 36


@dataclass(frozen=True)
class _Colours:
    ground: str
    text: str
    muted: str
    idle: str
    forward: str
    backward: str

    def of(self, span: Span, chunk: int, chunks: int) -> str:
        """Return the colour of a pass: lighter for the later stages of a rank."""
        colour = self.forward if span.action.kind == "forward" else self.backward
        share = 0.65 * chunk / max(chunks - 1, 1)
        pairs = zip(_channels(colour), _channels(self.ground), strict=True)
        return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


_LIGHT = _Colours("#ffffff", "#1b1f24", "#57606a", "#e3e7ec", "#0b5cad", "#b45309")
_DARK = _Colours("#131416", "#e6e8eb", "#a9b1ba", "#2c323b", "#6cb2ff", "#e0a458")


def _count(number: int, name: str) -> str:
    plural = "es" if name.endswith("ch") else "s"
    return f"{number} {name}{plural if number != 1 else ''}"


def _channels(colour: str) -> list[int]:
    return [int(colour[k : k + 2], 16) for k in (1, 3, 5)]


def _on(fill: str) -> str:
    """Return black or white: the colour of letters with the larger contrast."""
    linear = [(channel / 255) ** 2.2 for channel in _channels(fill)]
    light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if light > 0.179 else "#ffffff"


def _text(
    x: float, y: float, words: str, colour: str, *, size: int = 13, anchor: str = "start"
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" '
        f'text-anchor="{anchor}">{escape(words)}</text>'
    )


def _box(
    x: float, y: float, width: float, fill: str, line: str = "none", height: float = 30
) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" '
        f'stroke="{line}"/>'
    )
