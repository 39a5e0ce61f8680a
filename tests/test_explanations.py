"""What `stratagem errors` prints: text of the documentation, for each name in a message."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from stratagem.cli import run_command
from stratagem.cli.errors import explanations
from stratagem.errors import CheckpointMismatchError, naming, with_explanation

ROOT = Path(__file__).resolve().parents[1]


def names_in_messages() -> set[str]:
    """Return the names that calls of `with_explanation` give, in all packages."""
    found = set()
    for path in ROOT.glob("packages/*/src/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "with_explanation":
                name = node.args[1]
                assert isinstance(name, ast.Constant), f"{path}:{node.lineno}: expected a literal"
                found.add(str(name.value))
    return found


def test_each_name_in_a_message_has_a_text_and_each_text_a_message() -> None:
    assert names_in_messages() == set(explanations())


@pytest.mark.parametrize("name", explanations())
def test_an_explanation_is_the_text_of_its_page(name: str) -> None:
    title, *paragraphs, last = explanations()[name].rstrip("\n").split("\n\n")
    assert title.endswith(".")
    assert "\n" not in title
    found = re.fullmatch(r"More, with examples: (docs/guides/[\w-]+\.md)", last)
    assert found is not None
    page = (ROOT / found[1]).read_text()
    for paragraph in paragraphs:
        assert paragraph in page, f"{found[1]} has another text than the explanation {name!r}"


def test_the_command_prints_one_text_or_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["errors", "hang"]) == 0
    assert capsys.readouterr().out == explanations()["hang"]
    assert run_command(["errors", "out-of-memory"]) == 0
    said = capsys.readouterr().out
    assert "](" not in said
    assert "Hardware says\nwhat of this has run on one." in said  # the text of a link
    assert run_command(["errors"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split("  ")[0] for line in lines[1 : lines.index("")]]
    assert rows == sorted(explanations())
    assert lines[-1] == "Next: stratagem errors NAME"


@pytest.mark.parametrize(("name", "meant"), [("hangs", "; did you mean 'hang'?"), ("weather", "")])
def test_errors_command_lists_the_known_names(
    name: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run_command(["errors", name])
    listed = ", ".join(explanations())
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"stratagem errors: error: no error has the name {name!r}: choose from {listed}{meant}"
    )


def test_the_last_line_of_an_error_about_a_checkpoint_stays_a_line() -> None:
    message = with_explanation("it lacks 'a\nb'", "checkpoint-mismatch")
    with pytest.raises(CheckpointMismatchError) as caught, naming("one.ckpt"):
        raise CheckpointMismatchError(message)
    assert str(caught.value).splitlines() == [
        r"'one.ckpt': it lacks 'a\nb'",
        "For an explanation: stratagem errors checkpoint-mismatch",
    ]
