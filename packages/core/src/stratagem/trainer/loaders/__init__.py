"""The data loaders of a run."""
