"""Small things."""
