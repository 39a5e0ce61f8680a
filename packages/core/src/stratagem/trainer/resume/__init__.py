"""What a Trainer saves, finds and restores."""
