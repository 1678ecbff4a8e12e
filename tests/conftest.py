"""Shared fixtures, and how property tests run."""

from hypothesis import settings

# Examples are judged by their values: how long one takes says only how busy the machine is.
settings.register_profile("values", deadline=None)
settings.load_profile("values")
