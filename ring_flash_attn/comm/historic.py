"""The communicators that other projects import from `ring_flash_attn.utils`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .distributed import Group, resolve_group

__all__ = ["AllGatherComm", "RingComm"]

# torch 2.13 renamed it, and warns of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class RingComm:
    """Passes tensors to the next rank of a ring (`send_rank`), and receives the previous rank's."""

    def __init__(self, process_group: Group | None) -> None:
        group = resolve_group(process_group)
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        following, previous = (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size
        self.send_rank = dist.get_global_rank(group, following)
        self.recv_rank = dist.get_global_rank(group, previous)
        self._process_group = group
        self._ops: list[dist.P2POp] = []
        self._reqs: list[dist.Work] | None = None

    def send_recv(self, to_send: Tensor, recv_tensor: Tensor | None = None) -> Tensor:
        """Queue one exchange, to start with `commit`; what is returned is valid after `wait`."""
        received = torch.empty_like(to_send) if recv_tensor is None else recv_tensor
        group = self._process_group
        self._ops += [
            dist.P2POp(dist.isend, to_send, self.send_rank, group=group),
            dist.P2POp(dist.irecv, received, self.recv_rank, group=group),
        ]
        return received

    def commit(self) -> None:
        if self._reqs is not None:
            raise RuntimeError("commit() before the wait() for the last one")
        self._reqs = dist.batch_isend_irecv(self._ops)

    def wait(self) -> None:
        if self._reqs is None:
            raise RuntimeError("wait() without a commit()")
        for request in self._reqs:
            request.wait()
        self._ops, self._reqs = [], None

    def send_recv_kv(
        self, k: Tensor, v: Tensor, k_buffer: Tensor | None = None, v_buffer: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Queue keys and values and start both; they are valid after `wait`."""
        received = self.send_recv(k, k_buffer), self.send_recv(v, v_buffer)
        self.commit()
        return received


class AllGatherComm:
    """Starts all-gathers that `wait` then waits for."""

    def __init__(self, group: Group | None = None) -> None:
        self.group = None if group is None else resolve_group(group)
        self.handles: list[dist.Work] = []

    def all_gather(self, output_tensor: Tensor, input_tensor: Tensor) -> None:
        """Start to gather `input_tensor` of every rank, in rank order, into `output_tensor`."""
        handle = _all_gather(output_tensor, input_tensor, group=self.group, async_op=True)
        if handle is not None:
            self.handles.append(handle)

    def wait(self) -> None:
        for handle in self.handles:
            handle.wait()
        self.handles = []
