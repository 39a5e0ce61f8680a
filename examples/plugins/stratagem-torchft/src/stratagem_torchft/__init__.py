"""Fault-tolerant data parallel for Stratagem, by torchft."""
