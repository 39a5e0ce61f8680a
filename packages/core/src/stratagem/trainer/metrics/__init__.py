"""Logged values: reduction over steps, epochs and ranks, and delivery to loggers."""
