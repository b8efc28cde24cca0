"""Small tensors that launches read, copied to a device once for each plan, and kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

Made = TypeVar("Made")
_MOST = 512  # of a kind; a plan of many ranks has as many launches


class Kept(Generic[Made]):
    """What was made for plans, which hand out the same objects each time: it goes by identity.

    Only the newest are kept, and those that a CUDA graph reads, which may be replayed at any time.
    """

    def __init__(self) -> None:
        self._newest: dict[tuple[object, ...], tuple[object, Made]] = {}
        self._of_graphs: dict[tuple[object, ...], tuple[object, Made]] = {}

    def get(
        self, plan: object, device: torch.device, key: object, make: Callable[[], Made]
    ) -> Made:
        """What was made for a part of a plan, on a device, for a key; made now if it is not there.

        Raises:
            RuntimeError: a CUDA graph is being captured, and what is made is copied to the device.
        """
        whole = id(plan), device, key
        found = self._newest.get(whole) or self._of_graphs.get(whole)
        if found is None:
            made = make()
            if len(self._newest) >= _MOST:
                self._newest.pop(next(iter(self._newest)), None)
            found = self._newest[whole] = plan, made  # keeps the plan, and so its id, alive
        if capturing(device):
            self._of_graphs[whole] = found
        return found[1]


def capturing(device: torch.device) -> bool:
    """Whether what is launched now becomes part of a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """A copy of a CPU tensor, without waiting for what a GPU has to do before it."""
    if capturing(device):
        raise RuntimeError(
            "before this can be captured in a CUDA graph, make the same call once, with its "
            "backward pass if that is captured: it copies tables to the GPU, and a graph would "
            "copy them again whenever it is replayed, from memory that is not theirs any more"
        )
    if device.type != "cuda":
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)
