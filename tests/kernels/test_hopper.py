"""The Hopper kernels on the CPU, through an interpreter of ours, against the oracle.

The small kernels beside them go through Triton's own interpreter, which has to be chosen before
triton is imported; so the cases run in a process of their own.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import maxima
import pytest
import torch
from ranks import Ranks
from test_triton import DTYPES, Case, _errors, _poisoned_memory

import ring_flash_attn as rfa
from ring_flash_attn.kernels.base import Call, State, choose_kernel
from ring_flash_attn.plan.layout import Span
from ring_flash_attn.plan.tiles import Mask, Tile

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)

CAUSAL = {"causal": True}
SMALL = Case(dtype="fp16", options=CAUSAL)
ONE = Case(batch=(1, 700, 700), world_size=1, headdim=64, headdim_v=64, dtype="bf16")
ORDERED = {"causal": True, "deterministic": True}
CASES = {
    "long_causal": replace(ONE, options=CAUSAL),
    "long_full": ONE,
    "window": replace(ONE, batch=(2, 333, 500), options={"window_size": (150, 40)}),
    "causal_window": replace(ONE, options={"causal": True, "window_size": (200, 0)}),
    "one_key_more": replace(ONE, batch=(1, 200, 454), layout="contiguous", options=CAUSAL),
    "one_key_more_at_once": replace(ONE, batch=(1, 200, 326), layout="contiguous", options=CAUSAL),
    "more_queries": replace(ONE, batch=(1, 500, 200), dtype="fp16", options=CAUSAL),
    "unseen_keys": replace(
        ONE, batch=(2, 100, 700), layout="contiguous", options={**CAUSAL, "window_size": (150, 0)}
    ),
    "queries_that_see_nothing": replace(
        ONE,
        batch=(1, 800, 800),
        world_size=2,
        layout="contiguous",
        options={**CAUSAL, "window_size": (50, 0), "sources_per_launch": 1},
    ),
    "unseen_keys_128": replace(
        ONE,
        batch=(1, 100, 500),
        layout="contiguous",
        headdim=128,
        headdim_v=128,
        options={**CAUSAL, "window_size": (50, 0)},
    ),
    "softcap": replace(ONE, batch=(1, 300, 300), options={"causal": True, "softcap": 2.0}),
    "documents": replace(
        SMALL, lengths=(700, 129, 64, 300), world_size=1, headdim=128, headdim_v=64
    ),
    "steps": replace(SMALL, lengths=(1400, 260), nheads=2, nheads_k=1, headdim=64, headdim_v=64),
    "sources": replace(
        SMALL, lengths=(1000, 130), world_size=4, options={**CAUSAL, "sources_per_launch": 3}
    ),
    "short_documents": SMALL,
    "sink": replace(SMALL, sink=True, dtype="bf16"),
    "sink_alone": replace(ONE, batch=(1, 70, 70), sink=True, options=CAUSAL),
    "stripe": replace(SMALL, batch=(2, 300, 300), layout="stripe", dtype="bf16"),
    "all_gather": replace(
        SMALL, route="all_gather", layout="flat_zigzag", options={**CAUSAL, "heads_k_stride": 1}
    ),
    "query_ring": replace(SMALL, route="query_ring"),
    "mqa": replace(SMALL, nheads_k=1),
    "eight_heads": replace(SMALL, lengths=(33, 20, 130), nheads=8, nheads_k=1, headdim=64),
    "eight_heads_carried": replace(
        ONE,
        batch=None,
        lengths=(150, 9, 70),
        world_size=3,
        nheads=8,
        nheads_k=1,
        options={**CAUSAL, "sources_per_launch": 1},
    ),
    "four_heads": replace(
        SMALL,
        batch=(2, 150, 170),
        layout="contiguous",
        nheads=8,
        sink=True,
        dtype="bf16",
        options={"window_size": (20, 5), "softcap": 3.0},
    ),
    "four_heads_256": replace(
        SMALL, lengths=(33, 150), nheads=4, nheads_k=1, headdim=256, headdim_v=256
    ),
    "two_heads": replace(SMALL, nheads=6, nheads_k=1, headdim=128, headdim_v=64),
    "headdim_40": replace(SMALL, headdim=40, headdim_v=24),
    "headdim_96": replace(SMALL, lengths=(290,), headdim=96, headdim_v=96),
    "headdim_128": replace(SMALL, lengths=(290,), headdim=128, headdim_v=128),
    "headdim_192_v_128": replace(SMALL, lengths=(200,), headdim=192, headdim_v=128),
    "headdim_256": replace(SMALL, lengths=(200,), headdim=256, headdim_v=256),
    "ordered": replace(SMALL, lengths=(700, 129, 300), headdim=64, headdim_v=64, options=ORDERED),
    "ordered_window": replace(ONE, options={"window_size": (150, 40), "deterministic": True}),
    "ordered_softcap": replace(SMALL, dtype="bf16", options={**ORDERED, "softcap": 2.0}),
    "ordered_128_v_64": replace(SMALL, lengths=(290,), headdim=128, headdim_v=64, options=ORDERED),
    "ordered_256": replace(SMALL, lengths=(200,), headdim=256, headdim_v=256, options=ORDERED),
}

FULL = replace(SMALL, lengths=(900, 33, 400), headdim=64, headdim_v=64, options={})
PIECES = {
    "sources": replace(
        FULL, lengths=(600, 33, 200), world_size=3, dtype="bf16", options={"sources_per_launch": 2}
    ),
    "causal": replace(FULL, lengths=(1400,), layout="contiguous", options=CAUSAL),
    "eight_heads": replace(FULL, lengths=(700, 45), nheads=8, nheads_k=1, headdim=128),
    "query_ring": replace(FULL, batch=(2, 70, 1536), route="query_ring"),
}


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    """For two ways to do the same, of which each rank does one."""
    pair = Ranks(2, environment={"TRITON_INTERPRET": "1"})
    yield pair
    pair.stop()


def _counted() -> Any:
    """Counts launches of the Hopper kernels."""
    import gluon_interpreter

    gluon_interpreter.install()
    from ring_flash_attn.kernels.triton.hopper import host

    return mock.patch.object(host, "launch", wraps=host.launch)


def _unless_told(call: Call) -> bool:
    """`host.in_order` of a call, whatever torch is told: `_poisoned_memory` tells it so."""
    return call.deterministic or call.headdim_v > 128


def _run(rank: int, world_size: int, name: str) -> dict[str, float]:
    with _poisoned_memory(), _counted() as launches:
        from ring_flash_attn.kernels.triton.hopper import host

        with mock.patch.object(host, "in_order", _unless_told):
            found = _errors(CASES[name])
    assert launches.called, "it was the portable kernel"
    return found


@pytest.mark.product(5)
@pytest.mark.parametrize("name", CASES)
def test_interpreted(pool: Ranks, name: str) -> None:
    (errors,) = pool.run(_run, name)
    _, tolerance = DTYPES[CASES[name].dtype]
    assert all(error < tolerance for error in errors.values()), errors
    assert errors["lse"] < 1e-5, "a key too many or too few"


def _both_orders(rank: int, world_size: int) -> float:
    """The largest difference of a row of dQ, relative; a block ends one key behind its mask."""
    q, dout = (torch.randn(1, 200, 1, 64).half() for _ in range(2))
    k, v = (torch.randn(1, 326, 1, 64).half() for _ in range(2))
    found = []
    for deterministic in (False, True):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        with _counted() as launches:
            out = rfa.triton_flash_attn_func(*leaves, causal=True, deterministic=deterministic)
            found.append(torch.autograd.grad(out, leaves, dout)[0].float())
        assert launches.call_count == 2 + deterministic
    return float(((found[0] - found[1]).norm(dim=-1) / found[0].norm(dim=-1)).max())


def test_no_key_too_many_in_any_order(pool: Ranks) -> None:
    for difference in pool.run(_both_orders):
        assert difference < 5e-3


def _with_nan(rank: int, world_size: int) -> list[int]:
    """NaNs in the results of one document when its neighbour is all NaN, for several windows."""
    counts = []
    for length in (256, 130, 20):
        for causal, window in [(True, (70, 0)), (False, (7, 50)), (True, (-1, -1))]:
            leaves = [torch.randn(400, 2, 32, dtype=torch.float16) for _ in range(3)]
            dout = torch.randn(400, 2, 32, dtype=torch.float16)
            for x in (*leaves, dout):
                x[length:] = torch.nan
            leaves = [x.requires_grad_() for x in leaves]
            cu_seqlens = torch.tensor([0, length, 400], dtype=torch.int32)
            options = {"causal": causal, "window_size": window, "deterministic": rank == 0}
            with _counted() as launches:
                out = rfa.triton_flash_attn_varlen_func(
                    *leaves, cu_seqlens, cu_seqlens, 400, 400, **options
                )
                grads = torch.autograd.grad(out, leaves, dout)
            assert launches.call_count == 3 - rank
            counts += [int(x[:length].isnan().sum()) for x in (out, *grads)]
    return counts


def _with_nan_in_several_tiles(rank: int, world_size: int) -> list[int]:
    """The same on two ranks, where the keys of a program lie in several places."""
    leaves = [torch.randn(400, 2, 32, dtype=torch.float16) for _ in range(3)]
    dout = torch.randn(400, 2, 32, dtype=torch.float16)
    for x in (*leaves, dout):
        x[40:] = torch.nan
    leaves = [x.requires_grad_() for x in leaves]
    options = {"layout": "zigzag", "route": "ring", "causal": True, "kernel": "triton"}
    options["deterministic"] = rank == 0
    with _counted() as launches:
        out = rfa.virtual_ring_attention(*leaves, world_size=2, cu_seqlens=[0, 40, 400], **options)
        grads = torch.autograd.grad(out, leaves, dout)
    assert launches.called
    return [int(x[:40].isnan().sum()) for x in (out, *grads)]


def test_documents_do_not_leak_from_tile_to_tile(pair: Ranks) -> None:
    for counts in pair.run(_with_nan_in_several_tiles):
        assert counts == [0] * 4


def test_documents_do_not_leak(pair: Ranks) -> None:
    """Blocks would reach into the next document where they do not divide this one."""
    for counts in pair.run(_with_nan):
        assert counts == [0] * 36


def _with_nan_before(rank: int, world_size: int) -> list[int]:
    """NaNs in the results of documents behind a short one that is all NaN."""
    counts = []
    for headdim, headdim_v in ((64, 64), (256, 128)):
        widths = (headdim, headdim, headdim_v)
        leaves = [torch.randn(300, 2, width, dtype=torch.float16) for width in widths]
        dout = torch.randn(300, 2, headdim_v, dtype=torch.float16)
        for x in (*leaves, dout):
            x[10:30] = torch.nan
        leaves = [x.requires_grad_() for x in leaves]
        cu_seqlens = torch.tensor([0, 10, 30, 40, 300], dtype=torch.int32)
        options = {"causal": True, "deterministic": rank == 0}
        with _counted() as launches:
            out = rfa.triton_flash_attn_varlen_func(
                *leaves, cu_seqlens, cu_seqlens, 260, 260, **options
            )
            grads = torch.autograd.grad(out, leaves, dout)
        assert launches.call_count == 3 - rank
        counts += [
            int(x[at].isnan().sum()) for x in (out, *grads) for at in (slice(10), slice(30, None))
        ]
    return counts


def test_a_short_document_does_not_leak(pair: Ranks) -> None:
    """Blocks of it reach over its end."""
    for counts in pair.run(_with_nan_before):
        assert counts == [0] * 16


def _one_row_alone(rank: int, world_size: int) -> float:
    """Error of lse, where a piece of work has one row, and its keys end where a block does."""
    q, k, v = (torch.randn(1, length, 1, 256).half() for length in (129, 300, 300))
    queries, keys = (Span(0, length, 0, 1, 0, 0) for length in (129, 300))
    tile = Tile(queries, keys, low=-128, high=63, first=True, last=True)
    call = Call(q.device, q.dtype, 1, 1, 256, 256, 0.0625, Mask())
    out, lse = torch.empty(1, 129, 1, 256).half(), torch.empty(1, 1, 129)
    with _counted() as launches:
        choose_kernel("triton", call).forward(q, k, v, (tile,), State(out, lse), call)
    assert launches.called
    scores = (q[0, :, 0].float() @ k[0, :, 0].float().T) * 0.0625
    behind = torch.arange(300) > torch.arange(129)[:, None] + 63
    expected = scores.masked_fill(behind, -torch.inf).logsumexp(-1)
    return float((lse[0, 0] - expected).abs().max())


def test_no_consumer_goes_beyond_the_last_block(pool: Ranks) -> None:
    for error in pool.run(_one_row_alone):
        assert error < 1e-4


def _maxima(rank: int, world_size: int) -> dict[str, tuple[float, float]]:
    """Errors of each kind, on rank 1 without a mask."""
    with _counted() as launches:
        found = {
            kind: maxima.errors(kind, 640, 64, torch.float16, "cpu", rank == 0)
            for kind in maxima.KINDS
        }
        found["capped"] = maxima.errors("rising", 640, 64, torch.float16, "cpu", rank == 0, 50.0)
    assert launches.call_count == len(maxima.KINDS) + 1
    return found


def test_a_maximum_may_come_anywhere(pair: Ranks) -> None:
    """Most blocks are computed with an earlier one, as long as that is right."""
    for found in pair.run(_maxima):
        for kind, (error, lse_error) in found.items():
            assert error < 3e-3, (kind, error)
            assert lse_error < 1e-5, (kind, lse_error)


def _no_maximum_yet(rank: int, world_size: int) -> float:
    """Error of lse where half of the rows see nothing in the first of two places."""
    q, k, v = (x[:, :300, :1] for x in maxima.inputs("low", 400, 64, torch.float16, "cpu"))
    q = q[:, :128]
    queries = Span(0, 128, 0, 1, 0, 0)
    tiles = (
        Tile(queries, Span(0, 44, 0, 1, 0, 0), low=-128, high=-64, first=True, last=True),
        Tile(queries, Span(44, 256, 0, 1, 0, 0), low=-128, high=300, first=True, last=True),
    )
    call = Call(q.device, q.dtype, 1, 1, 64, 64, 0.125, Mask())
    out, lse = torch.empty(1, 128, 1, 64).half(), torch.empty(1, 1, 128)
    with _counted() as launches:
        choose_kernel("triton", call).forward(q, k, v, tiles, State(out, lse), call)
    assert launches.call_count == 1
    scores = (q[0, :, 0].float() @ k[0, :, 0].float().T) * 0.125
    unseen = (torch.arange(300) < 44) & (torch.arange(300) > torch.arange(128)[:, None] - 64)
    expected = scores.masked_fill(unseen, -torch.inf).logsumexp(-1)
    return float((lse[0, 0] - expected).abs().max())


def test_rows_without_a_maximum(pool: Ranks) -> None:
    for error in pool.run(_no_maximum_yet):
        assert error < 1e-3


def _nan(rank: int, world_size: int) -> tuple[int, int, int]:
    with _counted() as launches:
        found = maxima.nans(300, 64, "cpu")
    assert launches.call_count == 1
    return found


def _nan_in_a_ring(rank: int, world_size: int) -> tuple[int, int]:
    with _counted() as launches:
        found = maxima.nans_in_a_ring("cpu")
    assert launches.call_count > 2
    return found


def _hump_in_a_ring(rank: int, world_size: int) -> tuple[float, float]:
    """Rank 1's maximum is in the second block of its second step."""
    with _counted() as launches:
        found = maxima.errors_in_a_ring("hump", "cpu")
    assert launches.call_count > 2
    return found


