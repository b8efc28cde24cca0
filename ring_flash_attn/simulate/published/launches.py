"""Launches: seconds of the kernels that other libraries launch, for the heads of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..machine import Gpu
from ..rates import Band, full, seconds, turned

HALF, SINGLE = 2, 4  # bytes


@dataclass(frozen=True, slots=True)
class Launches:
    """FlashAttention and what stands between its calls, on one GPU.

    A call of FlashAttention's backward is three launches and, with fewer KV heads, a fourth: delta
    and zeros for the sum of dq, the gradients, dq in half precision, and dk and dv summed over
    the query heads of a KV head.
    """

    gpu: Gpu
    kernel: str
    nheads: int  # of one rank, over the batch
    nheads_k: int
    headdim: int

    def of_heads(self, nheads: int, nheads_k: int) -> Launches:
        """The same for other heads."""
        return replace(self, nheads=nheads, nheads_k=nheads_k)

    def forward(self, documents: Sequence[Band]) -> float:
        """One call; each document is its queries against its keys."""
        rate = self.gpu.rate(self.kernel, "forward", self.headdim)
        return seconds(rate, [[band] for band in documents], self.nheads, self.gpu.sms)

    def backward(self, documents: Sequence[Band]) -> float:
        """One call."""
        rate = self.gpu.rate(self.kernel, "backward", self.headdim)
        shards = [[turned(band)] for band in documents]
        main = seconds(rate, shards, self.nheads, self.gpu.sms)
        queries = self.elements(sum(rows for rows, *_ in documents))
        expanded = self.elements(sum(columns for _, columns, *_ in documents))
        before = queries * (2 * HALF + SINGLE)  # out and dout are read, zeros written
        after = queries * (SINGLE + HALF)
        summed = 2 * (expanded + expanded * self.nheads_k / self.nheads) * HALF
        grouped = self.moving(summed) if self.nheads_k != self.nheads else 0.0
        return main + self.moving(before) + self.moving(after) + grouped

    def half(self, rows: int, columns: int) -> list[Band]:
        """One document whose queries see all keys."""
        return [full(rows, columns)]

    def elements(self, tokens: float) -> float:
        """Of a tensor like q."""
        return tokens * self.nheads * self.headdim

    def elements_k(self, tokens: float) -> float:
        """Of a tensor like k."""
        return tokens * self.nheads_k * self.headdim

    def moving(self, size: float, launches: int = 1) -> float:
        """Seconds of element-wise launches that read and write so many bytes together."""
        return self.gpu.moving(size) + (launches - 1) * self.gpu.launch

    def cast(self, elements: float, launches: int = 1) -> float:
        """Between half and single precision."""
        return self.moving(elements * (HALF + SINGLE), launches)

    def add(self, elements: float, launches: int = 1) -> float:
        """Half precision to single."""
        return self.moving(elements * (2 * SINGLE + HALF), launches)

    def copy(self, elements: float, itemsize: int, launches: int = 1) -> float:
        """From one place to another."""
        return self.moving(elements * 2 * itemsize, launches)
