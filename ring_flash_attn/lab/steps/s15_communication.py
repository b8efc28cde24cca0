"""Step 15: the price of communication: predict, then look at measurements.

What we want. Before anybody books 8 GPUs: how long does one rank work, how long do its messages
take, and how much of that shows? Three lines of arithmetic answer it. For the tokens T of a stream
on W ranks, in a balanced layout (step 14):

    work       4 · heads · d FLOPs for each allowed pair (two products), × 2.5 backward (five)
               compute = FLOPs / W / rate          rate: what the kernel reaches on one GPU
    a hop      k and v of one shard in bf16:  2 · T/W · heads_k · d · 2 bytes
               backward, dk and dv in fp32 besides: twice that
               time = latency + bytes / bandwidth  (of one direction: we send while we receive)
    exposed    a hop runs while a step computes:  max(0, hop − compute / W), added up over the steps

When is a hop hidden? For one causal document and n tokens a rank, a step has n² / 2 pairs:

    hop < step  ⇔  4 n heads_k d / bandwidth  <  2 heads d n² / rate
                ⇔  n  >  2 · (heads_k / heads) · rate / bandwidth

The head dimension cancels. With GQA 32/8, 700 TFLOP/s and 450 GB/s that is 778 tokens a rank,
latency aside. With a network card of 50 GB/s it is 7,000.

Packed documents change one side only. A document sees itself: pairs shrink from T² / 2 to the sum
of length² / 2, while a shard has as many bytes as before. So short documents make links matter. (A
layout that keeps documents together helps: the library sends a shard only as far as somebody needs
it. Zigzag spreads every document over all ranks, so there everybody needs everything.)

In which step does what travel? Keys of step t + 1 travel during step t. Gradients of step t travel
during step t + 1, from the first visited rank on (t = 1); what our own queries add stays at home.
The last hop, which brings them home, has no work to hide behind.

The model knows no merges, launches, masks at the edge, late ranks or shared links. What it leaves
open is what a measurement tells you. Time that it says is hidden and that you see all the same is a
bug to look for, or the price of one of these.

Exercise 15. Write `predict`. Then put in your own model and your own link. `rfa lab check 15 DIR`
looks at it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ...bench.links import LINKS
from ...bench.results import Row, load
from ...plan import Payload, Problem, make_plan
from ...plan.layout import get_layout
from ...plan.tiles import Mask

RESULTS = Path(__file__).parents[3] / "results"  # there in a source checkout


def causal_pairs(*lengths: int) -> int:
    """Allowed (query, key) pairs of causal documents."""
    return sum(length * (length + 1) // 2 for length in lengths)


def predict(
    pairs: int, tokens: int, world_size: int, heads: int, heads_k: int, headdim: int,
    flops_per_second: float, bytes_per_second: float, latency: float, backward: bool = False,
) -> dict[str, float]:  # fmt: skip
    """Seconds of one rank in one pass: "compute", "communication", and what is "exposed" of it."""
    flops = 4 * heads * headdim * pairs * (2.5 if backward else 1)
    compute = flops / world_size / flops_per_second
    keys = 2 * tokens / world_size * heads_k * headdim * 2  # bytes of k and v, bf16
    gradients = 2 * keys  # dk and dv, fp32
    communication = exposed = 0.0
    for step in range(world_size + (backward and world_size > 1)):
        size = keys if step < world_size - 1 else 0
        size += gradients if backward and step >= 2 else 0
        hop = latency + size / bytes_per_second if size else 0.0
        work = compute / world_size if step < world_size else 0.0
        communication += hop
        exposed += max(0.0, hop - work)
    return {"compute": compute, "communication": communication, "exposed": exposed}


def check() -> None:
    """Pairs and messages against the library's plans, step by step; then one sum by hand."""
    world_size, tokens = 4, 4096
    lengths = (tokens,)
    problem = Problem(get_layout("zigzag"), lengths, lengths, world_size, Mask.of(causal=True))
    for backward in (False, True):
        for rank in range(world_size):
            plan = make_plan("ring", problem, rank, backward)
            expected = causal_pairs(tokens) // world_size
            assert plan.pairs == expected, f"rank {rank}: {plan.pairs} pairs, not {expected}"
            for number, step in enumerate(plan.steps):
                sent = [each.payload for each in step.transfers if each.source == rank]
                keys, gradients = number < world_size - 1, backward and number >= 2
                want = [Payload.INPUT] * keys + [Payload.RESULT] * gradients
                assert sent == want, f"rank {rank}, step {number}: sends {sent}, not {want}"
    # 8 ranks × 8192 tokens, 32/8 heads of 128: 4.4 TFLOP a rank, and 7 hops of 33.6 MB.
    times = predict(causal_pairs(65536), 65536, 8, 32, 8, 128, 700e12, 450e9, 10e-6)
    for name, ms in (("compute", 6.283), ("communication", 0.592), ("exposed", 0.0)):
        assert abs(times[name] * 1e3 - ms) < 1e-3, f"{name}: {times[name] * 1e3:.4f} ms, not {ms}"


