"""Tensor sizes that may grow with the batch.

A captured graph is valid for every micro-batch size, so a size is an affine function of the number
of samples the program sees: `const + per_sample * batch`. A merged `batch * sequence` dim at
sequence length 64 is `64*batch`; a hidden dim is the constant `4096`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TERM = re.compile(r"^(?:(\d+)\*)?batch$")


@dataclass(frozen=True, slots=True, order=True)
class Size:
    """`const + per_sample * batch`, the extent of one dim or an integer argument of an op."""

    const: int = 0
    per_sample: int = 0

    def at(self, batch: int) -> int:
        """The extent when the program sees `batch` samples."""
        return self.const + self.per_sample * batch

    @property
    def is_batch(self) -> bool:
        """Whether the size grows with the batch."""
        return self.per_sample != 0

    def __str__(self) -> str:
        if not self.per_sample:
            return str(self.const)
        term = "batch" if self.per_sample == 1 else f"{self.per_sample}*batch"
        return f"{term}+{self.const}" if self.const else term

    @staticmethod
    def parse(text: str) -> Size:
        """Inverse of `str`. Raises ValueError on text `str` never gives."""
        const, per_sample = 0, 0
        for part in text.split("+"):
            if match := _TERM.match(part):
                per_sample += int(match.group(1) or 1)
            else:
                const += int(part)
        return Size(const, per_sample)


Shape = tuple[Size, ...]


def shape_at(shape: Shape, batch: int) -> tuple[int, ...]:
    """The concrete shape when the program sees `batch` samples."""
    return tuple(size.at(batch) for size in shape)
