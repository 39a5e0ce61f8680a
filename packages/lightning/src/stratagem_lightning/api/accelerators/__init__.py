"""Accelerators with methods of Lightning's."""
