"""The Triton kernel on Hopper, written in Gluon, which comes with Triton.

Warp-specialised: producer warps feed the tensor cores by TMA, consumer warpgroups issue WGMMAs.
Read in this order: `forward.py` and `backward.py`, which have drawings, `primitives.py`, which they
share, and `host.py`.
"""
