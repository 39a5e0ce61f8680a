"""Context parallelism: modules that compute a part of a sequence on each rank."""
