"""The progress bar, the model summary and the report at the end of a run."""
