"""How the ranks of `rfa ring` come about: torchrun's, new ones, or a replay on one device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...bench.link import NONE, Link, find_link
from ...bench.machine import find_device
from ...bench.pace import check_link
from ...comm import check_mode, launch
from ..groups import check_backend, check_no_group, check_timeout, check_world_size

_TIMEOUT = 300.0
_ON_ONE_GPU, _ON_CPU = 8, 4  # ranks


@dataclass(frozen=True, slots=True)
class Way:
    """How ranks come about.

    Attributes:
        world_size: number of ranks.
        device: of this process.
        backend: of the process group; None for a replay.
        link: what a replay emulates; None: communication is removed.
        timeout: seconds.
    """

    world_size: int
    device: torch.device
    backend: str | None
    link: Link | None
    timeout: float

    @property
    def is_replay(self) -> bool:
        """One rank at a time, on one device."""
        return self.backend is None

    @property
    def used_backend(self) -> str | None:
        """Of a group with one for each kind of device, the one that is used."""
        parts = dict(part.split(":") for part in (self.backend or "").split(",") if ":" in part)
        return parts.get(self.device.type, self.backend)


def find_way(
    world_size: int | None,
    device: str | None,
    backend: str | None,
    replay: bool,
    link: str | None,
    timeout: float | None,
) -> Way:
    """The way that these options mean; ValueError where they do not go together."""
    check_mode()
    where = find_device(device, "a ring")
    joined = launch.torchrun_rank()
    size = check_world_size(world_size, _usual_size(where))
    gpus = torch.cuda.device_count() if where.type == "cuda" else size
    if replay or link is not None or (joined is None and gpus < size):
        return _replay(size, where, joined, backend, link, timeout)
    patience = check_timeout(timeout, _TIMEOUT)
    if device is not None and ":" in device:
        raise ValueError(f"--device {device}: ranks take GPUs in turn; say cuda")
    return Way(size, where, check_backend(backend, where.type, size), None, patience)


def _usual_size(device: torch.device) -> int:
    if device.type == "cpu":
        return _ON_CPU
    gpus = torch.cuda.device_count()
    return gpus if gpus > 1 else _ON_ONE_GPU


def _replay(
    size: int,
    device: torch.device,
    joined: tuple[int, int] | None,
    backend: str | None,
    link: str | None,
    timeout: float | None,
) -> Way:
    if joined is not None:
        raise ValueError("--replay and --link need one process: start it without torchrun")
    check_no_group("this is a replay on one device", backend, timeout)
    emulated = find_link(NONE if link is None else link)
    check_link(emulated, device)
    return Way(size, device, None, emulated, _TIMEOUT)
