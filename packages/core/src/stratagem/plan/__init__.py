"""From a request to a plan: what runs where, and why. No torch."""