def test_a_maximum_may_come_in_a_later_step(pool: Ranks) -> None:
    for error, lse_error in pool.run(_hump_in_a_ring):
        assert error < 3e-3
        assert lse_error < 1e-5


def _nan_gradients(rank: int, world_size: int) -> tuple[int, int]:
    """Rows of dQ that are NaN where one query is, in a document shorter than a block."""
    leaves = [torch.randn(1, 50, 1, 64).half() for _ in range(3)]
    leaves[0][0, 20] = torch.nan
    leaves = [x.requires_grad_() for x in leaves]
    with _counted() as launches:
        out = rfa.triton_flash_attn_func(*leaves, causal=True, deterministic=rank == 0)
        rows = torch.autograd.grad(out, leaves, torch.ones_like(out))[0][0, :, 0].isnan()
    assert launches.call_count == 3 - rank
    return int(rows[20].sum()), int(rows.sum())


def test_nan_is_not_hidden_from_gradients(pair: Ranks) -> None:
    for found in pair.run(_nan_gradients):
        assert found == (64, 64)


def test_nan_is_not_hidden(pool: Ranks) -> None:
    for found in pool.run(_nan):
        assert found == (0, 150, 0)
    for found in pool.run(_nan_in_a_ring):
        assert found == (51, 51)


