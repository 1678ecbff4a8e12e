"""The benchmarks are scripts: their folder goes on the path, as when one is run."""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = str(Path(__file__).parents[3] / "benchmarks")
if FOLDER not in sys.path:
    sys.path.insert(0, FOLDER)
