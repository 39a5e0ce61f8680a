"""Torch-native checkpoint formats."""
