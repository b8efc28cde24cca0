"""Routes: what travels between the ranks, and when; one file each."""

from . import all_gather, all_to_all, double_ring, mesh, query_ring, ring

__all__ = ["all_gather", "all_to_all", "double_ring", "mesh", "query_ring", "ring"]
