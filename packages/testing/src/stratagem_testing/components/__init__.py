"""The conformance kits of all components but strategies.

`component.py` says what is tested, `check.py` what a check is, and `checks/` has them, a file or
two for each kind. Each runs in a process of its own, which `server.py` forks where torch has been
imported once, and judges by itself: it raises what is wrong. `bench.py` is what a check has at
hand, `conformance.py` what an author subclasses.
"""
