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

The head dimension cancels. With GQA 32/8, 700 TFLOP/s and 450 GB/s that is 778 tokens a rank. With
a network card of 50 GB/s it is 7,000.

Packed documents change one side only. A document sees itself: pairs shrink from T² / 2 to Σ length²
/ 2, while a shard has as many bytes as before. So short documents make links matter. (A shard that
nobody needs any more goes no further, so a real ring of short documents sends less than this says.)

In which step does what travel? Keys of step t + 1 travel during step t. Gradients of step t travel
during step t + 1, from the first visited rank on (t = 1); what our own queries add stays at home.
The last hop, which brings them home, has no work to hide behind.

The model knows no merges, launches, masks at the edge, late ranks or shared links. What it leaves
open is what a measurement tells you. Time that it says is hidden and that you see all the same is a
bug to look for, or the price of one of these.
"""

from __future__ import annotations

from pathlib import Path

from ...bench.results import Row, load
from ...bench.workload import LINKS
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


DOCUMENTS = (24832, 25600, 12800, 1280, 1024)
SHAPE = (65536, 8, 32, 8, 128)  # tokens, ranks, heads, KV heads, head dimension


def forward_and_backward(
    pairs: int, rates: tuple[float, float], link: str
) -> dict[str, tuple[float, float]]:
    """(compute, exposed) in ms of the forward pass, and of both, with a rate for each pass."""
    bandwidth, latency = LINKS[link].bandwidth, LINKS[link].latency
    each = [predict(pairs, *SHAPE, rates[b], bandwidth, latency, bool(b)) for b in (0, 1)]
    ms = [(1e3 * times["compute"], 1e3 * times["exposed"]) for times in each]
    return {"forward": ms[0], "both": (ms[0][0] + ms[1][0], ms[0][1] + ms[1][1])}


def show_predictions() -> None:
    """One rank of 8 on different links."""
    print("one rank of 8, 65,536 tokens, 32/8 heads of 128, 700 TFLOP/s forward, 600 backward; ms")
    print("                                   forward                 forward + backward")
    print("documents   link         compute   exposed     compute   exposed")
    for name, lengths in (("1", (65536,)), ("5", DOCUMENTS), ("64 × 1024", (1024,) * 64)):
        for link in LINKS:
            found = forward_and_backward(causal_pairs(*lengths), (700e12, 600e12), link)
            cells = [f"{a:10.2f}{b:10.2f}" for a, b in found.values()]
            print(f"{name:11} {link:12}" + "  ".join(cells))


def measured(lengths: tuple[int, ...], file: str, **placement: object) -> dict[str, Row]:
    """Stored rows of our Triton kernels: forward and both, of the slowest rank."""
    rows = {}
    for row in load(RESULTS / file).rows:
        same = all(row.placement.get(name) == value for name, value in placement.items())
        documents = tuple(row.workload.get("lengths", (65536,)))
        gqa = row.workload["nheads"] == 4 * row.workload["nheads_k"]
        if row.implementation == "triton" and same and gqa and documents == lengths:
            if row.values.get("slowest"):
                rows.setdefault(row.passes, row)
    return rows


def show_measurements() -> None:
    """What is stored, beside what the model says with the rate of the same kernel on one GPU."""
    if not (RESULTS / "replays_h200.json").is_file():
        print("\nstored measurements: only in a source checkout, in results/; there is none here")
        return
    print("\nreplays on one H200: a rank's real kernels and schedule, the other ranks and NVLink")
    print("(450 GB/s) emulated; the slowest rank; rates from the same kernel on one rank's tokens")
    print("                                                predicted ms          measured ms")
    print("                                            compute   exposed      all   exposed")
    for name, lengths, file, placement in (
        ("contiguous", (65536,), "ring_h200.json", {"layout": "contiguous", "route": "ring"}),
        ("zigzag", (65536,), "ring_h200.json", {"layout": "zigzag", "route": "ring"}),
        ("stripe", (65536,), "ring_h200.json", {"layout": "stripe", "route": "ring"}),
        ("zigzag, 1 hop a launch", (65536,), "replays_h200.json", {"sources_per_launch": 1}),
        ("zigzag, 4 hops a launch", (65536,), "replays_h200.json", {"sources_per_launch": 4}),
        ("5 documents, 1 hop", DOCUMENTS, "replays_h200.json", {"sources_per_launch": 1}),
        ("5 documents, 4 hops", DOCUMENTS, "replays_h200.json", {"sources_per_launch": 4}),
    ):
        rows, pairs = measured(lengths, file, **placement), causal_pairs(*lengths)
        if set(rows) < {"forward", "both"}:
            continue
        base = {passes: row.values["theoretic_ms"] / 1e3 for passes, row in rows.items()}
        flops = 4 * 32 * 128 * pairs / 8
        rates = (flops / base["forward"], 2.5 * flops / (base["both"] - base["forward"]))
        found = forward_and_backward(pairs, rates, "nvlink4")
        for passes, (compute, exposed) in found.items():
            row = rows[passes]
            seen = row.values.get("exposed_ms")
            print(
                f"  {name:24} {passes:8} {compute:14.2f} {exposed:9.2f} {row.ms or 0:13.2f} "
                + ("        –" if seen is None else f"{seen:9.2f}")
            )


def show_published() -> None:
    """Figures of others, beside the model."""
    print("\npublished: zhuzilin/ring-flash-attention, README at 8996282: 8 × H800 (200 GB/s), the")
    print("same shape, flash-attn 2, NCCL; rates from its flash_attn row; ms = 1000 / (iter/s)")
    print("                                     predicted   published")
    flops = 4 * 32 * 128 * causal_pairs(65536) / 8
    base = {"forward": 13.5e-3, "both": 51.7e-3}
    rates = (flops / base["forward"], 2.5 * flops / (base["both"] - base["forward"]))
    found = forward_and_backward(causal_pairs(65536), rates, "nvlink-h800")
    for name, waits, published in (
        ("contiguous: × (2 − 1/8)", 2 - 1 / 8, {"forward": 26.0, "both": 96.2}),
        ("zigzag", 1.0, {"forward": 15.9, "both": 57.5}),
        ("stripe", 1.0, {"forward": 18.2, "both": 62.5}),
    ):
        for passes, (compute, exposed) in found.items():
            ms = compute * waits + exposed
            print(f"  {name:24} {passes:8} {ms:11.1f} {published[passes]:11.1f}")

    print(
        "\npublished: SandAI-org/MagiAttention at 2c64135, docs/source/blog/cp_benchmark.md, read"
    )
    print("off its charts (± 1): 8 × H100, 64/8 heads of 128, 8k tokens a GPU, causal, forward;")
    print("TFLOP/s a GPU. The model hides all hops: it predicts the rate of one GPU.")
    print("                          one document   packed documents")
    for name, *figures in (
        ("FA3 on one GPU, 8k", 656, 483),
        ("ring, point to point", 422, 89),
        ("ring, all-gather", 601, 288),
        ("Ulysses", 601, 278),
        ("Magi, native", 644, 459),
    ):
        print(f"  {name:24} {figures[0]:11} {figures[1]:18}")

    print("\npublished: thunlp/BurstEngine at 426eb7a, evaluation/kernel_bench: 32 × A800, 512k")
    print(
        "tokens, 40 heads of 128, causal; ms a call: forward kernel 13.73, backward kernel 37.11,"
    )
    print("NCCL send and receive 5.08, merge 0.32: a hop is hidden, a merge is not")


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
