"""Callbacks with names or defaults of Lightning's."""
