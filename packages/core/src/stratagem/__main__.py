"""`python -m stratagem`, for where the program itself is not on the path."""

import sys

from stratagem.cli import main

sys.exit(main())
