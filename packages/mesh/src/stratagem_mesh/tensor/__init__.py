"""Tensor parallelism: which layers are divided, and how."""
