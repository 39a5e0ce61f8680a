"""`stratagem report`: the logs of runs as one HTML file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from os.path import commonpath
from pathlib import Path

from stratagem.cli import parser_of
from stratagem.errors import ConfigurationError, StratagemError, format_text
from stratagem_extras.report.logs import find_runs, read_run

_DESCRIPTION = """Draw the logs of one or several runs as one HTML file.

  stratagem report stratagem_logs/version_0
  stratagem report stratagem_logs --output runs.html

RUN is the folder of a run (the metrics.csv of a CSVLogger, TensorBoard's event files), or a folder
of such folders. Runs are drawn side by side. The file loads nothing from elsewhere. The exit code
is 2 if a folder has no logs or the file cannot be written.
"""

_MOST_RUNS = 24
"""The most runs of a page: beyond, lines can no longer be told apart."""


def report(arguments: Sequence[str]) -> int:
    """Write a report; return the exit code."""
    parser = parser_of("report", _DESCRIPTION, json=False)
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="a folder with logs")
    parser.add_argument(
        "--output", metavar="FILE", type=Path, default=Path("report.html"), help="report.html"
    )
    options = parser.parse_args(arguments)
    try:
        return _report(options.runs, options.output)
    except (StratagemError, OSError) as error:
        print(f"stratagem report: error: {error}", file=sys.stderr)
        return 2


def _report(paths: Sequence[Path], output: Path) -> int:
    if not output.absolute().parent.is_dir():
        raise ConfigurationError(
            f"--output {output}: expected a file in a folder that exists: make the folder first"
        )
    folders = find_runs(paths)
    if len(folders) > _MOST_RUNS:
        print(
            f"{len(folders)} runs found; the last {_MOST_RUNS} are drawn: name the others to draw "
            "them",
            file=sys.stderr,
        )
        folders = folders[-_MOST_RUNS:]
    runs = [read_run(folder, name) for folder, name in _named(folders).items()]
    for run in runs:
        for note in run.notes:
            print(f"{run.name}: {note}", file=sys.stderr)
    from stratagem_extras.report.page import write_page

    # Undecodable bytes of paths are surrogates, which are no UTF-8.
    output.write_text(write_page(runs), encoding="utf-8", errors="backslashreplace")
    print(f"{output}: {len(runs)} run(s). Open it in a browser")
    return 0


def _named(folders: Sequence[Path]) -> dict[Path, str]:
    """Return a name for each run: what its path has beyond that of all, or its last part."""
    if len(folders) == 1:
        return {folders[0]: format_text(folders[0].name)}
    common = commonpath(folders)
    return {each: format_text(str(each.relative_to(common))) for each in folders}