def _strided(rank: int, world_size: int) -> tuple[int, list[float]]:
    """Copies, and errors, for tensors that are views of one."""
    import gluon_interpreter

    gluon_interpreter.install()
    from ring_flash_attn.kernels.triton.hopper import host

    qkv = torch.randn(2, 150, 3, 2, 64, dtype=torch.float16)
    views = [x.clone().requires_grad_() for x in qkv.unbind(2)]
    plain = rfa.flash_attn_func(*views, causal=True, kernel="reference")
    copies = []

    def fit(x: torch.Tensor) -> torch.Tensor:
        found = fitted(x)
        copies.append(found is not x)
        return found

    fitted = host.fit
    with mock.patch.object(host, "fit", fit):
        out = rfa.triton_flash_attn_func(*qkv.unbind(2), causal=True)
    assert len(copies) == 3
    return sum(copies), [float((out - plain).abs().max())]


def test_views_are_not_copied(pool: Ranks) -> None:
    for copies, (error,) in pool.run(_strided):
        assert copies == 0
        assert error < 4e-3


def _launches_of(rank: int, world_size: int) -> list[list[bool | None]]:
    """Of each launch of a call and its backward, whether it has dQ added to memory.

    First rank 0 asks for one order, then by way of torch.
    """
    leaves = [torch.randn(1, 300, 2, 64).half().requires_grad_() for _ in range(3)]
    found: list[list[bool | None]] = []
    for by_torch in (False, True):
        torch.use_deterministic_algorithms(by_torch and rank == 0)
        with _counted() as launches:
            deterministic = not by_torch and rank == 0
            out = rfa.triton_flash_attn_func(*leaves, causal=True, deterministic=deterministic)
            torch.autograd.grad(out.sum(), leaves)
        torch.use_deterministic_algorithms(False)
        found.append([call.args[7].get("DQ") for call in launches.call_args_list])
    return found


