"""`stratagem mesh draw`: pictures of schedules."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from stratagem_mesh.pipeline.command import run
from stratagem_mesh.pipeline.drawing import ScheduleDrawing

ONE = """\
1F1B: 4 stages, 8 micro-batches

stage 0  F0F1F2F3............B0--F4B1--F5B2--F6B3--F7B4--..B5--..B6--..B7--
stage 1  ..F0F1F2........B0--F3B1--F4B2--F5B3--F6B4--F7B5--..B6--..B7--....
stage 2  ....F0F1....B0--F2B1--F3B2--F4B3--F5B4--F6B5--F7B6--..B7--........
stage 3  ......F0B0--F1B1--F2B2--F3B3--F4B4--F5B5--F6B6--F7B7--............

A step takes 33 forward passes of a rank; ranks wait for 27.3% of the time (the bubble).
In flight at most, from the first rank to the last: 4, 3, 2, 1 micro-batches.
"""

TWO = """\
Interleaved 1F1B: 4 stages on 2 ranks, 2 micro-batches

stage 0  F0F1    ....    ..    B0--B1--
stage 1  ..F0F1            B0--B1--....
stage 2      F0F1....B0--..B1--
stage 3  ..    F0B0--F1B1--        ....

A step takes 7.5 forward passes of a rank; ranks wait for 20.0% of the time (the bubble).
In flight at most, from the first rank to the last: 2, 1.5 micro-batches.
"""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--pipeline", "4", "--micro-batches", "8"), ONE),
        (("--pipeline", "2", "--micro-batches", "2", "--schedule", "interleaved"), TWO),
    ],
)
def test_stages_by_time_are_printed(
    options: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(options) == 0
    assert capsys.readouterr().out == expected


def test_a_long_step_continues_below(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert run(("--pipeline", "2", "--micro-batches", "11", "--schedule", "gpipe")) == 0
    picture = capsys.readouterr().out.split("\n\n")[1:-1]
    assert len(picture) == 4
    assert all(len(line) <= 40 for band in picture for line in band.splitlines())
    whole = ScheduleDrawing("gpipe", 2, 1, 11).text(1000).splitlines()
    for stage in (0, 1):
        rows = [band.splitlines()[stage].removeprefix(f"stage {stage}  ") for band in picture]
        assert f"stage {stage}  " + "".join(rows) == whole[stage]


@pytest.mark.parametrize("dark", [False, True])
def test_an_svg_has_a_block_for_each_pass_and_says_the_time(dark: bool) -> None:
    drawing = ScheduleDrawing("interleaved", 4, 2, 8)
    image = ElementTree.fromstring(drawing.svg(dark=dark))
    name = "{http://www.w3.org/2000/svg}"
    boxes = image.findall(f"{name}rect")
    # The ground; a row for each position; the passes; three in the legend.
    assert len(boxes) == 1 + 4 + 4 * 2 * 8 * 2 + 3
    passes = [box for box in boxes if box.get("stroke") not in ("none", None)]
    assert len({box.get("fill") for box in passes}) == 4
    texts = [text.text for text in image.findall(f"{name}text")]
    assert texts.count("7") == 4 * 2 * 2
    assert {"stages 0, 4", "stages 3, 7", drawing.title, *drawing.words} <= set(texts)
    title = image.find(f"{name}title")
    assert title is not None
    assert title.text == f"{drawing.title}. {' '.join(drawing.words)}"


def test_numbers_that_do_not_fit_into_their_blocks_are_left_out() -> None:
    image = ScheduleDrawing("1f1b", 2, 1, 200).svg()
    assert ">199</text>" not in image
    assert ">1</text>" not in image


def test_a_picture_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "schedule.svg"
    assert run(("--pipeline", "4", "--micro-batches", "8", "--output", str(path))) == 0
    assert path.read_text() == ScheduleDrawing("1f1b", 4, 1, 8).svg()
    title, *_, time, in_flight = ONE.splitlines()
    printed = capsys.readouterr().out.splitlines()
    assert printed == [title, time, in_flight, f"The picture is in {path}"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--schedule", "interleaved", "--virtual-stages", "1"), "Write virtual_stages=2"),
        (
            ("--schedule", "gpipe", "--virtual-stages", "2"),
            'Write schedule="interleaved", or virtual_stages=1',
        ),
        (("--schedule", "zb"), "argument --schedule: invalid choice: 'zb'"),
        (("--micro-batches", "0"), "expected a whole number of at least 1, received '0'"),
        (
            ("--output", "picture.png"),
            "expected a path that ends with .svg, received --output picture.png",
        ),
    ],
)
def test_wrong_arguments_are_refused(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run(("--pipeline", "2", "--micro-batches", "4", *options))
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_several_stages_on_a_rank_are_interleaved(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--pipeline", "2", "--micro-batches", "4", "--virtual-stages", "3")
    assert run(sizes) == 0
    drawn = capsys.readouterr().out
    assert "In flight at most, from the first rank to the last: 2.33, 1.67 micro-batches" in drawn
    assert run((*sizes, "--schedule", "interleaved")) == 0
    assert capsys.readouterr().out == drawn


def test_a_path_that_cannot_be_written_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "missing" / "schedule.svg"
    assert run(("--pipeline", "2", "--micro-batches", "4", "--output", str(path))) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"stratagem mesh draw: error: cannot write {path}: [Errno 2] ")
