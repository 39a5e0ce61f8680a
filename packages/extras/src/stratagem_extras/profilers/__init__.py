"""Profilers of runs."""
