"""Bytes at a path or a URL: durable, locked, claimed. No torch."""
