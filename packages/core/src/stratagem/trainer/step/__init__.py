"""One optimizer step of a fit."""
