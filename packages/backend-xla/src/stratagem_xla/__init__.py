"""Stratagem's backend for PyTorch/XLA; its plugin module says what it offers."""
