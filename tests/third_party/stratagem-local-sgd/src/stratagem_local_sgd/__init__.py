"""Local SGD for Stratagem. `plugin` describes what is in here; nothing is imported until used."""
