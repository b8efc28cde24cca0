"""Options of commands that run ranks: what goes with torchrun's, with new ones, and with none."""

from __future__ import annotations

import os

from .options import BACKENDS

_TIMEOUT = 300.0  # seconds


def is_first_rank() -> bool:
    """Whether this process prints and writes: of torchrun's ranks the first does."""
    from ..comm import launch

    joined = launch.torchrun_rank()
    return joined is None or joined[0] == 0


def check_world_size(world_size: int | None, default: int) -> int:
    """torchrun's, or the user's, or the default; ValueError if the first two differ."""
    from ..comm import launch

    joined = launch.torchrun_rank()
    if joined is None:
        return default if world_size is None else world_size
    if world_size not in (None, joined[1]):
        raise ValueError(f"--world-size {world_size}: torchrun has started {joined[1]} ranks")
    return joined[1]


def check_group(
    device: str | None, kind: str, world_size: int, backend: str | None, timeout: float | None
) -> tuple[str, float]:
    """The backend of the group and seconds that a rank may take; ValueError for wrong options."""
    import torch

    from ..comm import launch

    if device is not None and ":" in device:
        raise ValueError(f"--device {device}: ranks take GPUs in turn; say cuda")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"--timeout must be positive, not {timeout:g}")
    if timeout is not None and launch.torchrun_rank() is not None:
        raise ValueError(f"--timeout {timeout:g}: torchrun itself watches the ranks it started")
    if backend not in (None, *BACKENDS):
        raise ValueError(f"unknown backend {backend!r}; choose one of {', '.join(BACKENDS)}")
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if backend == "nccl" and (kind == "cpu" or torch.cuda.device_count() < here):
        raise ValueError(f"--backend nccl needs a GPU for each of {here} ranks")
    return (
        backend or launch.default_backend(kind, world_size),
        _TIMEOUT if timeout is None else timeout,
    )


def check_no_group(why: str, backend: str | None, timeout: float | None) -> None:
    """ValueError for options of a group where there is none."""
    for name, value in (("--backend", backend), ("--timeout", timeout)):
        if value is not None:
            raise ValueError(f"{name} {value}: {why}, without a group")
