"""Train a model by config, on one process or, through a launcher, on many.

CONFIG is a file or the name of a config that comes with xlength (see xlength list-cfg). The
process ends with code 0 after a whole run, 2 on a mistake in the arguments or the config, 1 after
a crash, 75 after SIGTERM: then it has saved a checkpoint at the end of the running step, and
--resume continues exactly there. A second SIGTERM ends it at once. Ctrl-C ends it at once with 130;
--resume continues from the last checkpoint. torchrun makes all of these 1; tools/dist_train.sh
passes them on.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from mmengine.config import DictAction

    parser.add_argument("config", metavar="CONFIG", help="file or name of a config")
    parser.add_argument("--work-dir", help="folder of logs and checkpoints")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="latest",
        metavar="CKPT",
        help="continue from the latest checkpoint in the work dir, or from CKPT",
    )
    parser.add_argument("--launcher", choices=["none", "pytorch", "slurm", "mpi"], default="none")
    parser.add_argument("--seed", type=int, help="random seed of the run")
    parser.add_argument("--amp", action="store_true", help="mixed precision")
    parser.add_argument(
        "--cfg-options",
        nargs="+",
        action=DictAction,
        metavar="KEY=VALUE",
        help="settings that override the config's, e.g. model.lora=None 'a.b=[1,2]'",
    )
    parser.add_argument("--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    from xlength.runtime.training import train

    return train(args)
