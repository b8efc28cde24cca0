"""Kernels of others behind our protocol: FlashAttention 2, 3 and 4, and cuDNN; one file each."""
