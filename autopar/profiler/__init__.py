"""Profiler: measures the ops and collectives that plans may need, and keeps what it measured."""
