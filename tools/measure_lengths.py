"""Token lengths of a data set: the same as ``xlength measure``."""

import sys

from xlength.cli import main

if __name__ == "__main__":
    sys.exit(main(["measure", *sys.argv[1:]]))
