"""Ranks once they run: process group, status, uneven inputs, sync batch norm."""
