"""Packs drawn from a histogram: the same everywhere, and mistakes in a file named by their line."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ring_flash_attn.bench.documents import (
    Bin,
    Drawn,
    Histogram,
    find_histogram,
    histogram_names,
    pack_of,
)
from ring_flash_attn.bench.workload import Workload

# Seed 42, 8192 tokens for each of 8 ranks.
SEED_42 = (
    526, 1526, 253, 590, 533, 24, 214, 930, 343, 1038, 1351, 849, 311, 6854, 149, 145, 545, 1280,
    7197, 69, 1765, 572, 65, 1188, 1231, 433, 874, 146, 337, 574, 676, 751, 149, 486, 367, 1139,
    217, 1846, 309, 3337, 456, 435, 118, 488, 939, 3684, 271, 594, 1249, 121, 1889, 895, 440, 512,
    618, 774, 1721, 156, 101, 6254, 2632,
)  # fmt: skip
# Documents, the longest, and the sum of squares of seeds 42 to 46, on 8 ranks and on 64.
SEEDS = {
    8: [
        (61, 7197, 205940612),
        (41, 16384, 578707906),
        (37, 16384, 641326896),
        (52, 16384, 466256050),
        (59, 16384, 349691824),
    ],
    64: [
        (273, 131072, 25351839704),
        (325, 120476, 17650942438),
        (256, 131072, 22208332580),
        (373, 31554, 4450063012),
        (265, 32732, 7750421498),
    ],
}
TWO = Histogram("two", (Bin(3, 5, 1.0), Bin(40, 40, 3.0)))


# Drawing.


def test_the_published_packs() -> None:
    """Results name seeds: what they stand for must never change."""
    magi = find_histogram("magi")
    assert magi.draw(65536) == magi.draw(65536, 42, 0.25) == SEED_42
    for ranks, sums in SEEDS.items():
        packs = [magi.draw(8192 * ranks, seed) for seed in range(42, 47)]
        assert [(len(pack), max(pack), sum(n * n for n in pack)) for pack in packs] == sums


@pytest.mark.parametrize("tokens", [1, 3, 40, 41, 1000])
@pytest.mark.parametrize("cap", [0.05, 0.25, 1.0])
def test_a_pack_is_filled(tokens: int, cap: float) -> None:
    if tokens * cap < 1:
        with pytest.raises(ValueError, match=f"document_cap {cap:g} must be .* {tokens} tokens"):
            TWO.draw(tokens, cap=cap)
        return
    for seed in range(20):
        pack = TWO.draw(tokens, seed, cap)
        longest = int(cap * tokens)
        assert sum(pack) == tokens
        assert min(pack) > 0
        assert max(pack) <= longest
        whole = {min(n, longest) for n in (3, 4, 5, 40)}
        assert set(pack[:-1]) <= whole, "only the last one is cut where the pack ends"


def test_shares_are_the_weights() -> None:
    pack = TWO.draw(10**6, 1)
    counts = Counter(pack)
    assert counts[40] / len(pack) == pytest.approx(0.75, abs=0.01)
    for length in (3, 4, 5):  # all equally likely
        assert counts[length] / len(pack) == pytest.approx(0.25 / 3, abs=0.01)
    assert TWO.draw(10**6, 1) != TWO.draw(10**6, 2)


# What a workload gets.


def test_documents_are_given_or_drawn_or_neither() -> None:
    assert pack_of(100) == {}
    assert pack_of(100, [0, 30, 100]) == {"cu_seqlens": (0, 30, 100)}
    for documents in ("magi", find_histogram("magi")):
        found = Workload(1, 7, **pack_of(65536, documents=documents))
        assert (found.lengths, found.seqlen) == (SEED_42, 65536)
        assert found.drawn == Drawn("magi", 42, 0.25)
    assert pack_of(64, documents=TWO, seed=7, document_cap=0.5)["drawn"] == Drawn("two", 7, 0.5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 3}, "seed 3: only for documents from a histogram"),
        ({"document_cap": 0.5}, "document_cap 0.5: only for documents from a histogram"),
        ({"documents": "magi", "cu_seqlens": [0, 9]}, "documents 'magi' and cu_seqlens 0,9: give"),
        ({"documents": "magi", "seed": -1}, "seed -1 must not be negative"),
        ({"documents": "magi", "document_cap": 0.0}, "document_cap 0 must be above 0"),
        ({"documents": "magi", "document_cap": 1.5}, "document_cap 1.5 must be .* at most 1"),
        ({"documents": "magi", "document_cap": float("nan")}, "document_cap nan must be"),
        ({"documents": "nonsense"}, "there is no file nonsense, and no histogram but magi"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        pack_of(100, **changes)


def test_where_documents_come_from_is_in_files() -> None:
    workload = Workload(1, 7, causal=True, **pack_of(100, documents=TWO, seed=7))
    values = json.loads(json.dumps(workload.to_dict()))
    assert (values["documents"], values["seed"], values["document_cap"]) == ("two", 7, 0.25)
    assert values["lengths"] == list(TWO.draw(100, 7))
    assert Workload.from_dict(values) == workload
    plain = replace(workload, drawn=None)
    assert set(values) - set(plain.to_dict()) == {"documents", "seed", "document_cap"}
    assert workload.share(4) == plain.share(4)  # one device's: nobody drew these


# Files.


def test_what_comes_with_the_package() -> None:
    assert histogram_names() == ("magi",)
    for name in histogram_names():
        assert find_histogram(name).name == name
        assert sum(each.weight for each in find_histogram(name).bins) == pytest.approx(100, abs=0.1)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text(
        "\ufeff# ours\n low, high ,weight\r\n\n3,5,1\n  # long ones\n40,40,3e0\n", "utf-8"
    )
    assert find_histogram(str(file)) == replace(TWO, name="mine.csv")
    assert pack_of(64, documents=file)["drawn"].documents == "mine.csv"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "{file} is empty; its first line must be low,high,weight"),
        ("# nothing\n", "{file} is empty"),
        ("1,10,5\n", "{file}, line 1: '1,10,5' must be low,high,weight"),
        ("low,high\n1,2\n", "{file}, line 1: 'low,high' must be"),
        ("low,high,weight\n", "{file}, line 1: no bin up to here has a weight"),
        ("low,high,weight\n1,2,0\n\n3,4,0\n", "{file}, line 4: no bin up to here has a weight"),
        ("# x\n\nlow,high,weight\n1,10\n", "{file}, line 4: '1,10' must have 3 numbers"),
        ("low,high,weight\n1,10,5,6\n", "{file}, line 2: '1,10,5,6' must have 3 numbers"),
        ("low,high,weight\n1,10,5\n11,x,5\n", "{file}, line 3: '11,x,5' must be two whole numbers"),
        ("low,high,weight\n1,10.5,5\n", "{file}, line 2: '1,10.5,5' must be two whole numbers"),
        ("low,high,weight\n1,10,much\n", "{file}, line 2: '1,10,much' must be two whole numbers"),
        ("low,high,weight\n0,10,5\n", "{file}, line 2: low 0 and high 10: 1 <= low <= high"),
        ("low,high,weight\n9,8,5\n", "{file}, line 2: low 9 and high 8"),
        ("low,high,weight\n1,10,-5\n", "{file}, line 2: weight -5 must be 0 or more, and finite"),
        ("low,high,weight\n1,10,nan\n", "{file}, line 2: weight nan must be 0 or more"),
        ("low,high,weight\n1,10,inf\n", "{file}, line 2: weight inf must be 0 or more"),
        ("low,high,weight\n1,10,5\n10,20,5\n", "{file}, line 3: low 10 must be above 10, where"),
    ],
)
def test_mistakes_are_named_by_their_line(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.csv"
    file.write_text(text, "utf-8")
    with pytest.raises(ValueError) as error:
        find_histogram(str(file))
    assert str(error.value).startswith(words.format(file=file))


def test_what_is_no_text_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*: Is a directory"):
        find_histogram(str(tmp_path))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="bytes is no text"):
        find_histogram(str(tmp_path / "bytes"))
