"""`Planner`: what `ContextParallel` is told where it is given "auto"."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ring_flash_attn import Planner, plan_for
from ring_flash_attn.api.context_parallel import BatchPlacement
from ring_flash_attn.plan.balanced import Balanced
from ring_flash_attn.plan.layout import get_layout

HEADS = (8, 2, 64)
PACK = (700, 30, 4096, 12, 1200, 90, 2064)
TOKENS = sum(PACK)


def planner(**options: Any) -> Planner:
    return Planner(**{"model": HEADS, "topology": "nvlink4", "gpu": "H200", **options})


def choose(
    asked: Planner, lengths: Any = PACK, batch: int | None = None, **given: Any
) -> BatchPlacement:
    options = {"world_size": 4, "layout": None, "route": None, "kernel": "triton", **given}
    return asked.choose(lengths, batch, **options)


def test_it_takes_what_the_planner_finds() -> None:
    """For packs and for sequences, with what is given left as it is."""
    shape = {"nheads": 8, "nheads_k": 2, "headdim": 64, "kernel": "triton", "world_size": 4}
    offsets = [sum(PACK[:n]) for n in range(len(PACK) + 1)]
    asked = planner()
    for route in (None, "all_gather"):
        routes = [route] if route else []
        best = plan_for(
            topology="nvlink4", cu_seqlens=offsets, layouts=["balanced"], routes=routes, **shape
        ).best.placement
        found = choose(asked, route=route)
        assert found == (Balanced(), best.route, best.parameters)
    assert found.route == "all_gather"
    best = plan_for(
        topology="nvlink4", seqlen=2048, batch=3, layouts=["zigzag", "contiguous"], **shape
    ).best.placement
    found = choose(asked, (8192,), 3)
    assert found == (get_layout(best.layout), best.route, best.parameters)
    assert choose(asked, layout=get_layout("stripe")).layout is get_layout("stripe")


def test_batches_of_a_kind_are_planned_once() -> None:
    asked = planner()
    first = choose(asked)
    assert choose(asked, tuple(length + 3 for length in PACK)) == first
    assert len(asked.rankings) == 1
    for lengths, batch in (((TOKENS,), None), ((64,) * 128, None), ((TOKENS,), 1), ((TOKENS,), 2)):
        choose(asked, lengths, batch)
    assert len(asked.rankings) == 5
    (ranking, *_) = asked.rankings.values()
    assert ranking.workload.lengths == PACK
    again = planner()  # as on another rank
    assert choose(again) == first


def test_packs_on_nodes_stay_in_them() -> None:
    found = choose(planner(topology="h200-ib400"), PACK * 4, world_size=16)
    assert found.layout == Balanced(ranks_per_node=8)
    one_node = choose(planner(topology="h200-ib400"), PACK * 4, world_size=8)
    assert one_node.layout == Balanced()


def test_heads_of_a_model() -> None:
    """By transformers' names; of a model with several parts, those of the text."""
    text = SimpleNamespace(num_attention_heads=8, num_key_value_heads=2, hidden_size=512)
    whole = SimpleNamespace(get_text_config=lambda: text)
    other = SimpleNamespace(num_attention_heads=8, hidden_size=16, head_dim=64)
    for model, nheads_k in ((text, 2), (whole, 2), (other, 8), ("8k", 8)):
        asked = planner(model=model)
        choose(asked)
        (ranking,) = asked.rankings.values()
        workload = ranking.workload
        assert (workload.nheads, workload.nheads_k, workload.headdim) == (8, nheads_k, 64)


def test_the_gpu_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    asked = planner(gpu=None)
    choose(asked)
    (ranking,) = asked.rankings.values()
    assert ranking.machine.gpu.name == "H100"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA L40S")
    with pytest.raises(ValueError, match="no rates for 'NVIDIA L40S'; name one of H200"):
        planner(gpu=None)


MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"gpu": None}, ValueError, "gpu: there is none here; say which: H200"),
    ({"gpu": "P100"}, ValueError, "unknown GPU 'P100'"),
    ({"topology": "none"}, ValueError, "topology 'none'"),
    ({"topology": "carrier"}, ValueError, "unknown link 'carrier'"),
    ({"model": (8, 2, 40)}, ValueError, "headdim 40: no kernel has a rate"),
    ({"model": (8, 3, 64)}, ValueError, "multiple of the number of KV heads"),
    ({"model": (8, 0, 64)}, ValueError, "model must be a positive integer"),
    ({"model": "llama9"}, ValueError, "unknown preset 'llama9'"),
    ({"model": 7}, TypeError, "model must be a Hugging Face config"),
    ({"memory_limit": 0}, ValueError, "memory_limit must be a positive"),
    ({"window_size": (1, 2, 3)}, ValueError, "window_size"),
]


@pytest.mark.parametrize(("options", "kind", "words"), MISTAKES, ids=str)
def test_mistakes_are_named(options: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        planner(**options)


def test_kernels_without_rates() -> None:
    with pytest.raises(ValueError, match="no rate of kernel 'reference'"):
        choose(planner(), kernel="reference")
    asked = planner()
    choose(asked, kernel="native")
    (ranking,) = asked.rankings.values()
    assert {each.placement.kernel for each in ranking.ranked} <= {"fa4", "cudnn", "fa2"}
