"""Steps 2 and 15, whose results are numbers: sums in several precisions, the price of a ring."""

from __future__ import annotations

from typing import Any

import torch

from .compare import Judgement
from .learner import Cases, Learner


def accumulate(learner: Learner) -> Cases:
    """Step 2: with each pair of dtypes, cast first or not."""
    half, single = torch.float16, torch.float32
    pairs = ((single, single), (half, half), (single, half), (torch.bfloat16, torch.bfloat16))
    for dtype, value_dtype in pairs:
        for cast_first in (False, True):
            for n, value in ((1000, 0.01), (300, 0.1)):
                total = torch.zeros((), dtype=dtype)
                one = torch.tensor(value, dtype=value_dtype)
                for _ in range(n):
                    total += one.to(dtype) if cast_first else one

                def judge(found: Any, true: float = total.item()) -> Judgement:
                    if not isinstance(found, (int, float)):
                        return Judgement([f"a {type(found).__name__} returned, not a float"])
                    near = abs(found - true) <= 1e-6 * abs(true)
                    words = f"the sum is {found:.6g}, expected {true:.6g}"
                    return Judgement([] if near else [words])

                cast = ", cast first" if cast_first else ""
                words = f"{value} as {value_dtype} {n} times to {dtype}{cast}"
                given = (dtype, value_dtype, cast_first, n, value)
                yield learner.case("accumulate", words, judge, *given)


def predict(learner: Learner) -> Cases:
    """Step 15: forward and backward, on fast and slow networks."""
    fast, slow = (8e14, 4e11, 5e-6), (4e14, 2e10, 2e-5)
    for tokens, ranks, rates in ((65536, 8, fast), (8192, 4, slow), (1 << 20, 16, slow)):
        pairs, heads, heads_k, d = tokens * (tokens + 1) // 2, 32, 8, 128
        speed, bandwidth, latency = rates
        for backward in (False, True):
            step = pairs * 4 * heads * d * (2.5 if backward else 1) / ranks**2 / speed
            half = 2 * (2 * tokens // ranks * heads_k * d)  # bytes of k and v; dk and dv are fp32
            sent = [half * (t < ranks - 1) + 2 * half * (backward and t > 1) for t in range(ranks)]
            sent.append(2 * half * backward)
            times = [latency + size / bandwidth if size else 0.0 for size in sent]
            works = [*[step] * ranks, 0.0]
            exposed = sum(max(0.0, time - work) for time, work in zip(times, works))
            true = {"compute": step * ranks, "communication": sum(times), "exposed": exposed}

            def judge(found: Any, true: dict[str, float] = true) -> Judgement:
                if not isinstance(found, dict):
                    return Judgement([f"a {type(found).__name__} returned, not a dict"])
                lines = [f"{name} is missing" for name in true if name not in found]
                for name in (name for name in true if name in found):
                    got, right = found[name], true[name]
                    if not abs(got - right) <= 1e-3 * right:
                        times = f", {got / right:.3g} times as much" if right else ""
                        lines.append(f"{name}: {got:.4g} s, expected {right:.4g} s{times}")
                return Judgement(lines)

            words = f"{'backward' if backward else 'forward'}, {tokens} tokens on {ranks} ranks"
            words += f", {speed:.3g} FLOP/s, {bandwidth:.3g} bytes/s, latency {latency:.3g} s"
            given = (pairs, tokens, ranks, heads, heads_k, d, *rates, backward)
            yield learner.case("predict", words, judge, *given)
