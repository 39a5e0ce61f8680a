"""Cluster environments that need no SDK."""
