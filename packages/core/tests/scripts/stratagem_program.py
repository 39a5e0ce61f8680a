"""The program `stratagem`, for a fork that has imported torch already."""

import sys

from stratagem.cli import main

if __name__ == "__main__":  # processes that the program starts import this script
    sys.exit(main())
