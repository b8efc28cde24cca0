"""Profiles: why one call takes as long as it does, as a folder of files; `run.py` makes them."""
