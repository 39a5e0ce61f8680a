"""`python -m stratagem.cli`, for where the program itself is not on the path."""

import sys

from stratagem.cli import main

sys.exit(main())