def test_nothing_is_added_in_memory_where_the_order_counts(pair: Ranks) -> None:
    ordered, plain = pair.run(_launches_of)
    assert ordered == [[None, False, None]] * 2
    assert plain == [[None, True]] * 2


def _launches_of_wide_heads(rank: int, world_size: int) -> list[bool | None]:
    """The same of heads with values of 256, or on rank 1 of 128."""
    widths = (256, 256, 256 if rank == 0 else 128)
    leaves = [torch.randn(1, 100, 2, width).half().requires_grad_() for width in widths]
    with _counted() as launches:
        out = rfa.triton_flash_attn_func(*leaves, causal=True)
        torch.autograd.grad(out.sum(), leaves)
    return [call.args[7].get("DQ") for call in launches.call_args_list]


def test_nothing_is_added_in_memory_where_that_is_slower(pair: Ranks) -> None:
    wide, less = pair.run(_launches_of_wide_heads)
    assert wide == [None, False, None]
    assert less == [None, True]


def _waits_for_nobody(rank: int, world_size: int) -> str:
    import gluon_interpreter as gi

    def alone(full: Any) -> None:
        gi.mbarrier.wait(full.index(0), 0)

    gi._program.begin(0, 1)
    full = gi.gl.allocate_shared_memory(torch.int64, [1, 1], None)
    gi.mbarrier.init(full.index(0), 1)
    with mock.patch.object(gi, "_PATIENCE", 0.1):
        try:
            gi.gl.warp_specialize([(alone, (full,))], [], [])
        except AssertionError as error:
            return str(error)
    return ""


