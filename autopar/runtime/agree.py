"""Whether all ranks were given the same tensors.

Every rank cuts its part out of the whole model and the whole batch. Where these differ from rank to
rank (models built without a seed, batches of a distributed sampler) the parts would not fit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import InputError


def check_alike(tensors: Mapping[str, Tensor], what: str, remedy: str) -> None:
    """Raise InputError on every rank, naming the first tensor in which a rank differs from rank 0.

    All ranks call. Reads every byte once; tensors on the meta device count by shape and dtype.
    """
    if dist.get_world_size() == 1:
        return
    own = {name: _digest(tensor) for name, tensor in tensors.items()}
    everyone: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, own)
    first = everyone[0]
    for rank, other in enumerate(everyone):
        for name in (*first, *other):
            if first.get(name) != other.get(name):
                raise InputError(
                    f"rank {rank} was given another {what} {name!r} than rank 0; expected the same "
                    f"on every rank: {remedy}"
                )


def _digest(tensor: Tensor) -> str:
    kind = f"{tensor.dtype} {tuple(tensor.shape)}"
    if tensor.is_meta:
        return f"meta {kind}"
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return f"{hashlib.sha256(data).hexdigest()} {kind}"
