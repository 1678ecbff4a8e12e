"""Questions about plans: how a model scales, what fits, what a change is worth."""
