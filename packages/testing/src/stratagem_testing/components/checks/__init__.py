"""The checks, by the kind of component that they look at."""
