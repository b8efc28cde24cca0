"""`ContextParallel`: a training step on W ranks has the loss and the gradients of one device."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from tiny_model import (
    Attention,
    Document,
    TinyModel,
    expected,
    flattened,
    gradients,
    padded,
    plain_attention,
    random_documents,
    stacked,
    without_weights,
)
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointError, checkpoint

from ring_flash_attn import (
    Balanced,
    ContextParallel,
    Mask,
    Planner,
    flash_attn_func,
    shard,
)
from ring_flash_attn.api.context_parallel import BatchPlacement
from ring_flash_attn.plan.build import route_names
from ring_flash_attn.plan.layout import get_layout, layout_names

Batches = list[dict[str, Any]]
TOLERANCE: dict[str, Any] = {"rtol": 0, "atol": 1e-10}


def attention_of(cp: ContextParallel, documents: Any, causal: bool = True) -> Attention:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = cp.attention(q, k, v, documents, causal=causal)
        assert isinstance(out, Tensor)
        return out

    return run


def step(
    rank: int, world_size: int, batches: Batches, options: dict[str, Any], causal: bool = True
) -> dict[str, Any]:
    """One optimiser step over these micro-batches, as a user would write it."""
    cp, model = ContextParallel(**options), TinyModel()
    parts = [cp.shard(batch) for batch in batches]
    num_items = torch.stack([part["num_items_in_batch"] for part in parts]).sum()
    total, whole = torch.zeros((), dtype=torch.float64), []
    for part in parts:
        assert "labels" not in part
        logits = model(
            part["input_ids"],
            part["position_ids"],
            attention_of(cp, part["documents"], causal),
        )
        loss = cp.loss(
            logits,
            part["shift_labels"],
            num_items=num_items,
            weights=part.get("shift_loss_weights"),
        )
        loss.backward()
        total += cp.sum(loss)
        whole.append(cp.gather(logits.detach(), part["documents"]))
    grads = gradients(model)
    for grad in grads.values():
        dist.all_reduce(grad)
    return {
        "loss": total,
        "grads": grads,
        "logits": whole,
        "items": num_items,
        "shapes": [tuple(part["input_ids"].shape) for part in parts],
    }


def compare(found: dict[str, Any], right: dict[str, Any]) -> None:
    torch.testing.assert_close(found["loss"], right["loss"], **TOLERANCE)
    assert set(found["grads"]) == set(right["grads"])
    for name, grad in found["grads"].items():
        torch.testing.assert_close(grad, right["grads"][name], **TOLERANCE)
        assert right["grads"][name].abs().max() > 1e-4, name  # else equal for nothing


LENGTHS = (5, 1, 13, 2, 8, 4)
EQUAL = (9, 9, 9)


def both_forms() -> dict[str, tuple[list[Document], Batches]]:
    """Each kind of batch, with the documents that it holds."""
    packs, rows = random_documents(LENGTHS), without_weights(random_documents(EQUAL, seed=1))
    return {
        "packed": (packs, [flattened(packs)]),
        "batch": (rows, [stacked(rows)]),
        "padded": (packs, [padded(packs)]),
    }


@pytest.mark.product(5)
@pytest.mark.parametrize("layout", ["auto", *layout_names()])
@pytest.mark.parametrize("form", both_forms())
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_step_is_that_of_one_device(
    world_size: int, form: str, layout: str, ranks: Callable[[int], Ranks]
) -> None:
    documents, batches = both_forms()[form]
    right = expected(documents)
    for found in ranks(world_size).run(step, batches, {"layout": layout}):
        compare(found, right)


WAYS: list[dict[str, Any]] = [
    *({"route": route} for route in route_names()),
    {"route": "mesh", "ranks_per_node": 1},
    {"route": "double_ring", "ranks_per_node": 1},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_route(way: dict[str, Any], ranks: Callable[[int], Ranks]) -> None:
    documents, batches = both_forms()["packed"]
    right = expected(documents, causal=False)
    for found in ranks(2).run(step, batches, {**way, "kernel": "reference"}, False):
        compare(found, right)


class ByForm:
    """Chooses by whether documents are packed; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def choose(self, *asked: Any) -> BatchPlacement:
        self.asked.append(asked)
        if asked[1] is None:
            return BatchPlacement(get_layout("flat_stripe"), "mesh", {"ranks_per_node": 1})
        return BatchPlacement(get_layout("contiguous"), "ring", {"sources_per_launch": 1})


