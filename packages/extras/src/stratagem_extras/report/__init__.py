"""`stratagem report`: the logs of runs as one HTML file."""
