"""What authors of a distribution run: examine it, or start a new one."""
