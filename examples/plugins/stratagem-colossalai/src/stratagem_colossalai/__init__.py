"""ColossalAI's boosters for Stratagem."""
