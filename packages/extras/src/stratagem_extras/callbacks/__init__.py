"""Callbacks that no run adds by itself."""
