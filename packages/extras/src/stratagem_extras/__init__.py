"""Callbacks, loggers for services, profilers, the Tuner and configuration files."""
