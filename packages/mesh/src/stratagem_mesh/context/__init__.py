"""Context parallelism: modules whose ranks compute parts of a sequence."""
