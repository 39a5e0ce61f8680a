"""Torch-native accelerators."""
