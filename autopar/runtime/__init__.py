"""Runs a generated program: process groups, communication, kernels, executor, parameters."""