def planned(rank: int, world_size: int, batches: Batches) -> tuple[dict[str, Any], Any, Any]:
    planner = ByForm()
    cp = ContextParallel(planner=planner, divisor=2)
    ways = [cp.shard(batch)["documents"] for batch in batches]
    found = [(each.layout.name, each.route, each.parameters) for each in ways]
    return step(rank, world_size, batches, {"planner": planner}), found, planner.asked


def test_a_planner_chooses_for_each_batch(ranks: Callable[[int], Ranks]) -> None:
    forms = both_forms()
    batches = [*forms["packed"][1], *forms["batch"][1]]
    right = expected([*forms["packed"][0], *forms["batch"][0]])
    for found, ways, asked in ranks(2).run(planned, batches):
        compare(found, right)
        assert ways == [
            ("flat_stripe", "mesh", {"ranks_per_node": 1}),
            ("contiguous", "ring", {"sources_per_launch": 1}),
        ]
        of_pack, of_rows = (LENGTHS, None), (EQUAL[:1], len(EQUAL))
        assert asked == [(*each, 2, None, None, "auto") for each in (of_pack, of_rows) * 2]


def with_planner(rank: int, world_size: int, batches: Batches, heads: Any) -> dict[str, Any]:
    planner = Planner(heads, "nvlink4", gpu="H200")
    return step(rank, world_size, batches, {"planner": planner})


@pytest.mark.parametrize("form", both_forms())
def test_what_the_planner_chooses_is_right(form: str, ranks: Callable[[int], Ranks]) -> None:
    documents, batches = both_forms()[form]
    for found in ranks(4).run(with_planner, batches, (4, 2, 64)):
        compare(found, expected(documents))


def test_a_planner_and_fewer_tokens_than_ranks(ranks: Callable[[int], Ranks]) -> None:
    documents = random_documents((2, 1))
    documents[0][1][1] = 4  # the only target
    for found in ranks(4).run(with_planner, [flattened(documents)], (4, 2, 64)):
        compare(found, expected(documents))


PLANNER_MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"planner": "fast"}, TypeError, "planner must be a ring_flash_attn.Planner, not str"),
    (
        {"planner": ByForm(), "layout": "zigzag", "route": "ring"},
        ValueError,
        "layout = 'zigzag' and route = 'ring' leave it no choice",
    ),
    (
        {"planner": ByForm(), "layout": Balanced(), "route": "mesh", "ranks_per_node": 1},
        ValueError,
        "leave it no choice",
    ),
    (
        {"planner": ByForm(), "route": "mesh", "ranks_per_node": 1},
        ValueError,
        "ranks_per_node = 1: the planner chooses it",
    ),
]


def refused(rank: int, world_size: int) -> None:
    for options, kind, words in PLANNER_MISTAKES:
        with pytest.raises(kind, match=words):
            ContextParallel(**options)


def test_planners_that_make_no_sense_are_refused(ranks: Callable[[int], Ranks]) -> None:
    ranks(2).run(refused)


