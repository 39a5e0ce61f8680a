"""Lite: the front end for your own loop."""

from stratagem.lite.lite import Lite as Lite
