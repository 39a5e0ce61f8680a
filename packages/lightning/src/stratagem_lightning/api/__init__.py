"""Classes and functions that have a name or a default of Lightning's only."""
