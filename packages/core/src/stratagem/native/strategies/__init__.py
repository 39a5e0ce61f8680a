"""Torch-native strategies."""
