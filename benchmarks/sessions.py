"""Runs the nox sessions that CI leaves out, one after the other, and writes a page of results.

    python benchmarks/sessions.py                         # all of them: several hours, 20 GB
    python benchmarks/sessions.py --only demo third_parties
    python benchmarks/sessions.py --continue              # those that have no row at this commit

A session that fails does not end the run. The folder `--to` gets `results.md`, a table, and a log
of each session. With `--continue` the rows of the same commit are kept; a session that `--only`
names runs again all the same. The status is 0 if every session in the table passed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NOX = (sys.executable, "-m", "nox")
# The short ones first.
SESSIONS = (
    *("demo", "audit", "guide", "scale", "durability", "skew", "matrix", "endurance", "fuzz"),
    "resumes",
    *("deepspeed_ops", "xla", "loggers", "accelerate", "huggingface"),
    *("ray", "conformance", "long", "cluster"),
    *("third_parties", "libraries", "torch_versions"),
)
COUNTED = ("passed", "failed", "skipped")
# The last line of pytest: "== 2 failed, 63 passed in 12.34s ==".
SUMMARY = re.compile(
    r"^=* ?(\d+ (?:passed|failed|skipped|error|deselected|warning).*) in [\d.]+s\b"
)


def listed(names: list[str], nox: tuple[str, ...]) -> list[str]:
    """The sessions of these names, in their order; one with parameters is several."""
    found: list[str] = []
    for name in names:
        command = [*nox, "--list", "--json", "-s", name]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"nox has no session {name!r}\n{done.stderr}")
        found += [session["session"] for session in json.loads(done.stdout)]
    return found


def run(session: str, log: Path, limit: float, nox: tuple[str, ...]) -> str:
    """Run a session, and return how it ended."""
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*nox, "-s", session],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return "failed" if process.wait(limit * 60) else "passed"
        except subprocess.TimeoutExpired:
            return f"no end in {limit:g} minutes"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def counts(text: str) -> dict[str, int]:
    """The tests that passed, failed and were skipped, over all runs of pytest in a log."""
    total: dict[str, int] = {}
    for line in text.splitlines():
        match = SUMMARY.match(line)
        for number, what in re.findall(r"(\d+) (\w+)", match[1]) if match else ():
            kind = "failed" if what in ("error", "errors") else what
            total[kind] = total.get(kind, 0) + int(number)
    return total if set(total) & set(COUNTED) else {}


def environment_of(text: str) -> Path | None:
    """The environment that a log names, if it is one of nox."""
    match = re.search(r"(?:in|environment at) (\.nox/\S+?)\.?$", text, re.MULTILINE)
    return ROOT / match[1] if match else None


def torch_in(environment: Path | None) -> str:
    """The version of torch in an environment."""
    found = environment.glob("lib/python*/site-packages/torch-*.dist-info") if environment else ()
    return ", ".join(sorted(path.name.split("-")[1].removesuffix(".dist") for path in found))


def commit() -> str:
    """The commit, and whether files differ from it."""
    git = ("git", "-C", str(ROOT))
    name = subprocess.check_output([*git, "rev-parse", "--short=10", "HEAD"], text=True).strip()
    changed = subprocess.check_output([*git, "status", "--porcelain"], text=True).strip()
    return f"{name} with uncommitted changes" if changed else name


def page(rows: list[dict[str, Any]], of_commit: str) -> str:
    """The table in Markdown, below what it was measured on."""
    machine = f"{platform.system()} {platform.release()}, {platform.machine()}"
    lines = [
        f"Commit {of_commit}, {datetime.date.today()}. {machine}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}.\n",
        "| session | result | passed | failed | skipped | minutes | torch |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        tests = [str(row["tests"].get(kind, 0)) if row["tests"] else "" for kind in COUNTED]
        cells = [row["session"], row["result"], *tests, f"{row['minutes']:.1f}", row["torch"]]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None, nox: tuple[str, ...] = NOX) -> int:
    """Run the sessions that are asked for, and write the page after each of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="SESSION", help="run these only")
    parser.add_argument("--continue", dest="go_on", action="store_true", help="keep earlier rows")
    parser.add_argument("--to", type=Path, default=ROOT / ".nox/results", help="the folder")
    parser.add_argument("--limit", type=float, default=120, help="minutes of one session")
    parser.add_argument("--remove", action="store_true", help="remove each environment afterwards")
    options = parser.parse_args(arguments)
    options.to.mkdir(parents=True, exist_ok=True)
    kept, now = options.to / "results.json", commit()
    before = json.loads(kept.read_text()) if options.go_on and kept.exists() else {}
    done = {row["session"]: row for row in before.get("rows", ()) if before["commit"] == now}
    for session in listed(options.only or list(SESSIONS), nox):
        if session in done and not options.only:
            continue
        log = options.to / (re.sub(r"[^\w.=-]+", "-", session).strip("-") + ".log")
        print(f"{session}: {log}", flush=True)
        started = time.monotonic()
        result = run(session, log, options.limit, nox)
        text = log.read_text(encoding="utf-8", errors="replace")
        environment, minutes = environment_of(text), (time.monotonic() - started) / 60
        row: dict[str, Any] = {"session": session, "result": result, "minutes": minutes}
        row |= {"tests": counts(text), "torch": torch_in(environment)}
        done[session] = row
        kept.write_text(json.dumps({"commit": now, "rows": list(done.values())}))
        (options.to / "results.md").write_text(page(list(done.values()), now))
        if options.remove and environment:
            shutil.rmtree(environment, ignore_errors=True)
    print(page(list(done.values()), now), end="")
    return int(any(row["result"] != "passed" for row in done.values()))


if __name__ == "__main__":
    # By an exception, so that the session under way ends as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
