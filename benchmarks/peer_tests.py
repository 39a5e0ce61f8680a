"""Runs the tests of PyTorch Lightning's public behaviour through `stratagem_lightning`.

The tests are read from a checkout of that library, outside this tree; nothing of it is kept here.
`peer_selection.py` chooses them by a mechanical rule; of a parametrization at most four cases are
taken, evenly spread. What passes with the library itself is the measure::

    python benchmarks/peer_tests.py select CHECKOUT WORK
    python benchmarks/peer_tests.py run WORK peer --python ENV_WITH_LIGHTNING/bin/python
    python benchmarks/peer_tests.py run WORK stratagem --python ENV_OF_OURS/bin/python [--failing]
    python benchmarks/peer_tests.py table WORK

Each file runs in a process of its own, each test under a time-out, and a run that was cut off goes
on where it was. `peer_plugin.py` is the pytest plugin of those processes.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from peer_selection import select

FILE_SECONDS = 1800


def results_of(work: Path, label: str, file: str) -> dict[str, dict[str, Any]]:
    """The newest result of each case of one file."""
    path = work / "results" / label / (file.replace("/", ".") + ".jsonl")
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {line["case"]: line for line in lines}


def wanted(
    work: Path, label: str, file: str, functions: list[str], failing: bool
) -> dict[str, Any]:
    """What the plugin shall run of a file: functions at first, cases once they are known."""
    done = results_of(work, label, file)
    whole = {case: r["outcome"] for case, r in done.items() if r["outcome"] != "started"}
    settled = [case for case, outcome in whole.items() if outcome == "passed" or not failing]
    of_peer = results_of(work, "peer", file)
    if label == "peer" or not of_peer:
        return {"functions": functions, "settled": settled}
    passing = [r for r in of_peer.values() if r["outcome"] == "passed"]
    return {"cases": {r["case"]: [r["function"], r["index"]] for r in passing}, "settled": settled}


def run_file(work: Path, label: str, python: str, file: str, request: dict[str, Any]) -> str:
    """Run one file until each of its cases has a result; what kills its process has crashed."""
    out = work / "results" / label / (file.replace("/", ".") + ".jsonl")
    out.parent.mkdir(parents=True, exist_ok=True)
    started = time.time()
    while True:
        _run_process(work, label, python, file, request, out)
        finished = results_of(work, label, file)
        hung = [result for result in finished.values() if result["outcome"] == "started"]
        if not hung:
            break
        with out.open("a", encoding="utf-8") as stream:
            for result in hung:
                crash = {"outcome": "failed", "cause": "crash", "message": "the process ended"}
                stream.write(json.dumps({**result, **crash}) + "\n")
        request["settled"] = [*request["settled"], *(r["case"] for r in hung)]
        request["settled"] += [c for c, r in finished.items() if r.get("begun", 0) > started]
    counts = collections.Counter(r["outcome"] for r in results_of(work, label, file).values())
    return f"{file}: {dict(counts)} in {time.time() - started:.0f} s"


def _run_process(
    work: Path, label: str, python: str, file: str, request: dict[str, Any], out: Path
) -> None:
    tests = work / "tests"
    with tempfile.TemporaryDirectory(prefix="peer") as folder:
        asked = Path(folder) / "request.json"
        asked.write_text(json.dumps(request), encoding="utf-8")
        (Path(folder) / "cwd").mkdir()
        arguments = ["-q", "--tb=short", "-p", "peer_plugin", "-p", "no:cacheprovider"]
        arguments += ["--rootdir", str(tests), "-c", str(tests / "pytest.ini"), str(tests / file)]
        arguments += [f"--timeout={os.environ['PEER_TESTS_SECONDS']}", "--timeout-method=signal"]
        arguments += [f"--basetemp={folder}/tmp"]
        environment = {
            "PEER_TESTS_REQUEST": str(asked),
            "PEER_TESTS_RESULTS": str(out),
            "HOME": folder,
        }
        zygote = _zygote(work, label, python)
        assert zygote.stdin is not None
        assert zygote.stdout is not None
        job = {
            "arguments": arguments,
            "environment": environment,
            "folder": str(Path(folder) / "cwd"),
            "log": str(out.with_suffix(".log")),
            "seconds": FILE_SECONDS,
        }
        zygote.stdin.write(json.dumps(job) + "\n")
        zygote.stdin.flush()
        if not zygote.stdout.readline():
            raise RuntimeError(f"{python} has ended while it ran {file}")


_threads = threading.local()


def _zygote(work: Path, label: str, python: str) -> subprocess.Popen[str]:
    """Return this thread's process, from which those of the files are forked."""
    zygote: subprocess.Popen[str] | None = getattr(_threads, "zygote", None)
    if zygote is None:
        here = Path(__file__).resolve().parent
        zygote = _threads.zygote = subprocess.Popen(
            [python, str(here / "peer_zygote.py")],
            env={
                **{k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "VIRTUAL_"))},
                "PYTHONPATH": os.pathsep.join([str(work / "tests"), str(here)]),
                "PEER_TESTS_LABEL": label,
                "OMP_NUM_THREADS": "1",
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    return zygote


