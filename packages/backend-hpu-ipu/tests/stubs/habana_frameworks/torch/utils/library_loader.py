"""Whether the library can be loaded."""


def is_habana_available() -> bool:
    return True