def test_the_interpreter_notices_a_deadlock(pool: Ranks) -> None:
    for said in pool.run(_waits_for_nobody):
        assert said == "nobody ends the phase that this waits for"


@pytest.mark.parametrize("value", ["-1", "two", "1.5", "1"])
def test_margins_that_leave_nothing(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ring_flash_attn.kernels import scheduler

    monkeypatch.setenv("RFA_SM_MARGIN", value)
    scheduler.free_processors.cache_clear()
    with pytest.raises(ValueError, match=f"RFA_SM_MARGIN must be less than .*not '{value}'"):
        scheduler.free_processors(torch.device("cpu"))  # which counts as one


def test_off_and_on_are_0_and_1(monkeypatch: pytest.MonkeyPatch) -> None:
    from ring_flash_attn.kernels.triton.hopper import host

    monkeypatch.setenv("RFA_HOPPER", "off")
    host._unavailable.cache_clear()
    with pytest.raises(ValueError, match="RFA_HOPPER must be 0 or 1, not 'off'"):
        host._unavailable(torch.device("cpu"))


def _on_three_processors(rank: int, world_size: int) -> tuple[list[dict[str, float]], int]:
    """Errors of launches with the same counter, and where it stands."""
    with _poisoned_memory(), _counted():
        from ring_flash_attn.kernels.triton.hopper import host

        counter = torch.zeros(1, dtype=torch.int32)
        with (
            mock.patch.object(host, "counter", return_value=counter),
            mock.patch.object(host, "free_processors", return_value=3),
        ):
            one = replace(CASES["long_causal"], batch=(1, 400, 400))
            steps = replace(CASES["steps"], lengths=(400, 130), dtype="bf16")
            errors = [_errors(case) for case in (one, one, steps, steps)]
    return errors, int(counter)


@pytest.mark.slow
def test_programs_share_the_work_and_leave_the_counter_at_zero(pool: Ranks) -> None:
    for errors, counter in pool.run(_on_three_processors):
        for found in errors:
            assert all(error < DTYPES["bf16"][1] for error in found.values()), found
        assert counter == 0


def _in_pieces(rank: int, world_size: int, name: str) -> tuple[dict[str, float], list[bool]]:
    """Errors where some blocks' keys come in pieces, and which launches have such ones."""
    with _poisoned_memory(), _counted() as launches:
        from ring_flash_attn.kernels.tables import MORE, PIECE, Pieces
        from ring_flash_attn.kernels.triton.hopper import forward, host

        consumers: Counter[int] = Counter()  # that are done with a piece, by rows and pair
        await_pieces, piece_is_done = forward.await_pieces, forward.piece_is_done

        def wait(ptr: Any, flags: int) -> None:
            await_pieces(ptr, flags)
            if flags >= PIECE:
                assert consumers[int(ptr.offset)] == 2 * (flags // PIECE)
            if not flags & MORE:
                assert not ptr.memory[ptr.offset]
                consumers.pop(int(ptr.offset), None)

        def done(ptr: Any, flags: int) -> None:
            consumers[int(ptr.offset)] += flags & MORE == MORE
            piece_is_done(ptr, flags)

        with (
            mock.patch.object(host, "in_order", _unless_told),
            mock.patch.object(host, "pieces", return_value=Pieces(3, 2)),
            mock.patch.object(forward, "await_pieces", wait),
            mock.patch.object(forward, "piece_is_done", done),
        ):
            errors = _errors(PIECES[name])
        assert not any(consumers.values())
    return errors, [call.args[7].get("PIECES") for call in launches.call_args_list]


@pytest.mark.parametrize("name", PIECES)
def test_keys_in_pieces(pool: Ranks, name: str) -> None:
    """Pieces go on from the state of the ones before, in the same launch."""
    ((errors, cut),) = pool.run(_in_pieces, name)
    _, tolerance = DTYPES[PIECES[name].dtype]
    assert all(error < tolerance for error in errors.values()), errors
    assert errors["lse"] < 1e-5
    assert any(cut)


def _packs(rank: int, world_size: int) -> list[int]:
    """How many heads share blocks of queries, in calls with more and more reason to."""
    found = []
    shapes = [
        (4, 4, 33),
        (5, 1, 33),
        (12, 2, 33),
        (8, 2, 33),
        (64, 4, 33),
        (8, 1, 256),
        (8, 1, 257),
    ]
    for nheads, nheads_k, tokens in shapes:
        q, *kv = (
            torch.randn(1, tokens, heads, 64).half() for heads in (nheads, nheads_k, nheads_k)
        )
        with _counted() as launches:
            rfa.triton_flash_attn_func(q, *kv, causal=True)
        (call,) = launches.call_args_list
        found.append(call.args[7]["PACK_GQA"])
    return found


def test_heads_are_packed_where_that_fills_blocks(pool: Ranks) -> None:
    for found in pool.run(_packs):
        assert found == [1, 1, 2, 4, 8, 1, 8]