def run(work: Path, label: str, python: str, only: str, failing: bool, jobs: int) -> None:
    selected = json.loads((work / "selected.json").read_text(encoding="utf-8"))
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        waiting = []
        for file, functions in sorted(selected.items()):
            if not re.search(only, file):
                continue
            request = wanted(work, label, file, functions, failing)
            outcomes = {r["outcome"] for r in results_of(work, label, file).values()}
            if "functions" in request and outcomes and "started" not in outcomes:
                continue
            if not set(request.get("cases", functions)) - set(request["settled"]):
                continue
            waiting.append(pool.submit(run_file, work, label, python, file, request))
        for done in concurrent.futures.as_completed(waiting):
            print(done.result(), flush=True)


def folder_of(file: str) -> str:
    parts = Path(file).parts
    return f"{parts[0].removeprefix('tests_')}/{parts[1].removesuffix('.py')}"


def table(work: Path, label: str) -> None:
    """Print cases by folder and first cause; write those that fail to `work/failing`."""
    selected = json.loads((work / "selected.json").read_text(encoding="utf-8"))
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    failing: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    for file in selected:
        baseline = {
            c for c, r in results_of(work, "peer", file).items() if r["outcome"] == "passed"
        }
        ours = results_of(work, label, file)
        for case in sorted(baseline):
            unknown = {"case": case, "outcome": "failed", "cause": "not run", "message": ""}
            # One that has begun only has none of this yet.
            result = {**unknown, **ours.get(case, {})}
            passed = result["outcome"] == "passed"
            counts[folder_of(file)].update(["peer", "ours" if passed else result["cause"]])
            if not passed:
                failing[folder_of(file)].append(result)
    total: collections.Counter[str] = collections.Counter()
    for count in counts.values():
        total.update(count)
    causes = [c for c, _ in total.most_common() if c not in ("peer", "ours")]
    print("| folder | peer | ours | " + " | ".join(causes) + " |\n|" + "---|" * (3 + len(causes)))
    for folder, count in [
        *sorted(counts.items(), key=lambda item: -item[1]["peer"]),
        ("all", total),
    ]:
        print(
            f"| {folder} | {count['peer']} | {count['ours']} | "
            + " | ".join(str(count[c] or "") for c in causes)
            + " |"
        )
    print(
        f"{total['ours']} of {total['peer']}: {100 * total['ours'] / max(1, total['peer']):.1f} %"
    )
    lists = work / "failing"
    shutil.rmtree(lists, ignore_errors=True)
    lists.mkdir()
    for folder, results in failing.items():
        text = (
            _by_cause(results)
            + "\n\n"
            + "\n".join(f"{r['case']}\n    {r['cause']}: {r['message']}" for r in results)
        )
        (lists / (folder.replace("/", ".") + ".txt")).write_text(text + "\n", encoding="utf-8")
    (lists / "ALL_BY_CAUSE.txt").write_text(
        _by_cause([r for some in failing.values() for r in some]), encoding="utf-8"
    )


def _by_cause(results: list[dict[str, Any]]) -> str:
    causes = collections.Counter(f"{r['cause']}: {r['message'][:150]}" for r in results)
    return "\n".join(f"{count:4} {cause}" for cause, count in causes.most_common())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    choosing = commands.add_parser("select")
    choosing.add_argument("checkout", type=Path)
    choosing.add_argument("work", type=Path)
    running = commands.add_parser("run")
    running.add_argument("work", type=Path)
    running.add_argument("label", help="peer, or a name for a run of ours")
    running.add_argument("--python", default=sys.executable)
    running.add_argument("--only", default="", help="a regular expression for files")
    running.add_argument("--failing", action="store_true", help="runs again what has failed")
    running.add_argument("--jobs", type=int, default=1)
    running.add_argument("--seconds", type=int, default=20, help="of a test; more under load")
    showing = commands.add_parser("table")
    showing.add_argument("work", type=Path)
    showing.add_argument("--label", default="stratagem")
    options = parser.parse_args()
    if options.command == "select":
        select(options.checkout, options.work)
    elif options.command == "run":
        work = options.work.resolve()
        os.environ["PEER_TESTS_SECONDS"] = str(options.seconds)
        run(work, options.label, options.python, options.only, options.failing, options.jobs)
    else:
        table(options.work, options.label)


if __name__ == "__main__":
    main()
