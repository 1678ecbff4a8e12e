"""Pools of gloo processes that live as long as the test session."""

import sys
from pathlib import Path

import pytest

from autopar.runtime.launch import WorkerPool

# The helpers beside these tests, here and in the workers, which inherit the path.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def pool2():
    with WorkerPool(2, timeout_s=30.0) as pool:
        yield pool


@pytest.fixture(scope="session")
def pool4():
    with WorkerPool(4, timeout_s=30.0) as pool:
        yield pool


@pytest.fixture(scope="session")
def pool8():
    with WorkerPool(8, timeout_s=60.0) as pool:
        yield pool
