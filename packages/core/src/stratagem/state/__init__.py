"""What a checkpoint is made of in memory: names, shards, plain data."""