SHOWN = ("nvlink4", "nvlink-h800", "pcie5", "ib400")  # links
DOCUMENTS = (24832, 25600, 12800, 1280, 1024)
SHAPE = (65536, 8, 32, 8, 128)  # tokens, ranks, heads, KV heads, head dimension


def rates(pairs: int, forward: float, both: float) -> tuple[float, float]:
    """FLOPs in a second, forward and backward, from a rank's seconds of both passes."""
    flops = 4 * 32 * 128 * pairs / 8
    return flops / forward, 2.5 * flops / (both - forward)


def both_passes(
    pairs: int, speed: tuple[float, float], link: str
) -> dict[str, tuple[float, float]]:
    """(compute, exposed) in ms of the forward pass, and of both together."""
    numbers = LINKS[link].bandwidth, LINKS[link].latency
    there = predict(pairs, *SHAPE, speed[0], *numbers)
    back = predict(pairs, *SHAPE, speed[1], *numbers, backward=True)
    forward = 1e3 * there["compute"], 1e3 * there["exposed"]
    return {
        "forward": forward,
        "both": (forward[0] + 1e3 * back["compute"], forward[1] + 1e3 * back["exposed"]),
    }


def show_predictions() -> None:
    """One rank of 8 on different links."""
    print("one rank of 8, 65,536 tokens, 32/8 heads of 128, 700 TFLOP/s forward, 600 backward; ms")
    print("                                forward          forward + backward")
    print("documents   link           compute   exposed     compute   exposed")
    for name, lengths in (("1", (65536,)), ("5", DOCUMENTS), ("64 × 1024", (1024,) * 64)):
        for link in SHOWN:
            found = both_passes(causal_pairs(*lengths), (700e12, 600e12), link)
            cells = "  ".join(f"{a:10.2f}{b:10.2f}" for a, b in found.values())
            print(f"{name:11} {link:12}{cells}")


def measured(lengths: tuple[int, ...], file: str, **placement: object) -> dict[str, Row]:
    """Stored rows of our Triton kernels: forward and both, of the slowest rank."""
    rows: dict[str, Row] = {}
    for row in load(RESULTS / file).rows:
        if row.implementation != "triton" or not row.values.get("slowest"):
            continue
        same = all(row.placement.get(name) == value for name, value in placement.items())
        documents = tuple(row.workload.get("lengths", (65536,)))
        if same and documents == lengths and row.workload["nheads_k"] == 8:
            rows.setdefault(row.passes, row)
    return rows


REPLAYS = (  # name, documents, file, how the stream is spread
    ("contiguous", (65536,), "ring_h200.json", {"layout": "contiguous", "route": "ring"}),
    ("zigzag", (65536,), "ring_h200.json", {"layout": "zigzag", "route": "ring"}),
    ("stripe", (65536,), "ring_h200.json", {"layout": "stripe", "route": "ring"}),
    ("zigzag, 1 hop a launch", (65536,), "replays_h200.json", {"sources_per_launch": 1}),
    ("zigzag, 4 hops a launch", (65536,), "replays_h200.json", {"sources_per_launch": 4}),
    ("5 documents, 1 hop", DOCUMENTS, "replays_h200.json", {"sources_per_launch": 1}),
    ("5 documents, 4 hops", DOCUMENTS, "replays_h200.json", {"sources_per_launch": 4}),
)


