"""The conformance kit for strategies: what every strategy must do, checked in real processes.

`target.py` says what is tested, `check.py` what a check is, and `checks/` has them: each runs on
every rank and returns plain numbers, and judges those of all ranks afterwards, in the process of
pytest. `session.py` starts ranks once for many checks, by the strategy's own launcher; `rank.py` is
what they run, with what `probe.py` gives them; `conformance.py` is what an author subclasses.
"""
