"""Photographs `report.html` of the first run in a browser, for a light and for a dark page.

    python docs/tools/screenshots.py

It runs the script of docs/start/first-run.md and `stratagem report`, and needs Chromium
(`apt-get install chromium`). The site's build does not run it: the pictures are committed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from blocks import DOCS
from pictures import FOLDER

WIDTH, HEIGHT = 1200, 560


def main() -> int:
    """Write report-light.png and report-dark.png; return the exit code."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print("no Chromium found: apt-get install chromium", file=sys.stderr)
        return 1
    page = (DOCS / "start" / "first-run.md").read_text()
    script = re.search(r"```python\n(# train\.py\n.*?)```", page, re.DOTALL)
    assert script is not None
    with tempfile.TemporaryDirectory(prefix="first-run-") as name:
        folder = Path(name)
        (folder / "train.py").write_text(script[1])
        stratagem = str(Path(sys.executable).with_name("stratagem"))
        for command in (
            [sys.executable, "train.py", "--epochs", "8"],
            [stratagem, "report", "stratagem_logs/version_0"],
        ):
            subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        report = next(folder.rglob("report.html"))
        for mode in ("light", "dark"):
            options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
            options += ["--disable-background-networking", f"--user-data-dir={folder / mode}"]
            options += ["--blink-settings=preferredColorScheme=" + str(int(mode == "light"))]
            target = FOLDER / f"report-{mode}.png"
            size = f"--window-size={WIDTH},{HEIGHT}"
            command = [browser, *options, size, f"--screenshot={target}", report.as_uri()]
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL, timeout=120)
    return 0


if __name__ == "__main__":
    sys.exit(main())
