"""The plugin of stratagem-lightning, and the form of Lightning's checkpoints."""
