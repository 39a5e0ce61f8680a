"""Run the conformance kit on the third party's strategy, without pytest; print what fails as JSON.

    python check_local_sgd.py FOLDER

`test_third_party.py` runs it where only core's wheel, the plugin's and torch are installed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from stratagem_testing.strategies.session import failures
from stratagem_testing.strategies.target import Target

if __name__ == "__main__":
    target = Target(strategy="local_sgd", devices=2, data_groups=2, equal=False)
    print(json.dumps(failures(target, Path(sys.argv[1]))))
