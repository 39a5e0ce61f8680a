"""ModelCheckpoint: when to save, which files to keep, and how to name them."""
