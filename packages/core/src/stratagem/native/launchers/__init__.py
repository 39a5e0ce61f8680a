"""Launchers that need no SDK."""
