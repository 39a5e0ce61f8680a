"""Stratagem's backend for DeepSpeed; its plugin module says what it offers."""
