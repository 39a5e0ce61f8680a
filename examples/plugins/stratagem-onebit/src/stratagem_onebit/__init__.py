"""1-bit SGD with error feedback, and checkpoints in SQLite databases, for Stratagem."""
