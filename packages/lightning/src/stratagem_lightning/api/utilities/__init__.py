"""Lightning's helper functions."""
