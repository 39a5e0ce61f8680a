"""Stratagem's torch-native backend; its plugin module says what it offers."""