def replays() -> Iterator[tuple[str, str, float, float, Row]]:
    """(name, passes, compute and exposed in ms as predicted, what is stored) of each replay."""
    for name, lengths, file, placement in REPLAYS:
        if not (RESULTS / file).is_file():
            continue
        rows, pairs = measured(lengths, file, **placement), causal_pairs(*lengths)
        if len(rows) < 2:
            continue
        base = [rows[passes].values["theoretic_ms"] / 1e3 for passes in ("forward", "both")]
        waits = 2 - 1 / 8 if name == "contiguous" else 1.0  # step 14
        found = both_passes(pairs, rates(pairs, base[0], base[1]), "nvlink4")
        for passes, (compute, exposed) in found.items():
            yield name, passes, compute * waits, exposed, rows[passes]


def show_measurements() -> None:
    """What is stored, beside what the model says with the rate of the same kernel on one GPU."""
    found = list(replays())
    if not found:
        print("\nstored measurements: only in a source checkout, under results/; none here")
        return
    print("\nreplays on one H200: a rank's real kernels and schedule, the other ranks and NVLink")
    print("(450 GB/s) emulated; the slowest rank; rates from the same kernel on one rank's tokens")
    print("                                         predicted ms          measured ms")
    print("                                      compute   exposed        all   exposed")
    for name, passes, compute, exposed, row in found:
        seen = row.values.get("exposed_ms")
        numbers = f"{compute:10.2f} {exposed:9.2f} {row.ms or 0:10.2f}"
        print(f"  {name:24} {passes:8}{numbers} {'–' if seen is None else f'{seen:.2f}':>9}")
    print("Exposed is a difference of two measured times: it has their noise, and may be negative.")
    print("Faster than predicted? A short causal triangle, the base, runs below the full rate.")


PUBLISHED = """
published: SandAI-org/MagiAttention at 2c64135, docs/source/blog/cp_benchmark.md, read off its
charts (± 1): 8 × H100, 64/8 heads of 128, 8k tokens a GPU, causal, forward; TFLOP/s a GPU. For one
document the model hides every hop, and predicts the rate of one GPU.
                            one document   packed documents
  FA3 on one GPU, 8k             656             483
  ring, point to point           422              89
  ring, all-gather               601             288
  Ulysses                        601             278
  Magi, native                   644             459

published: thunlp/BurstEngine at 426eb7a, evaluation/kernel_bench: 32 × A800, 512k tokens, 40 heads
of 128, causal; ms a call: forward kernel 13.73, backward kernel 37.11, NCCL send and receive 5.08,
merge 0.32. A hop fits behind a kernel."""


def published() -> Iterator[tuple[str, str, float, float]]:
    """(name, passes, predicted ms, published ms) on 8 H800."""
    pairs = causal_pairs(65536)
    found = both_passes(pairs, rates(pairs, 13.5e-3, 51.7e-3), "nvlink-h800")
    for name, waits, times in (
        ("contiguous: × (2 − 1/8)", 2 - 1 / 8, {"forward": 26.0, "both": 96.2}),
        ("zigzag", 1.0, {"forward": 15.9, "both": 57.5}),
        ("stripe", 1.0, {"forward": 18.2, "both": 62.5}),
    ):
        for passes, (compute, exposed) in found.items():
            yield name, passes, compute * waits + exposed, times[passes]


def show_published() -> None:
    """Figures of others, beside the model."""
    print("\npublished: zhuzilin/ring-flash-attention, README at 8996282: 8 × H800 (200 GB/s), the")
    print("same shape, flash-attn 2, NCCL; rates from its flash_attn row; ms = 1000 / (iter/s)")
    print("                                     predicted   published")
    for name, passes, ms, theirs in published():
        print(f"  {name:24} {passes:8} {ms:11.1f} {theirs:11.1f}")
    print(PUBLISHED)


def show() -> None:
    """Predictions, then measurements."""
    show_predictions()
    show_measurements()
    show_published()


def main() -> None:
    check()
    show()


if __name__ == "__main__":
    main()
