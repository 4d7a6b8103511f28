"""Fixtures for all tests."""

import logging

import pytest


@pytest.fixture
def log_lines():
    """The messages that reach mmengine's current logger during the test, as a growing list."""
    from mmengine.logging import MMLogger

    lines = []

    class Keep(logging.Handler):
        def emit(self, record):
            lines.append(record.getMessage())

    logger, handler = MMLogger.get_current_instance(), Keep()
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
