"""Pipeline parallelism: which stage computes what, in which order, and what stages exchange."""
