"""Capture: a model's forward as an `OpGraph`, and the graph as a chain of blocks.

    capture         model and example batch -> graph, through torch.export
    verify_capture  loss and gradients of the graph against the model's
    find_blocks     graph -> chain of blocks between narrow cuts, grouped into classes
"""

from autopar.capture.program import Captured, capture

__all__ = ["Captured", "capture"]
