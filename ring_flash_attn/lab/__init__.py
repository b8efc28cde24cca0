"""The lab: FlashAttention from one loop to Triton to the ring, in steps that run on any machine."""
