"""What ranks need."""
