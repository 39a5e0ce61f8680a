"""Bagua's algorithms for Stratagem."""
