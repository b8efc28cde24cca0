"""The steps of the lab, in order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LabStep:
    """One step: its file is `steps/sNN_slug.py`, its exercise `exercises/eNN_slug.py`."""

    number: int
    slug: str
    title: str
    teaches: str
    has_exercise: bool = True

    @property
    def module(self) -> str:
        """Of the step's file."""
        return f"ring_flash_attn.lab.steps.s{self.number:02}_{self.slug}"

    @property
    def is_triton(self) -> bool:
        """Whether step and exercise are kernels."""
        return self.number in (1, 7, 8)

    @property
    def exercise(self) -> str:
        """The name of the file that the learner fills in."""
        return f"e{self.number:02}_{self.slug}.py"


_ROWS = (
    ("weighted_sum", "A weighted sum", "the first Triton kernel, forward and backward"),
    ("precision", "Precision", "what fp16 sums lose, and what autocast keeps in fp32"),
    ("standard_attention", "Standard attention", "what it computes, and what it stores"),
    ("online_softmax", "Online softmax", "a softmax over blocks, with a maximum that moves"),
    ("tiled_forward", "Tiled attention", "FlashAttention's forward pass in PyTorch"),
    ("backward", "Backward by recomputation", "gradients without the matrix of probabilities"),
    ("triton_forward", "Forward in Triton", "the same tiles, one program for each block of rows"),
    ("triton_backward", "Backward in Triton", "two kernels, then one with atomics"),
    ("causal", "Causal masks", "masks at the edge, and blocks that need not be visited"),
    ("features", "GQA, windows, sinks", "what today's models ask of the kernel"),
    ("packed", "Packed documents", "many sequences in one stream, without padding"),
    ("merge", "Merging by lse", "two halves of the keys, one result"),
    ("ring", "The ring", "keys and values travel, gradients come home"),
    ("balance", "Zigzag and stripe", "why layouts decide how long the ring takes"),
    ("communication", "The price of communication", "predict, then look at measurements"),
    ("hopper", "What Hopper adds", "a guided reading of the fast kernels"),
)

STEPS = tuple(
    LabStep(number, *row, has_exercise=number < len(_ROWS)) for number, row in enumerate(_ROWS, 1)
)


def find_step(number: int) -> LabStep:
    """The step with this number; ValueError if there is none."""
    if not 1 <= number <= len(STEPS):
        raise ValueError(f"step {number}: there are steps 1 to {len(STEPS)}")
    return STEPS[number - 1]
