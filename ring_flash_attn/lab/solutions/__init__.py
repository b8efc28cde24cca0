"""The exercises, filled in. Try first."""
