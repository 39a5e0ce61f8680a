"""Loaders of ranks, the order of samples, and resuming within an epoch."""
