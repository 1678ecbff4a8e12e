"""autopar: an automatic parallelism planner and auto-sharding compiler for PyTorch."""
