"""What each strategy buys on given lengths: the same as ``xlength report``."""

import sys

from xlength.cli import main

if __name__ == "__main__":
    sys.exit(main(["report", *sys.argv[1:]]))
