"""Transformer Engine as its documentation has it (2.9 to 2.20), for tests: it runs on any device.

Signatures are those of the documented modules. States are enforced: what the real ones would refuse
or compute wrongly raises here. Nothing is rounded to float8.
"""

__version__ = "2.20.2"
