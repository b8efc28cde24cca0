"""Step 14: zigzag shards, and the steps of a ring over them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from .compare import Judgement
from .learner import Cases, Learner
from .setting import Mistake

MISTAKES = {
    "zigzag": Mistake(
        "wrong zigzag half",
        "the wrong half of the queries or of the keys takes part",
        "Rank r holds chunks r and 2·world_size − 1 − r. Keys of lower ranks: all queries, the "
        "early half of the keys. Keys of higher ranks: the late half of the queries, all keys.",
    ),
}

RingStep = tuple[int, str, str, bool]  # source, query half, key half, causal
_HALVES = {"all": (0, 1), "late": (1,), "early": (0,)}


def zigzag(learner: Learner) -> Cases:
    """Positions of each rank, for lengths that divide and one that does not; then the steps."""
    for ranks in (4, 3, 2, 1):
        for length in (10 * ranks, 2 * ranks, 10 * ranks + 3):
            for rank in range(ranks):
                words = f"{length} tokens, rank {rank} of {ranks}"
                judge = _judge_shard(length, rank, ranks)
                yield learner.case("zigzag_shard", words, judge, length, rank, ranks)
    for ranks in (4, 3, 2, 1):
        for rank in range(ranks):
            judge = _judge_steps(rank, ranks)
            yield learner.case("zigzag_steps", f"rank {rank} of {ranks}", judge, rank, ranks)


def _chunks(rank: int, ranks: int) -> tuple[int, int]:
    return rank, 2 * ranks - 1 - rank


def _judge_shard(length: int, rank: int, ranks: int) -> Callable[[Any], Judgement]:
    borders = [chunk * length // (2 * ranks) for chunk in range(2 * ranks + 2)]

    def positions(chunks: Iterable[int]) -> list[int]:
        return [i for c in chunks for i in range(borders[c], borders[c + 1])]

    def judge(found: Any) -> Judgement:
        if not isinstance(found, Tensor) or found.dim() != 1 or found.is_floating_point():
            return Judgement(["expected a LongTensor of positions"])
        got, true = found.tolist(), positions(_chunks(rank, ranks))
        if got == true:
            return Judgement()
        wrong = [(rank, ranks + rank), (2 * rank, 2 * rank + 1), (2 * ranks - 1 - rank, rank)]
        wrong += [(rank, 2 * ranks - rank), (rank, 2 * ranks - 2 - rank)]
        votes = Counter({"zigzag": 1} if any(got == positions(c) for c in wrong) else {})
        if len(got) != len(true):
            words = f"rank {rank} has {len(got)} positions, expected {len(true)}"
            return Judgement([words], votes)
        first = next(i for i in range(len(got)) if got[i] != true[i])
        words = f"rank {rank}: row {first} is position {got[first]}, expected {true[first]}"
        half = "early" if first < borders[rank + 1] - borders[rank] else "late"
        return Judgement([f"{words} ({half} half)"], votes)

    return judge


def _covered(steps: Iterable[RingStep], rank: int, ranks: int) -> Counter[tuple[int, int, str]]:
    """The pairs of chunks that the steps cover, with how often; a diagonal pair is half."""
    counts: Counter[tuple[int, int, str]] = Counter()
    mine = _chunks(rank, ranks)
    for source, of_q, of_k, causal in steps:
        theirs = _chunks(source, ranks)
        for a in _HALVES[of_q]:
            for b in _HALVES[of_k]:
                if not causal or mine[a] > theirs[b]:
                    counts[mine[a], theirs[b], "whole"] += 1
                elif mine[a] == theirs[b]:
                    counts[mine[a], theirs[b], "half"] += 1
    return counts


def _right_steps(rank: int, ranks: int) -> list[RingStep]:
    steps = [(rank, "all", "all", True)]
    for t in range(1, ranks):
        source = (rank - t) % ranks
        halves = ("all", "early") if source < rank else ("late", "all")
        steps.append((source, *halves, False))
    return steps


def _judge_steps(rank: int, ranks: int) -> Callable[[Any], Judgement]:
    right = _right_steps(rank, ranks)
    want = _covered(right, rank, ranks)
    orders = [[(rank - sign * t) % ranks for t in range(ranks)] for sign in (1, -1)]

    def judge(found: Any) -> Judgement:
        try:
            steps = [(int(s), str(a), str(b), bool(c)) for s, a, b, c in found]
        except (TypeError, ValueError):
            return Judgement(["expected a list of (source, query half, key half, causal)"])
        for t, (source, *halves, _) in enumerate(steps):
            if not 0 <= source < ranks:
                return Judgement([f"rank {rank}, ring step {t}: there is no rank {source}"])
            if not set(halves) <= set(_HALVES):
                said = '"all", "late" or "early"'
                return Judgement([f"rank {rank}, ring step {t}: halves are {said}"])
        have, sources = _covered(steps, rank, ranks), [step[0] for step in steps]
        if have == want and sources in orders:
            return Judgement()
        mistake = "zigzag" if sources in orders else "source"
        if len(sources) < ranks:
            mistake = "missing_step"
        judgement = Judgement(votes=Counter([mistake]))
        for t, true in enumerate(right):
            got = steps[t] if t < len(steps) else None
            if got != true:
                words = f"rank {rank}, ring step {t}: {got}"
                words = words if got else f"rank {rank} has no step {t}"
                judgement.lines.append(f"{words}; keys of rank {true[0]} are due")
                break
        for (a, b, _), count in list((have - want).items())[:1]:
            words = f"queries of chunk {a} meet keys of chunk {b}"
            hidden = "which are hidden, or hidden in part"
            often = "once too often" if want[a, b, "whole"] else hidden
            words += f" {often} ({count})" if count > 1 else f", {often}"
            judgement.lines.append(words)
        for a, b, _ in list(want - have)[:1]:
            words = f"queries of chunk {a} never meet keys of chunk {b}, or not right"
            judgement.lines.append(words)
        return judgement

    return judge
