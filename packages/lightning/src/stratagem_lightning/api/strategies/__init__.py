"""Strategies with arguments of Lightning's."""
