"""A stub of bagua 0.9: documented signatures, and an error where a call comes too soon or twice."""
