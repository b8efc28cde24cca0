"""Kernels: who does the arithmetic of one step; one file or folder each, none knows another."""
