"""Fixtures for all tests."""

import logging
import os
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_datasets_cache(tmp_path_factory):
    """Prepared data sets of the tests go to a temporary folder, those of their processes too."""
    folder = tmp_path_factory.mktemp("datasets")
    before = os.environ.get("HF_DATASETS_CACHE")
    os.environ["HF_DATASETS_CACHE"] = str(folder)
    if "datasets" in sys.modules:
        sys.modules["datasets"].config.HF_DATASETS_CACHE = Path(folder)
    yield folder
    if before is None:
        del os.environ["HF_DATASETS_CACHE"]
    else:
        os.environ["HF_DATASETS_CACHE"] = before


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
