"""Intel GPUs for Stratagem."""
