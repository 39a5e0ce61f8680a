"""Report where each rank is when a run hangs or a rank fails."""
