"""One file for each step; read it from top to bottom, then run it."""
