# Imported by scripts of tests: gives them file systems with other kinds of locks (TEST_LOCKS).
import errno
import fcntl
import os


def fails(descriptor, operation):
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def does_nothing(descriptor, operation):
    """As where one node does not see another's locks."""


KIND = os.environ.get("TEST_LOCKS", "seen")
fcntl.flock = {"seen": fcntl.flock, "none": fails, "unseen": does_nothing}[KIND]
