"""What a run's console is spared: dumps of a hundred lines go to the log file alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from mmengine.logging import MMLogger

_DUMPS = ("Config:\n", "Hooks will be executed in the following order")
_ENVIRONMENT = "\nSystem environment:"


@contextmanager
def dumps_in_the_file_only() -> Iterator[None]:
    """While a runner is built, mmengine's dumps of environment, config and hooks go to its log file
    and not to its console; loggers without a file are as ever."""
    log = MMLogger.callHandlers

    def log_dumps_apart(self: MMLogger, record: logging.LogRecord) -> None:
        files = [handler for handler in self.handlers if isinstance(handler, logging.FileHandler)]
        if not files or not _is_dump(record.getMessage()):
            log(self, record)
            return
        for handler in files:
            if record.levelno >= handler.level:
                handler.handle(record)

    MMLogger.callHandlers = log_dumps_apart
    try:
        yield
    finally:
        MMLogger.callHandlers = log


def _is_dump(message: str) -> bool:
    return message.startswith(_DUMPS) or _ENVIRONMENT in message
