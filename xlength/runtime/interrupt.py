"""Ctrl-C: a run ends at once, says where it was and how it is continued, and leaves no process."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from xlength.runtime.atomic import checkpoints_in
from xlength.runtime.environment import end_process, rank_of_launch

INTERRUPTED = 130
"""Exit code after SIGINT: 128 + 2, as in shells."""

_STARTERS = ("multiprocessing", "multiprocess")
_PATIENCE_SECONDS = 3.0


class Progress:
    """How far a run is, to be told when it is interrupted.

    Args:
        args: of ``xlength train``.

    Attributes:
        cfg: the config, once it is read.
        runner: once it trains.
        interrupted: whether there was a SIGINT. Code of others may answer ``KeyboardInterrupt``
            with an exception of its own, or lose it.
    """

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.cfg: Any = None
        self.runner: Any = None
        self.interrupted = False
        self._since = time.time()

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let SIGINT raise ``KeyboardInterrupt`` in this process, and let the processes that are
        forked from it go on: a terminal signals them too, and it is their parent that ends them.

        A process that was started to ignore the signal (``nohup``, ``&``) goes on ignoring it.
        """
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        process, show = os.getpid(), sys.unraisablehook

        def interrupt(number: int, frame: FrameType | None) -> None:
            if os.getpid() == process:
                self.interrupted = True
                raise KeyboardInterrupt

        def end_where_lost(lost: Any) -> None:  # in a finaliser, or in what is called by os.fork
            if self.interrupted and issubclass(lost.exc_type, KeyboardInterrupt):
                self.end()
            show(lost)

        sys.unraisablehook = end_where_lost
        signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            sys.unraisablehook = show
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def end(self) -> NoReturn:
        """End what the run has started, print one line on rank 0, and end the process.

        A second SIGINT ends it in the middle of this.
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        end_children()
        if rank_of_launch() == 0:
            # On a line of its own, behind the terminal's ^C and a bar of progress.
            print(f"\nxlength: {self.says()}", file=sys.stderr)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        atexit._run_exitfuncs()
        end_process(INTERRUPTED)

    def says(self) -> str:
        """Where the run was, and how it goes on."""
        if self.runner is None:
            return f"interrupted before the training of {self.args.config} began"
        where = (
            f"interrupted while training {self.args.config}, after {self.runner.iter:,} of "
            f"{self.runner.max_iters:,} iterations"
        )
        newest = checkpoints_in(self.cfg.work_dir)[:1]
        if newest and newest[0].stat().st_mtime >= self._since:
            alone = "" if self.args.resume in (None, "latest") else " alone"
            last, command = newest[0], f"the same command with --resume{alone} continues"
        elif self.cfg.resume:
            last, command = self.cfg.load_from, "the same command continues"
        else:
            return f"{where}; there is no checkpoint yet: the same command begins anew"
        return f"{where}; the last checkpoint is {last}: {command} there"


def end_children() -> None:
    """End a loader's workers, and those that prepare data: the datasets library starts its own by
    ``multiprocess``, a copy of ``multiprocessing``."""
    if hasattr(signal, "SIGCHLD"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler takes it for a failure
    known = [sys.modules[name] for name in _STARTERS if name in sys.modules]
    children = [child for module in known for child in module.active_children()]
    for child in children:
        child.terminate()
    until = time.monotonic() + _PATIENCE_SECONDS
    for child in children:
        child.join(max(0.0, until - time.monotonic()))
        if child.is_alive():
            child.kill()
            child.join()
