"""`stratagem mesh check`: a step on a mesh beside the same step in one process."""
