"""Starting ranks and watching them, and the side of a rank. No torch."""
