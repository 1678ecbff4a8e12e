"""How a process of the CPU keeps memory that tensors have left."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt`, as glibc's malloc.h numbers them."""

_LARGEST_BYTES, _MOST_BYTES = 2**30, 2**31 - 1


def keep_freed_memory() -> bool:
    """Let this process keep freed memory for its next tensors; whether the allocator can be told.

    glibc gives large blocks back to the system at once, and gets them anew, zeroed page by page,
    for the next tensor: each step would pay again for all gradients and activations. GPUs have
    torch's caching allocator for that.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_MMAP_THRESHOLD, _LARGEST_BYTES), (_TRIM_THRESHOLD, _MOST_BYTES))
    return all(bool(mallopt(name, value)) for name, value in settings)
