"""How many threads numpy's linear algebra takes where autopar has a process to itself.

Solvers multiply many small matrices. With more threads than one these take several times the
processor time, from the processes that work beside, and no less by the clock.
"""

from __future__ import annotations

ONE_THREAD = ("OPENBLAS_NUM_THREADS", "1")
"""A default for the environment, read when numpy is loaded first."""
