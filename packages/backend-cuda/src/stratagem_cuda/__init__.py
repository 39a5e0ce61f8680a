"""Stratagem's backend for NVIDIA GPUs; its plugin module says what it offers."""
