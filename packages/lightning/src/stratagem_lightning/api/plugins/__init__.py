"""Precisions, cluster environments and checkpoint formats with names of Lightning's."""
