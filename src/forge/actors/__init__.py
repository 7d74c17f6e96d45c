"""One file for each machine in the loop."""
