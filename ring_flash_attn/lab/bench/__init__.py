"""The lab's benchmarks: attention alone, and a whole Transformer around it."""
