"""The version, which is one for the five distributions."""

__version__ = "0.1.0"
