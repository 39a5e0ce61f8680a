"""The program `stratagem`, for a fork that has imported torch already."""

import sys

from stratagem.cli import main

sys.exit(main())
