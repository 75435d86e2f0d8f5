"""`python -m qshard`: the command `qshard`."""

import sys

from qshard._cli import main

if __name__ == "__main__":
    sys.exit(main())
