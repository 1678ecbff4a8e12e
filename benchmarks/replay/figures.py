"""Figures of samples."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import numpy as np


def error_figures(errors: Sequence[float]) -> dict[str, float]:
    """Median and 90th percentile of |error|, and the median signed error."""
    sizes = [abs(error) for error in errors]
    return {"median": median(sizes), "p90": p90(sizes), "bias": median(errors)}


def p90(values: Sequence[float]) -> float:
    """The 90th percentile, by linear interpolation."""
    return float(np.quantile(values, 0.9))