def over_axes(rank: int, world_size: int, route: str, batches: Batches) -> dict[str, Any]:
    shape = (1, world_size) if world_size == 2 else (world_size // 2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("nodes", "ranks"))
    return step(rank, world_size, batches, {"route": route, "group": mesh})


@pytest.mark.parametrize(("route", "world_size"), [("mesh", 2), ("double_ring", 4)])
def test_mesh_of_two_axes(route: str, world_size: int, ranks: Callable[[int], Ranks]) -> None:
    documents, batches = both_forms()["packed"]
    for found in ranks(world_size).run(over_axes, route, batches):
        compare(found, expected(documents))


@pytest.mark.product(4)
@pytest.mark.parametrize("layout", layout_names())
@pytest.mark.parametrize("form", both_forms())
def test_padding_to_a_multiple(form: str, layout: str, ranks: Callable[[int], Ranks]) -> None:
    """All shards are as large, and nothing else changes."""
    documents, batches = both_forms()[form]
    right = expected(documents)
    options = {"layout": layout, "divisor": 3, "pad_token_id": 2}
    results = ranks(4).run(step, batches, options)
    assert len({shape for found in results for shape in found["shapes"]}) == 1
    assert results[0]["shapes"][0][-1] % 3 == 0
    for found in results:
        compare(found, right)


def test_more_ranks_than_tokens(ranks: Callable[[int], Ranks]) -> None:
    """Some ranks hold nothing, or nothing with a target; the others wait for nobody."""
    documents = random_documents((2, 1))
    documents[0][1][1] = 4  # the only target
    right = expected(documents)
    for layout in ("auto", "zigzag", "flat_contiguous"):
        results = ranks(4).run(step, [flattened(documents)], {"layout": layout})
        assert any(found["shapes"][0][1] == 0 for found in results)
        for found in results:
            compare(found, right)


def test_nothing_to_learn_is_zero(ranks: Callable[[int], Ranks]) -> None:
    """No target at all; and no token but padding."""
    (ids, labels, weights), *_ = random_documents((6,))
    hidden = {**flattened([(ids, labels.fill_(-100), weights)])}
    nothing = {**stacked([(ids, labels, weights)]), "attention_mask": torch.zeros(1, 6).long()}
    for batch in (hidden, nothing):
        for found in ranks(2).run(step, [batch], {}):
            assert found["loss"] == 0
            assert all(grad.eq(0).all() for grad in found["grads"].values())


def test_gradient_accumulation(ranks: Callable[[int], Ranks]) -> None:
    """Micro-batches of every kind make one step; the normalisation is that of all of them."""
    first, second = random_documents((4, 9, 2)), random_documents((7, 3), seed=2)
    rows = without_weights(random_documents(EQUAL, seed=1))
    batches: Batches = [flattened(first), padded(second, left=True), stacked(rows)]
    right = expected([*first, *second, *rows])
    for found in ranks(2).run(step, batches, {}):
        compare(found, right)


def test_logits_come_back_in_the_shape_of_the_batch(ranks: Callable[[int], Ranks]) -> None:
    documents = random_documents(LENGTHS)
    right = torch.cat(expected(documents)["logits"])
    for left in (False, True):
        batch = padded(documents, left)
        for found in ranks(2).run(step, [batch], {"divisor": 2}):
            (logits,) = found["logits"]
            hidden = batch["attention_mask"] == 0
            assert logits.shape[:2] == batch["input_ids"].shape
            torch.testing.assert_close(logits[~hidden], right, **TOLERANCE)
            assert logits[hidden].eq(0).all()


# Documents, however a batch tells of them.


def ways_to_tell(rank: int, world_size: int) -> None:
    documents = random_documents((3, 1, 4))
    ids, labels, _ = (torch.cat(part)[None] for part in zip(*documents, strict=True))
    positions = torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3]])
    cp = ContextParallel(layout="flat_contiguous")
    tokens = {"input_ids": ids, "labels": labels}
    offsets, numbers = [0, 3, 4, 8], torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2]], dtype=torch.int32)
    ways: list[Any] = [
        {**tokens, "cu_seqlens": offsets},
        {**tokens, "cu_seqlens": torch.tensor(offsets, dtype=torch.int32)},
        {**tokens, "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 4},
        {**tokens, "seq_idx": numbers},
        {**tokens, "seq_idx": 5 - numbers, "max_length_q": 4, "max_length_k": 9},
        {**tokens, "seq_idx": numbers, "position_ids": positions, "cu_seq_lens_q": offsets},
        {**tokens, "seq_idx": numbers, "attention_mask": numbers + 1},
        {**tokens, "seq_idx": numbers, "attention_mask": torch.ones(1, 8).long()},
        {**tokens, "position_ids": positions},
        {**tokens, "attention_mask": torch.tensor([[1, 1, 1, 2, 3, 3, 3, 3]])},
        {**tokens, "position_ids": positions, "attention_mask": torch.ones(1, 8).bool()},
        UserDict({**tokens, "position_ids": positions, "token_type_ids": None}),
    ]
    parts = [cp.shard(way) for way in ways]
    for part in parts:
        assert part["documents"].cu_seqlens == tuple(offsets)
        assert torch.equal(part["position_ids"], positions[:, rank * 4 : rank * 4 + 4])
        assert torch.equal(part["input_ids"], ids[:, rank * 4 : rank * 4 + 4])
        assert part["num_items_in_batch"] == sum((each[1][1:] != -100).sum() for each in documents)
        shifted = torch.cat([torch.cat([d[1][1:], torch.tensor([-100])]) for d in documents])
        assert torch.equal(part["shift_labels"][0], shifted[rank * 4 : rank * 4 + 4])
        assert not {"attention_mask", "seq_idx", "max_length_q"} & set(part)
    rows = {"input_ids": ids.view(2, 4), "cu_seqlens": offsets}
    for each in ([[0, 0, 0, 1], [0, 0, 0, 0]], [[0, 0, 0, 1], [2, 2, 2, 2]]):  # by row, or overall
        found = cp.shard({**rows, "seq_idx": torch.tensor(each)})["documents"]
        assert found.cu_seqlens == tuple(offsets)
    rows["attention_mask"] = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    del rows["cu_seqlens"]
    found = cp.shard({**rows, "seq_idx": torch.tensor([[0, 0, 1, 1], [0, 1, 7, -1]])})["documents"]
    assert found.cu_seqlens == (0, 2, 4, 5, 6)
    flat = cp.shard({"input_ids": ids[0], "labels": labels[0], "cu_seqlens": offsets})
    assert torch.equal(flat["input_ids"], parts[0]["input_ids"][0])
    assert torch.equal(flat["shift_labels"], parts[0]["shift_labels"][0])
    assert torch.equal(flat["position_ids"], parts[0]["position_ids"][0])
    assert torch.equal(cp.gather(flat["input_ids"], flat["documents"]), ids[0])
    shifted = cp.shard({"input_ids": ids, "shift_labels": labels, "cu_seqlens": offsets})
    assert torch.equal(shifted["shift_labels"], labels[:, rank * 4 : rank * 4 + 4])
    assert shifted["num_items_in_batch"] == (labels != -100).sum()
    auto = ContextParallel(layout="auto", route="auto")
    assert auto.shard(ways[0])["documents"].layout.name == "balanced"
    assert ContextParallel().shard(stacked(documents[:1]))["documents"].layout.name == "zigzag"
    nodes = ContextParallel(route="mesh", ranks_per_node=2).shard(ways[0])["documents"]
    assert nodes.layout == Balanced(ranks_per_node=2)
    mine = Balanced(masks=((Mask.of(causal=True, window_size=(3, 0)), 1),))
    assert ContextParallel(layout=mine).shard(ways[0])["documents"].layout == mine


def test_ways_to_tell_documents(ranks: Callable[[int], Ranks]) -> None:
    ranks(2).run(ways_to_tell)


def other_tensors(rank: int, world_size: int) -> None:
    cp = ContextParallel(layout="contiguous")
    rows = torch.arange(2 * 6).view(2, 6)
    batch = {
        "inputs_embeds": torch.randn(2, 6, 3),
        "types": rows,
        "rope": torch.arange(3 * 2 * 6).view(3, 2, 6, 1),
        "image": torch.randn(5),
        "name": "a batch",
    }
    dims = {"types": 1, "rope": -2, "image": None}
    half = slice(3 * rank, 3 * rank + 3)
    part = cp.shard(batch, dims)
    assert torch.equal(part["inputs_embeds"], batch["inputs_embeds"][:, half])
    assert torch.equal(part["types"], rows[:, half])
    assert torch.equal(part["rope"], batch["rope"][:, :, half])
    assert part["image"] is batch["image"]
    assert part["name"] == "a batch"
    assert torch.equal(part["position_ids"], torch.arange(6)[half].expand(2, -1))
    assert not {"shift_labels", "num_items_in_batch"} & set(part)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    part = cp.shard({**batch, "attention_mask": mask}, dims)
    own = [0, 1, 6, 7, 8] if rank == 0 else [2, 3, 9, 10, 11]
    assert part["types"].tolist() == [own]
    assert part["rope"][2, 0, :, 0].tolist() == [24 + token for token in own]
    assert torch.equal(part["inputs_embeds"][0], batch["inputs_embeds"].flatten(0, 1)[own])
    across = cp.shard({"input_ids": rows, "cu_seqlens": [0, 8, 12]}, device="meta")
    assert all(x.is_meta for x in across.values() if isinstance(x, Tensor))
    across = cp.shard({"input_ids": rows, "cu_seqlens": [0, 8, 12]})
    assert across["position_ids"].tolist() == [[[0, 1, 2, 3, 0, 1], [4, 5, 6, 7, 2, 3]][rank]]
    axes = torch.arange(3 * 8).view(3, 1, 8)
    part = cp.shard(
        {"input_ids": torch.zeros(1, 8).long(), "position_ids": axes, "cu_seqlens": [0, 8]}
    )
    assert torch.equal(part["position_ids"], axes[:, :, 4 * rank : 4 * rank + 4])


def test_other_tensors_of_a_batch(ranks: Callable[[int], Ranks]) -> None:
    ranks(2).run(other_tensors)


# torch's own attention, routed.


def routed_step(
    rank: int, world_size: int, batch: Any, layout: str, causal: bool, checkpointed: bool
) -> dict[str, Any]:
    """A model that knows nothing of us."""
    cp, model = ContextParallel(layout=layout), TinyModel()
    part = cp.shard(batch)
    before = F.scaled_dot_product_attention
    attention = plain_attention(causal)
    with cp.scaled_dot_product_attention(part["documents"]):
        inputs = part["input_ids"], part["position_ids"], attention
        if checkpointed:
            logits = checkpoint(model, *inputs, use_reentrant=False)
        else:
            logits = model(*inputs)
        weights, num_items = part.get("shift_loss_weights"), part["num_items_in_batch"]
        loss = cp.loss(logits, part["shift_labels"], weights=weights, num_items=num_items)
        loss.backward()
    assert F.scaled_dot_product_attention is before
    grads = gradients(model)
    for grad in grads.values():
        dist.all_reduce(grad)
    return {"loss": cp.sum(loss), "grads": grads}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", ["auto", "stripe"])
@pytest.mark.parametrize("form", both_forms())
def test_torchs_attention_goes_over_the_group(
    form: str, layout: str, causal: bool, ranks: Callable[[int], Ranks]
) -> None:
    documents, (batch,) = both_forms()[form]
    right = expected(documents, causal)
    for found in ranks(2).run(routed_step, batch, layout, causal, causal):
        compare(found, right)


def routed_arguments(rank: int, world_size: int) -> None:
    """Every argument counts or is refused; dropout does not depend on the number of ranks."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 12, 8, dtype=torch.float64)
    cp = ContextParallel()
    documents = cp.shard({"input_ids": torch.zeros(2, 12).long()})["documents"]

    def mine(x: Tensor) -> Tensor:
        return shard(x, "zigzag", dim=2)

    options: dict[str, Any] = {"is_causal": True, "scale": 0.3}
    right = F.scaled_dot_product_attention(q, k, v, **options)
    grouped = F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True)
    with cp.scaled_dot_product_attention(documents):
        out = F.scaled_dot_product_attention(mine(q), mine(k), mine(v), **options)
        torch.testing.assert_close(out, mine(right), **TOLERANCE)
        shared = F.scaled_dot_product_attention(
            mine(q), mine(k)[:, :2], mine(v)[:, :2], enable_gqa=True
        )
        torch.testing.assert_close(shared, mine(grouped), **TOLERANCE)
        torch.manual_seed(5)
        dropped = F.scaled_dot_product_attention(mine(q), mine(k), mine(v), None, 0.4)
        torch.manual_seed(5)
        whole = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), 0.4)
        assert isinstance(whole, Tensor)
        torch.testing.assert_close(dropped, mine(whole.transpose(1, 2)), **TOLERANCE)
        part = mine(q)
        wrong: list[tuple[Callable[[], Any], str]] = [
            (
                lambda: F.scaled_dot_product_attention(part, part, part, torch.ones(6, 6).bool()),
                "attn_mask",
            ),
            (lambda: F.scaled_dot_product_attention(part, part[:, :2], part[:, :2]), "enable_gqa"),
            (
                lambda: F.scaled_dot_product_attention(part, part[:, :, 1:], part),
                "key must be .* 6 tokens",
            ),
            (lambda: F.scaled_dot_product_attention(part[0], part[0], part[0]), "query must be"),
        ]
        for call, words in wrong:
            with pytest.raises(ValueError, match=words):
                call()
        leaf = part.clone().requires_grad_()
        with pytest.raises(ValueError, match="use_reentrant=False"):
            checkpoint(lambda x: F.scaled_dot_product_attention(x, x, x), leaf, use_reentrant=True)
        with torch.no_grad():
            F.scaled_dot_product_attention(leaf, leaf, leaf)
        with (
            pytest.raises(RuntimeError, match="one context at a time"),
            cp.scaled_dot_product_attention(documents),
        ):
            pass
    with (
        pytest.raises(RuntimeError, match=r"no call of F\.scaled_dot"),
        cp.scaled_dot_product_attention(documents),
    ):
        pass
    with pytest.raises(KeyError), cp.scaled_dot_product_attention(documents):
        raise KeyError("a mistake of the user's stays what it is")
    with pytest.raises(TypeError, match="documents must be"):
        cp.scaled_dot_product_attention(None)  # type: ignore[arg-type]


def test_arguments_of_torchs_attention(ranks: Callable[[int], Ranks]) -> None:
    ranks(2).run(routed_arguments)


def recomputed_outside(rank: int, world_size: int, batch: Any) -> None:
    """Attention that is recomputed after the context was left would be another one."""
    cp, model = ContextParallel(), TinyModel()
    part = cp.shard(batch)
    inputs = part["input_ids"], part["position_ids"], plain_attention()
    with cp.scaled_dot_product_attention(part["documents"]):
        logits = checkpoint(model, *inputs, use_reentrant=False)
    with pytest.raises(CheckpointError):
        logits.sum().backward()


def test_torch_notices_attention_that_is_recomputed_outside() -> None:
    pool = Ranks(2)  # whose groups are left in the middle of a backward pass
    try:
        pool.run(recomputed_outside, both_forms()["packed"][1][0])
    finally:
        pool.stop()


# Gathered log-probabilities, checkpointing, counting.


def log_probabilities(rank: int, world_size: int, batch: Any, grad: str) -> dict[str, Tensor]:
    """A loss of all tokens' log-probabilities, computed alike on all ranks, or in parts."""
    cp, model = ContextParallel(), TinyModel()
    part = cp.shard(batch)
    attention = attention_of(cp, part["documents"])
    logits = checkpoint(
        model, part["input_ids"], part["position_ids"], attention, use_reentrant=False
    )
    chosen = logits.log_softmax(-1).gather(-1, part["input_ids"][..., None])[..., 0]
    whole = cp.gather(chosen, part["documents"], grad=grad)
    weights = torch.linspace(-1, 2, whole.numel(), dtype=torch.float64).view(whole.shape)
    if grad == "sum":  # each rank has a share of the loss
        weights = weights * (torch.arange(whole.numel()) % world_size == rank).view(whole.shape)
    (whole.sin() * weights).sum().backward()
    grads = gradients(model)
    for each in grads.values():
        dist.all_reduce(each)
    return grads


@pytest.mark.parametrize("grad", ["sum", "slice"])
def test_gradients_of_gathered_log_probabilities(grad: str, ranks: Callable[[int], Ranks]) -> None:
    batch = padded(without_weights(random_documents(LENGTHS)))
    (right,) = ranks(1).run(log_probabilities, batch, grad)
    for found in ranks(4).run(log_probabilities, batch, grad):
        for name, each in found.items():
            torch.testing.assert_close(each, right[name], **TOLERANCE)


def counted(rank: int, world_size: int, batch: Any) -> Tensor:
    """Without num_items, the ranks count together."""
    cp = ContextParallel()
    part = cp.shard(batch)
    torch.manual_seed(rank)
    logits = torch.randn(*part["shift_labels"].shape, 11)
    weights = part["shift_loss_weights"]
    for each in (None, weights):
        items = part["num_items_in_batch"] if each is not None else None
        alone = cp.loss(logits, part["shift_labels"], weights=each)
        told = cp.loss(logits, part["shift_labels"], weights=each, num_items=items)
        torch.testing.assert_close(alone, told)
        doubled = cp.loss(logits, part["shift_labels"], weights=each, averaged_over=2)
        torch.testing.assert_close(doubled, 2 * alone)
        half = cp.loss(logits.bfloat16(), part["shift_labels"], weights=each)
        assert half.dtype == torch.float32
    return cp.sum(alone)


def test_the_ranks_count_targets(ranks: Callable[[int], Ranks]) -> None:
    first, second = ranks(2).run(counted, flattened(random_documents(LENGTHS)))
    assert first == second


# Data and context parallel, with FSDP2.


def data_and_context(
    rank: int, world_size: int, batches: Sequence[Batches], how: str
) -> dict[str, Any]:
    """Every data-parallel rank has its own micro-batches; its context-parallel ranks share them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    cp, model = ContextParallel(mesh["cp"]), TinyModel()
    flat = mesh["dp", "cp"]._flatten("dp_cp")
    if how == "fsdp":
        for layer in model.layers:
            fully_shard(layer, mesh=flat)
        fully_shard(model, mesh=flat)
    parts = [cp.shard(batch) for batch in batches[mesh.get_local_rank("dp")]]
    num_items = torch.stack([part["num_items_in_batch"] for part in parts]).sum()
    dist.all_reduce(num_items, group=mesh.get_group("dp"))
    total = torch.zeros((), dtype=torch.float64)
    for part in parts:
        logits = model(part["input_ids"], part["position_ids"], attention_of(cp, part["documents"]))
        loss = cp.loss(
            logits,
            part["shift_labels"],
            num_items=num_items,
            weights=part["shift_loss_weights"],
            averaged_over=flat.size() if how == "fsdp" else 1,
        )
        loss.backward()
        total += loss.detach()
    dist.all_reduce(total)
    grads = gradients(model)
    if how == "fsdp":
        total /= flat.size()
        grads = {name: grad.full_tensor() for name, grad in grads.items()}  # type: ignore[operator]
    else:
        for grad in grads.values():
            dist.all_reduce(grad)
    return {"loss": total, "grads": grads}


@pytest.mark.parametrize("how", ["summed", "fsdp"])
def test_data_and_context_parallel(how: str, ranks: Callable[[int], Ranks]) -> None:
    packs = [random_documents(lengths, seed) for seed, lengths in enumerate(((5, 9), (3,), (8, 2)))]
    more = random_documents((4, 4, 1), seed=5)
    batches = [[flattened(packs[0]), padded(packs[1])], [flattened(packs[2]), flattened(more)]]
    right = expected([document for pack in (*packs, more) for document in pack])
    for found in ranks(4).run(data_and_context, batches, how):
        compare(found, right)


# Mistakes.

IDS = torch.arange(8)[None]


def mistakes(rank: int, world_size: int) -> None:
    cp = ContextParallel()
    part = cp.shard({"input_ids": IDS, "labels": IDS})
    documents = part["documents"]
    logits, labels = torch.zeros(1, 4, 11), part["shift_labels"]
    x = torch.randn(1, 4, 2, 4)
    ones = torch.ones_like(IDS)
    hidden = ones.clone()
    hidden[0, 6:] = 0
    ended = ContextParallel(divisor=3).shard({"input_ids": IDS})["documents"]
    packed = cp.shard({"input_ids": IDS, "cu_seqlens": [0, 3, 8]})["documents"]
    calls: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: ContextParallel("world"), ValueError, "ProcessGroup.*str"),  # type: ignore[arg-type]
        (lambda: ContextParallel(layout="spiral"), ValueError, "layout 'spiral'"),
        (lambda: ContextParallel(route="detour"), ValueError, "route 'detour'"),
        (lambda: ContextParallel(divisor=0), ValueError, "divisor"),
        (
            lambda: ContextParallel(ranks_per_node=2),
            ValueError,
            "only routes 'double_ring' and 'mesh'",
        ),
        (lambda: ContextParallel(route="mesh", ranks_per_node=3), ValueError, "must divide"),
        (lambda: cp.shard({"input_ids": IDS}, device="abacus"), ValueError, "device = 'abacus'"),
        (lambda: cp.shard(IDS), TypeError, "batch must be a dict"),  # type: ignore[arg-type]
        (lambda: cp.shard({"labels": IDS}), ValueError, "neither input_ids nor inputs_embeds"),
        (lambda: cp.shard(part), ValueError, "sharded already"),
        (
            lambda: cp.shard({"input_ids": IDS, "labels": IDS, "shift_labels": IDS}),
            ValueError,
            "labels and shift_labels",
        ),
        (lambda: cp.shard({"input_ids": IDS, "types": IDS}), ValueError, "types: say in dims"),
        (lambda: cp.shard({"input_ids": IDS}, {"types": 1}), ValueError, "dims names 'types'"),
        (
            lambda: cp.shard({"input_ids": IDS, "types": IDS}, {"types": 0}),
            ValueError,
            "types has shape",
        ),
        (
            lambda: cp.shard({"input_ids": IDS, "labels": IDS[:, 1:]}),
            ValueError,
            "labels has shape",
        ),
        (
            lambda: cp.shard({"input_ids": IDS, "cu_seqlens": [0, 9]}),
            ValueError,
            "cu_seqlens ends at 9.*8 tokens",
        ),
        (
            lambda: cp.shard({"input_ids": IDS, "cu_seq_lens_q": [0, 8], "cu_seqlens": [0, 3, 8]}),
            ValueError,
            "must be equal",
        ),
        (
            lambda: cp.shard({"input_ids": IDS, "seq_idx": IDS // 4, "cu_seqlens": [0, 8]}),
            ValueError,
            "seq_idx has a new document at token 4, but cu_seqlens .* has no new one",
        ),
        (
            lambda: cp.shard({"input_ids": IDS, "seq_idx": IDS // 4, "cu_seqlens": [0, 3, 4, 8]}),
            ValueError,
            "seq_idx has no new document at token 3, but",
        ),
        (lambda: cp.shard({"input_ids": IDS, "seq_idx": IDS - 1}), ValueError, "negative"),
        (lambda: cp.shard({"input_ids": IDS, "seq_idx": IDS / 2}), ValueError, "torch.float32"),
        (lambda: cp.shard({"input_ids": IDS, "seq_idx": IDS[0, 1:]}), ValueError, "seq_idx must"),
        (
            lambda: cp.shard({"input_ids": IDS, "seq_idx": IDS // 4, "max_length_q": 3}),
            ValueError,
            "max_length_q = 3, but the longest document has 4",
        ),
        (
            lambda: cp.shard({"input_ids": IDS, "position_ids": IDS * 2}),
            ValueError,
            "position_ids go from 0 to 2",
        ),
        (
            lambda: cp.shard({"input_ids": IDS, "position_ids": IDS.expand(3, 1, 8)}),
            ValueError,
            "several axes",
        ),
        (
            lambda: cp.shard({"input_ids": IDS, "attention_mask": ones.float()}),
            ValueError,
            "attention_mask must be 0 at padding",
        ),
        (
            lambda: cp.shard({"input_ids": IDS, "attention_mask": ones.expand(8, 8)}),
            ValueError,
            "attention_mask must be",
        ),
        (
            lambda: cp.shard({"input_ids": IDS, "labels": IDS, "attention_mask": hidden}),
            ValueError,
            "2 targets where attention_mask is 0",
        ),
        (
            lambda: cp.shard({"input_ids": IDS, "loss_weights": IDS}),
            ValueError,
            "loss_weights without labels",
        ),
        (lambda: cp.loss(logits[:, 1:], labels), ValueError, "logits must be"),
        (lambda: cp.loss(logits, labels, weights=ones), ValueError, "weights must be"),
        (lambda: cp.loss(logits, labels, num_items=-1), ValueError, "num_items"),
        (lambda: cp.loss(logits, labels, num_items=labels), ValueError, "num_items"),
        (lambda: cp.loss(logits, labels, averaged_over=0), ValueError, "averaged_over"),
        (lambda: cp.gather(x, documents, dim=7), ValueError, "dim = 7"),
        (lambda: cp.gather(x.requires_grad_(), documents), ValueError, 'grad="sum"'),
        (lambda: cp.gather(x, [0, 8]), TypeError, "documents must be"),  # type: ignore[arg-type]
        (lambda: cp.gather(x[:, 1:], documents, grad="sum"), ValueError, "holds 4 tokens"),
        (lambda: cp.gather(x.expand(2, -1, -1, -1), packed), ValueError, "must have 1 row"),
        (lambda: cp.attention(x, x, x, None), TypeError, "documents"),  # type: ignore[arg-type]
        (lambda: cp.attention(x[:, 1:], x, x, documents), ValueError, "holds 4 tokens"),
        (lambda: cp.attention(x, x, x, ended, causal=False), ValueError, "end in padding"),
        (
            lambda: cp.attention(*[x.expand(2, -1, -1, -1)] * 3, packed),
            ValueError,
            r"q of packed documents must be \(1, tokens",
        ),
    ]
    for call, kind, words in calls:
        with pytest.raises(kind, match=words):
            call()


def test_mistakes_are_named(ranks: Callable[[int], Ranks]) -> None:
    ranks(2).run(mistakes)


def different_batches(rank: int, world_size: int) -> str:
    cp = ContextParallel()
    cp.shard({"input_ids": IDS})
    with pytest.raises(ValueError, match="do not make the same call") as error:
        cp.shard({"input_ids": IDS + rank})
    return str(error.value)


def first_batches(rank: int, world_size: int) -> str:
    """As a sampler for data parallelism would load them; what is sharded ahead is not compared."""
    cp = ContextParallel(dist.new_group())
    x = torch.zeros(1, 4, 2, 4)
    same = cp.shard({"input_ids": IDS})["documents"]
    other = cp.shard({"input_ids": IDS + rank})["documents"]
    with pytest.raises(ValueError, match="do not make the same call") as error:
        cp.attention(x, x, x, other)
    cp.attention(x, x, x, same)
    later = cp.shard({"input_ids": IDS + rank})["documents"]
    for documents in (later, other):  # it is asked once
        cp.attention(x, x, x, documents)
    return str(error.value)


def test_first_batches_that_differ_are_found(ranks: Callable[[int], Ranks]) -> None:
    for message in ranks(2).run(first_batches):
        assert "(every rank of the group loads the same batches) = " in message
        assert "attention over" not in message  # in that they agree


def test_different_batches_are_found() -> None:
    pool = Ranks(2, environment={"RFA_CHECK": "values"})
    try:
        for message in pool.run(different_batches):
            assert "input_ids = " in message
    finally:
        pool.stop()
