"""Decentralized training for Stratagem, by hivemind."""
