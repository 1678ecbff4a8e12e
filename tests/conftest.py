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


@pytest.fixture(autouse=True)
def no_plans_of_others(monkeypatch, tmp_path_factory):
    """A command finds nothing that another test, or the user, has searched for."""
    monkeypatch.setattr("autopar.devices.plans_folder", lambda: tmp_path_factory.mktemp("plans"))
