"""Resume a data loader in the middle of an epoch."""
