"""What a step of a model runs on a CPU before an op, for measuring ops as they are met in a step.

An op that is run again and again finds its data and its code in the core's cache, and the processor
foretells its branches. In a step it follows others, which have taken its place there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

_CORE_CACHE_BYTES = 2**22
"""More than the cache that a core of a CPU has to itself; what cores share, others use too."""

_ROWS, _WIDTH = 16, 64


def _leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), requires_grad=True)


@dataclass(frozen=True, slots=True)
class OtherOps:
    """Ops of many kinds, forward and backward, on small tensors, after a write over the core's
    cache. Nothing of what the caller measures is changed."""

    _cache: Tensor = field(default_factory=lambda: torch.empty(_CORE_CACHE_BYTES, dtype=torch.int8))
    _table: Tensor = field(default_factory=lambda: _leaf(2 * _ROWS, _WIDTH))
    _weight: Tensor = field(default_factory=lambda: _leaf(_WIDTH, _WIDTH))
    _scale: Tensor = field(default_factory=lambda: _leaf(_WIDTH))

    def __call__(self) -> None:
        """Run them."""
        self._cache.zero_()
        with torch.enable_grad():
            loss = self._loss()
        torch.autograd.grad(loss, (self._table, self._weight, self._scale))

    def _loss(self) -> Tensor:
        rows = torch.arange(_ROWS)
        x = F.embedding(rows, self._table)
        hidden = F.linear(F.layer_norm(x, (_WIDTH,), self._scale), self._weight)
        left, right = hidden.view(2, -1, _WIDTH).transpose(0, 1).split(_WIDTH // 2, dim=-1)
        scores = torch.softmax(left @ right.transpose(-1, -2), dim=-1)
        mixed = (scores @ torch.cat([right, left], dim=-1)).reshape(_ROWS, _WIDTH)
        return F.cross_entropy((F.gelu(mixed) * self._scale - x).sigmoid(), rows)
