"""Plain single-device PyTorch models, at small and at published sizes.

This package stands where user code stands: it knows nothing of how its models are made parallel.
`registry.ZOO` lists the models, `registry.load` finds one by name.
"""
