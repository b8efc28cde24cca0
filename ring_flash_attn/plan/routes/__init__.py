"""Routes: what travels between the ranks, and when; one file each."""

from . import all_gather, query_ring, ring

__all__ = ["all_gather", "query_ring", "ring"]
