"""How the ranks of `rfa ring` come about: torchrun's, new ones, or a replay on one device."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from ...bench.link import NONE, Link, find_link
from ...bench.machine import find_device
from ...bench.pace import check_link
from ...comm import check_mode, launch

_BACKENDS = ("gloo", "nccl")
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
    size = _world_size(world_size, where, joined)
    if timeout is not None and not timeout > 0:
        raise ValueError(f"--timeout must be positive, not {timeout:g}")
    gpus = torch.cuda.device_count() if where.type == "cuda" else size
    if replay or link is not None or (joined is None and gpus < size):
        return _replay(size, where, joined, backend, link, timeout)
    if joined is not None and timeout is not None:
        raise ValueError(f"--timeout {timeout:g}: torchrun itself watches the ranks it started")
    if device is not None and ":" in device:
        raise ValueError(f"--device {device}: ranks take GPUs in turn; say cuda")
    found = _backend(backend, where, size)
    return Way(size, where, found, None, timeout or _TIMEOUT)


def _world_size(given: int | None, device: torch.device, joined: tuple[int, int] | None) -> int:
    if joined is not None:
        if given not in (None, joined[1]):
            raise ValueError(f"--world-size {given}: torchrun has started {joined[1]} ranks")
        return joined[1]
    if given is not None:
        return given
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
    for name, value in (("--backend", backend), ("--timeout", timeout)):
        if value is not None:
            raise ValueError(f"{name} {value}: this is a replay on one device, without a group")
    emulated = find_link(NONE if link is None else link)
    check_link(emulated, device)
    return Way(size, device, None, emulated, _TIMEOUT)


def _backend(given: str | None, device: torch.device, size: int) -> str:
    if given is None:
        return launch.default_backend(device.type, size)
    if given not in _BACKENDS:
        raise ValueError(f"unknown backend {given!r}; choose one of {', '.join(_BACKENDS)}")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if given == "nccl" and (device.type == "cpu" or torch.cuda.device_count() < here):
        raise ValueError(f"--backend nccl needs a GPU for each of {here} ranks")
    return given
