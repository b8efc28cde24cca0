"""Replays: one rank of many, run and timed on one device without the others."""
