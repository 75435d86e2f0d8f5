"""Entry point of `python -m qshard`: runs the command line tool `qshard`."""

import sys

from qshard._cli import main

if __name__ == "__main__":
    sys.exit(main())
