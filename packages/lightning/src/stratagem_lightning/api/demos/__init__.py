"""Models and data for reports, tests and examples."""
