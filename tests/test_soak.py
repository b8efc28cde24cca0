"""The soak test itself: it passes what is right, finds what is wrong, and says it shortly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from soak import __main__ as main
from soak import faults, packs
from soak.cases import VIRTUAL, Case
from soak.doors import Doors, Failed, call, check_results
from soak.hunt import hunt

from ring_flash_attn.kernels.base import Call
from ring_flash_attn.kernels.reference import ReferenceKernel


def check_here(case: Case) -> None:
    """In this process."""
    check_results(case, [call(case)])


@pytest.fixture
def wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values are off where there are a softcap and a causal mask."""
    right = ReferenceKernel.forward

    def forward(self: Any, q: Any, k: Any, v: Any, tiles: Any, state: Any, call: Call) -> None:
        off = 0.5 if call.softcap and call.mask.right == 0 else 0.0
        right(self, q, k, v + off, tiles, state, call)

    monkeypatch.setattr(ReferenceKernel, "forward", forward)


@pytest.mark.parametrize("function", [VIRTUAL, "flash_attn_varlen_kvpacked_func"])
def test_right_calls_pass(function: str) -> None:
    seen: list[Case] = []

    def check(case: Case) -> None:
        check_here(case)
        seen.append(case)

    for _ in range(2):
        assert hunt(check, function, "reference", "cpu", key=7, count=6) is None
    assert len(set(seen)) == 6
    assert seen[:6] == seen[6:], "the same cases from the same seed"


@pytest.mark.usefixtures("wrong_kernel")
def test_a_wrong_kernel_is_found_and_the_case_made_simple() -> None:
    failure = hunt(check_here, VIRTUAL, "reference", "cpu", key=7, count=100)
    assert failure is not None
    assert not failure.flaky
    assert "errors beyond" in failure.error
    case = failure.case
    assert (case.causal, case.softcap) == (True, 2.0)
    assert (case.world_size, case.lengths_q, case.lengths_k) == (1, (1,), (1,))
    assert (case.nheads, case.headdim, case.headdim_v) == (1, 1, 1)
    assert (case.dropout_p, case.alibi, case.sink, case.strides) == (0.0, "", False, "")
    assert eval(repr(case)) == case


def test_calls_on_real_processes() -> None:
    """Through all doors; a call that raises is a failure, and the next one works again."""
    doors = Doors(ranks=2)
    right = Case("ring_attention", 2, "zigzag", lengths_q=(5,), lengths_k=(7,), causal=True)
    try:
        assert doors.check(right)
        with pytest.raises(Failed, match=r"(?s)heads_k_stride = 2 must divide.*heads_k_stride = 2"):
            doors.check(Case("ring_attention", 2, route="all_gather", heads_k_stride=2))
        assert doors.check(Case("flash_attn_func", wanted=("q", "v"), returns="lse"))
        assert not doors.check(Case("native_flash_attn_func", kernel="native"))
        assert doors.check(right)
    finally:
        doors.stop()


def test_a_lost_rank() -> None:
    faults.lost(world_size=2, victim=0, when="in the backward pass of", launch=1, seed=3)


@pytest.mark.slow
def test_memory_that_grows_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(packs.LIMITS, "blocks", 500)
    seen = []
    assert packs.watched(packs._single, packs.packs(), 401, 0.0).packs == [200, 400, 400]
    packs.watched(lambda pack, checked: None, packs.packs(), 2000, 60.0).check()
    with pytest.raises(AssertionError, match="blocks grew by"):
        packs.watched(lambda pack, checked: seen.append(pack), packs.packs(), 2000, 60.0).check()
    assert len(set(seen)) == 2000


def test_the_command_says_how_to_see_a_failure_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Calls fail where there is a sink; the run goes on to others, and ends with a failure."""

    def check(self: Doors, case: Case) -> bool:
        assert not case.sink, "a sink"
        return True

    monkeypatch.setattr(Doors, "check", check)
    monkeypatch.setattr("sys.argv", ["soak", "--minutes", "1", "--seed", "3", "--packs", "0"])
    with pytest.raises(SystemExit) as end:
        main.main()
    assert end.value.code == 1
    said = capsys.readouterr().out
    assert said.count("FAILED, seed 3: a call\nAssertionError: a sink") == main.MOST_FAILURES
    snippet = tmp_path / "reproduce.py"
    snippet.write_text(said[said.index(main.HEAD) :].split("\n\n\n")[0])
    with pytest.raises(AssertionError, match="a sink"):
        exec(compile(snippet.read_text(), "reproduce.py", "exec"), {"__name__": "__main__"})
