"""Files from before there was one format of results."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .replays.results import Replay, replay_rows
from .results import BACKWARD, BOTH, COMPARE, FORWARD, Results, Row

_KERNELS = "shapes (batch, nheads/nheads_k, seqlen, headdim)"
_SHAPE = re.compile(r"(\d+), (\d+)/(\d+), (\d+), (\d+), (causal|full)")
_VERSIONS = ("torch", "triton", "cudnn")
_NAMES = {"cudnn": "SDPA cuDNN", "fa2": "SDPA flash"}  # were torch's functions, not our kernels


def read_old(values: Mapping[str, Any]) -> Results:
    """Results of an old file; ValueError if it is none."""
    readers: tuple[tuple[Callable[[Mapping[str, Any]], bool], Callable[..., Results]], ...] = (
        (lambda v: _KERNELS in v, _kernels),
        (lambda v: "replays" in v, _replays),
        (lambda v: {"scenario", "ours"} <= set(v), _replay),
        (lambda v: any(_SHAPE.fullmatch(name) for name in v), _specialised),
    )
    for recognises, read in readers:
        if recognises(values):
            try:
                return read(values)
            except (KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"damaged: {error!r}") from None
    raise ValueError("no results of any known format")


def _results(command: str, values: Mapping[str, Any], rows: Iterator[Row], **more: Any) -> Results:
    return Results(
        command,
        {"device": values["gpu"], "kind": "cuda"},
        {name: str(values[name]) for name in _VERSIONS if name in values},
        values.get("commit"),
        {"repeats": values["rounds"]},
        tuple(rows),
        created="",
        **more,
    )


def _workload(name: str, dtype: str) -> dict[str, Any]:
    found = _SHAPE.fullmatch(name)
    if found is None:
        raise ValueError(f"{name!r} is no shape")
    batch, nheads, nheads_k, seqlen, headdim = map(int, found.groups()[:5])
    return {
        "batch": batch,
        "seqlen": seqlen,
        "nheads": nheads,
        "nheads_k": nheads_k,
        "headdim": headdim,
        "causal": found[6] == "causal",
        "window": [-1, -1],
        "dtype": dtype,
    }


def _returned(workload: Mapping[str, Any]) -> int:
    """Bytes of out, dq, dk and dv, which old files count; in half precision, as all of them are."""
    heads = 2 * workload["nheads"] + 2 * workload["nheads_k"]
    return 2 * heads * int(workload["batch"] * workload["seqlen"] * workload["headdim"])


def _kernels(values: Mapping[str, Any]) -> Results:
    def rows() -> Iterator[Row]:
        for shape, found in values[_KERNELS].items():
            workload = _workload(shape, values["dtype"])
            for passes in (FORWARD, BACKWARD):
                for name, each in found[passes].items():
                    who, times = _NAMES.get(name, name), (each["ms"],)
                    yield Row(COMPARE, who, passes, workload, {}, times, each["tflops"])
            for name, size in found["peak_bytes_forward_and_backward"].items():
                above = size - _returned(workload)
                yield Row(COMPARE, _NAMES.get(name, name), BOTH, workload, peak_bytes=above)

    return _results("python benchmarks/kernels.py", values, rows())


def _specialised(values: Mapping[str, Any]) -> Results:
    def rows() -> Iterator[Row]:
        for shape, found in values.items():
            if not _SHAPE.fullmatch(shape):
                continue
            workload = _workload(shape, values["dtype"])
            for name, each in found.items():
                yield Row(COMPARE, _NAMES.get(name, name), FORWARD, workload, {}, (each["ms"],))

    return _results("python benchmarks/specialised.py", values, rows())


def _replays(values: Mapping[str, Any]) -> Results:
    found = {name: Replay.from_dict(each) for name, each in values["replays"].items()}
    rows = (row for each in found.values() for row in replay_rows(each))
    details = {"replays": dict(values["replays"])}
    return _results("python benchmarks/replays.py", values, rows, details=details)


def _replay(values: Mapping[str, Any]) -> Results:
    replay = Replay.from_dict(values)
    return Results(
        "rfa replay",
        {"device": replay.device, "kind": "cpu" if replay.device.startswith("cpu") else "cuda"},
        replay.versions,
        None,
        {"repeats": replay.repeats},
        tuple(replay_rows(replay)),
        {"replays": {replay.ours.name: dict(values)}},
        created="",
    )
