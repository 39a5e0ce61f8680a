"""Compile modules in place with torch.compile."""
