"""Apple silicon's GPU for Stratagem."""
