"""What authors of components run against theirs."""
