"""What the frameworks share."""
