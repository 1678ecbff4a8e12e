"""Ends process groups for good. torch's private parts for that are used here alone.

A gloo group has a thread that wakes a hundred times a second, so groups that are not let go of slow
a machine down: a thousand of them take a core. torch lists the groups it knows nowhere public, and
its DTensor code remembers every mesh that it has seen, and with it the groups, without end.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch.distributed as dist
from torch.distributed.tensor import _collective_utils, _redistribute, _sharding_prop, debug

_REMEMBERS_MESHES = (
    (_redistribute, "_gen_transform_infos"),
    (_collective_utils.MeshTopoInfo, "build_from_mesh"),
    (_sharding_prop.ShardingPropagator, "_propagate_tensor_meta_cached"),
)
"""Functions whose results torch caches by arguments that hold a mesh."""


def end_groups(groups: Iterable[object]) -> None:
    """Destroy groups and forget the meshes made of them. Nothing may use them afterwards.

    Groups are as `new_group` gave them: to a stranger a number, which is passed over.
    Their threads end when the last mesh or model that holds one is gone. The caches that are
    emptied fill again at the next use of a DTensor.
    """
    for group in groups:
        if isinstance(group, dist.ProcessGroup):
            dist.destroy_process_group(group)
    debug._clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    for owner, name in _REMEMBERS_MESHES:
        clear = getattr(getattr(owner, name, None), "cache_clear", None)
        if clear is not None:  # another version of torch may remember otherwise
            clear()


def end_all_groups() -> None:
    """End every group of this process but the default one."""
    from torch.distributed.distributed_c10d import _world

    end_groups(group for group in list(_world.pg_map) if group is not dist.group.WORLD)
    gc.collect()
