"""A stub of the Gaudi SDK over the simulated device of tests/devices, renamed `hpu`.

It has the documented calls that a plugin makes, with their signatures, and refuses what the SDK
does not take: calls in the wrong order, and those of the other mode.
"""
