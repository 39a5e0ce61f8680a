"""LightningModule, LightningDataModule, and what a Trainer shows of its loops and states."""
