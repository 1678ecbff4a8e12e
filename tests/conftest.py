"""Shared fixtures, how property tests run, and which tests share a process."""

import pytest
from hypothesis import settings

# Examples are judged by their values: how long one takes says only how busy the machine is.
settings.register_profile("values", deadline=None)
settings.load_profile("values")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Where tests run on several cores, those that start ranks do so one after the other."""
    for item in items:
        if item.get_closest_marker("distributed"):
            item.add_marker(pytest.mark.xdist_group("ranks"))
