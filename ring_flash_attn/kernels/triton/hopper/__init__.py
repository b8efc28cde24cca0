"""The Triton kernel on Hopper, written in Gluon, which comes with Triton.

Tensor cores are fed by bulk copies, and by warps that do nothing else. Read in this order:
`forward.py` and `backward.py`, which have drawings, `primitives.py`, which they share, and
`host.py`.
"""
