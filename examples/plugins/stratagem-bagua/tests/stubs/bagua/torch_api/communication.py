"""Whether there is a process group."""

initialized = False


def is_initialized() -> bool:
    return initialized
