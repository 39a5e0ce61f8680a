"""What the sharding strategies are made of."""
