"""Runs the code on the pages of docs, each page in an empty folder of its own.

    python docs/tools/blocks.py [--write] [PAGE ...]

What runs, in the order of the page:

- `python`: all such blocks of a page together are one script, which runs at the end of the page.
- `python` whose first line is a comment with a file name (`# train.py`): the file is written. If no
  command of the page names it, it is run.
- `yaml`, `json` and `text` whose first line is such a comment: the file is written.
- `console`: each line that begins with `$ ` is run by bash. `console fails`: one of them must fail.
- `text output`, after a console block: is what that block prints. Numbers may differ. A line `...`
  stands for any lines, and `...` within a line for any text. `--write` puts the output there,
  except into a block with such a line.
- `python no-run` and every other language: nothing; the text above the block says why.

A page whose front matter has `blocks:` is run elsewhere, as that line says.

Where a command is `python FILE ARGUMENTS` and no more, a fork of a process that has imported torch
runs the file, which saves the seconds of that import.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(DOCS.parent / "packages/core/tests/shared"))

from zygote import Zygote  # noqa: E402 - of the tests

TIMEOUT = 280
"""Seconds for one command."""

_BLOCK = re.compile(r"^( *)(`{3,})([^\n`]*)\n(.*?)^\1\2`*$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# ([\w./-]+\.(?:py|ya?ml|json|sh|txt))\n")


def pages() -> list[Path]:
    """Return the written pages, without those that are generated."""
    folders = ("start", "guides", "extend", "reference", "design")
    found = [*DOCS.glob("*.md"), *(path for each in folders for path in (DOCS / each).glob("*.md"))]
    return sorted(found)


def run_page(page: Path, *, write: bool = False) -> tuple[int, str]:
    """Run the code of a page; return the line of the block that fails, and what went wrong."""
    text = page.read_text()
    if re.match(r"---\n(?:.*\n)*?blocks: \S", text):
        return 0, ""
    blocks = [
        (match[3].split() or [""], re.sub(rf"^{match[1]}", "", match[4], flags=re.MULTILINE), match)
        for match in _BLOCK.finditer(text)
    ]
    commands = "".join(code for info, code, _ in blocks if info[0] == "console")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = ""
        first = 0
        printed = ""
        outputs = []
        for info, code, match in blocks:
            language = info[0]
            line = text.count("\n", 0, match.start()) + 1
            named = _FILE.match(code)
            if "no-run" in info:
                continue
            if info == ["text", "output"]:
                if write and not re.search(r"^\s*\.\.\.$", code, re.MULTILINE):
                    outputs.append((match.span(4), printed))
                elif problem := difference(code, printed):
                    return line, problem
                continue
            if named and language in ("python", "yaml", "json", "text"):
                (folder / named[1]).parent.mkdir(parents=True, exist_ok=True)
                (folder / named[1]).write_text(code)
                mentioned = named[1] in commands or Path(named[1]).stem in commands
                if language == "python" and not mentioned:
                    problem, _ = run(f"python {named[1]}", folder)
                    if problem:
                        return line, problem
            elif language == "python":
                # The script has the lines of the page, and so have its tracebacks.
                first = first or line
                script += "\n" * (line - script.count("\n")) + code
            elif language == "console":
                lines = "".join(f"{each[2:]}\n" for each in joined(code) if each.startswith("$ "))
                fails = "fails" in info
                problem, printed = run(lines, folder, fails=fails)
                if problem:
                    return line, problem
        if script:
            (folder / "page.py").write_text(script)
            problem, _ = run("python page.py", folder)
            if problem:
                return first, problem
    for (start, end), printed in reversed(outputs):
        text = text[:start] + printed + text[end:]
    if outputs:
        page.write_text(text)
    return 0, ""


def difference(shown: str, printed: str) -> str:
    """Return how the output on a page differs from what was printed, beside numbers; or ""."""
    pattern = "".join(
        r"(?:.*\n)*?" if line.strip() == "..." else rf"{_pattern(line)}\n"
        for line in shown.splitlines()
    )
    if re.fullmatch(pattern, printed):
        return ""
    lines = difflib.unified_diff(
        shown.splitlines(), printed.splitlines(), "on the page", "printed", lineterm=""
    )
    return "a block of output is not what the command prints:\n" + "\n".join(lines)


_TOKEN = re.compile(r"(\.\.\.)|(\s+)|(\b[\da-f]{16,}\b)|(\d(?:[\d.,:]*\d)?(?:e[+-]?\d+)?)|.")


def _pattern(line: str) -> str:
    """Return what matches a line with other numbers and padding, and any text for "..."."""
    kinds = (None, ".*", r"\s+", r"[\da-f]+", r"\d(?:[\d.,:]*\d)?(?:e[+-]?\d+)?")
    matches = _TOKEN.finditer(line.rstrip())
    return "".join(kinds[m.lastindex or 0] or re.escape(m[0]) for m in matches) + r"\s*"


def joined(code: str) -> list[str]:
    """Return the lines of a terminal; a command that goes on after a backslash is one line."""
    return re.sub(r"\\\n(?:> )?\s*", "", code).splitlines()


ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "NO_COLOR": "1",
    "COLUMNS": "100",
}
"""Variables of the commands of pages."""
_OF_THREAD = threading.local()
_SHELL = re.compile(r"[^\w\s./=:,+@%'\"-]")


def run(commands: str, folder: Path, *, fails: bool = False) -> tuple[str, str]:
    """Run lines of commands; return what went wrong, or "", and the output."""
    process = start(commands, folder)
    try:
        printed, _ = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired as error:
        process.kill()
        return f"{commands}\ndid not end within {TIMEOUT} seconds\n{error.stdout!r}", ""
    if (process.returncode != 0) is not fails:
        return f"{commands}\nexit code {process.returncode}\n{printed[-5000:]}", printed
    if os.environ.get("DOCS_SHOW"):
        print(f"{commands}\n{printed}", flush=True)
    lines = printed.replace(str(folder), "/tmp/page").splitlines()
    return "", "".join(f"{line.rstrip()}\n" for line in lines)


def start(commands: str, folder: Path) -> subprocess.Popen[str]:
    """Start commands: one script in a fork, and everything else in bash."""
    words = [] if _SHELL.search(commands) or "\n" in commands.strip() else shlex.split(commands)
    if len(words) > 1 and words[0] == "python" and words[1].endswith(".py"):
        if not hasattr(_OF_THREAD, "zygote"):
            _OF_THREAD.zygote = Zygote(ENVIRONMENT)
        started: subprocess.Popen[str] = _OF_THREAD.zygote.start(
            folder / words[1],
            *words[2:],
            environment=ENVIRONMENT,
            folder=folder,
            merged=True,
        )
        return started
    return subprocess.Popen(
        ["bash", "-c", f"set -e -o pipefail\n{commands}"],
        cwd=folder,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def main(arguments: list[str]) -> int:
    """Run pages on two processes; return the number of pages that fail."""
    write = "--write" in arguments
    arguments = [each for each in arguments if each != "--write"]
    chosen = [Path(each).resolve() for each in arguments] or pages()

    def timed(page: Path) -> tuple[Path, int, str, float]:
        start = time.monotonic()
        line, problem = run_page(page, write=write)
        return page, line, problem, time.monotonic() - start

    failed = 0
    with ThreadPoolExecutor(2) as pool:
        for page, line, problem, seconds in pool.map(timed, chosen):
            if problem:
                failed += 1
                print(f"FAILED {page.relative_to(DOCS)}:{line}\n{problem}\n", flush=True)
            elif seconds > 1:
                print(f"ran {page.relative_to(DOCS)} in {seconds:.0f} s", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
