"""Convert and average the weights of checkpoints."""
