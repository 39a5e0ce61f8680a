"""Torch-native precisions."""
