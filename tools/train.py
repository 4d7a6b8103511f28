"""Train a model by config: the same as ``xlength train``."""

import sys

from xlength.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
