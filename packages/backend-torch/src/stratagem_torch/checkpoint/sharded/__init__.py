"""The sharded checkpoint format: a directory with one file per rank."""
