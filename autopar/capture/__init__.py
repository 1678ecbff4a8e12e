"""Capture: a model's forward as an `OpGraph`, and the graph as a chain of blocks.

capture               model and example batch -> graph, through torch.export
verify_capture        the graph's loss and gradients against the model's
same_when_evaluating  whether the training graph also serves evaluation
find_blocks           graph -> chain of blocks between narrow cuts, grouped into classes
check_chain           whether a chain holds the whole graph
"""

from autopar.capture.blocks import find_blocks
from autopar.capture.chain import check_chain
from autopar.capture.compare import first_difference, same_when_evaluating
from autopar.capture.program import Captured, capture
from autopar.capture.verify import verify_capture

__all__ = [
    "Captured",
    "capture",
    "check_chain",
    "find_blocks",
    "first_difference",
    "same_when_evaluating",
    "verify_capture",
]
