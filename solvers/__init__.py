"""Optimisation problems: numbers in, numbers out. Knows nothing of tensors, torch or autopar.

`choice` picks one option per node of a graph (the sharding ILP); `partition` cuts a chain into
stages (the pipeline ILP); `layers` deals equal layers out to stages, the best of many problems at
once. All return a status, an objective and a proven lower bound. Tests hold
them equal to `brute_force`.
"""
