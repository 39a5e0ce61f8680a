"""Loggers that write to experiment trackers."""
