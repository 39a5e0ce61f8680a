"""Read checkpoints without executing anything in them."""
