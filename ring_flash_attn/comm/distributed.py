"""Transport over torch.distributed: NCCL, and gloo for tensors on the CPU or on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ..trace import span
from .agreement import UNDER_WAY, agree, call_failed, group_timeout, meet_after_failure
from .base import Message

_DRAIN = timedelta(seconds=10)  # of a call that has failed, for messages of other ranks
_TAG = 0x524641  # on gloo: a user's own messages in the group, with another tag, are not ours
Group = ProcessGroup | DeviceMesh  # what users pass

_gloo: WeakKeyDictionary[ProcessGroup, dict[str, bool]] = WeakKeyDictionary()  # of a device type
_connected: WeakSet[ProcessGroup] = WeakSet()  # NCCL groups that have run a collective of ours


def resolve_group(group: Group | None) -> ProcessGroup:
    """The process group of what a user passed; ValueError if this rank is not in it.

    None means the default group, a DeviceMesh the group of its only axis.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "torch.distributed is not initialised: call its init_process_group first, or use "
            "flash_attn_func and its siblings for attention on one device"
        )
    if group is None:
        group = dist.group.WORLD
    if isinstance(group, DeviceMesh):
        group = _group_of_mesh(group)
    if not isinstance(group, ProcessGroup):
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(f"group: rank {dist.get_rank()} is not a member of this group")
        raise ValueError(
            f"group must be a ProcessGroup, a DeviceMesh or None, not {type(group).__name__}"
        )
    if dist.get_rank(group) < 0:
        ranks = dist.get_process_group_ranks(group)
        raise ValueError(f"group: rank {dist.get_rank()} is not one of its members {ranks}")
    return group


def _group_of_mesh(mesh: DeviceMesh) -> ProcessGroup:
    """Of its only axis; ValueError if it has several, or this rank is not on it."""
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or ("without names",)
        raise ValueError(
            f"group must be a DeviceMesh of one axis, not of {mesh.ndim} ({', '.join(names)}): "
            "pass that of context parallelism, such as mesh['cp']"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"group: rank {dist.get_rank()} is not on this DeviceMesh")
    return mesh.get_group()


def group_called(name: str) -> ProcessGroup:
    """The group with this `group_name`, as torch's functional collectives find theirs."""
    c10d: Any = dist.distributed_c10d
    group: ProcessGroup = c10d._resolve_process_group(name)
    return group


def group_and_node(
    group: Group | None, ranks_per_node: int | None
) -> tuple[Group | None, int | None]:
    """The group of all ranks of a DeviceMesh of two axes, and the size of the inner one.

    All ranks make it, when they first ask.
    """
    if not isinstance(group, DeviceMesh) or group.ndim != 2:
        return group, ranks_per_node
    inner = _inner_axis(group, ranks_per_node)
    if not torch.compiler.is_compiling():  # which does not know the numbers; only speed depends
        _ranks_in_order(group)
    return group._flatten(), inner


def rank_and_node(group: Group | None, ranks_per_node: int | None) -> tuple[int, int, int | None]:
    """Rank, number of ranks and ranks of a node, without making a group."""
    if not isinstance(group, DeviceMesh) or group.ndim != 2:
        return *rank_and_size(group), ranks_per_node
    inner = _inner_axis(group, ranks_per_node)
    ranks = _ranks_in_order(group)
    return ranks.index(dist.get_rank()), len(ranks), inner


def _inner_axis(mesh: DeviceMesh, ranks_per_node: int | None) -> int:
    """Its size."""
    inner = mesh.size(1)
    if ranks_per_node not in (None, inner):
        raise ValueError(
            f"ranks_per_node = {ranks_per_node}, but the inner axis of the DeviceMesh has {inner}"
        )
    if mesh.mesh_dim_names is None:
        raise ValueError("group: a DeviceMesh of two axes needs mesh_dim_names")
    if mesh.get_coordinate() is None:
        raise ValueError(f"group: rank {dist.get_rank()} is not on this DeviceMesh")
    return inner


def _ranks_in_order(mesh: DeviceMesh) -> list[int]:
    """All of them; a group would put others in order, and tear nodes apart."""
    ranks: list[int] = mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise ValueError(
            f"group: the DeviceMesh has ranks {ranks}: they must ascend, those of a node first"
        )
    return ranks


def rank_and_size(group: Group | None) -> tuple[int, int]:
    group = resolve_group(group)
    return dist.get_rank(group), dist.get_world_size(group)


def is_gloo(group: ProcessGroup, device: torch.device) -> bool:
    """Whether the group would send tensors of this device through gloo."""
    known = _gloo.setdefault(group, {})
    if device.type not in known:
        config = dist.get_backend_config(group)
        backends = dict(pair.split(":") for pair in str(config).split(",") if ":" in pair)
        known[device.type] = backends.get(device.type, dist.get_backend(group)) == "gloo"
    return known[device.type]


def share_seed(seed: Tensor, group: ProcessGroup, device: torch.device) -> Tensor:
    """The seed of the group's first rank, on `device`."""
    if dist.get_world_size(group) > 1:
        where = torch.device("cpu") if is_gloo(group, device) else device
        seed = seed.to(where)
        dist.broadcast(seed, group=group, group_src=0)
    return seed.to(device)


def sum_over(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum of all ranks' tensors, a new one."""
    where = torch.device("cpu") if is_gloo(group, x.device) else x.device
    total = x.to(where, copy=True)
    if dist.get_world_size(group) > 1:
        agree((("call", "sum"), ("dtype", str(x.dtype)), ("shape", tuple(x.shape))), group)
        dist.all_reduce(total, group=group)
    return total.to(x.device)


def connect(group: ProcessGroup, device: torch.device) -> None:
    """Every rank, before its first message: NCCL sets a group up at an operation of all ranks."""
    if group not in _connected and not is_gloo(group, device):
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        _connected.add(group)


def gather_shards(
    local: Tensor, shapes: Sequence[tuple[int, ...]], group: ProcessGroup, grad: str | None = None
) -> list[Tensor]:
    """Every rank's contiguous tensor, on every rank; shapes may differ.

    `grad` says how gradients will come back, where there are any: ranks have to agree on that.
    """
    kind = ("gathered", str(local.dtype)), ("shapes", tuple(shapes)), ("grad", grad)
    agree(kind, group)
    connect(group, local.device)
    parts = [local.new_empty(shape) for shape in shapes]
    parts[dist.get_rank(group)] = local
    with span("gather the shards of {} ranks", len(shapes)):
        _exchange([local] * len(shapes), parts, group)
    return parts


_WAY_BACK = (
    'the backward pass of a gather with grad="sum", which every rank takes part in: where a loss '
    "does not use what was gathered, add 0 * gathered.sum()"
)


def exchange_shards(parts: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    """What every rank has for us, by rank; `parts` is what we have for each. All contiguous.

    For the way back of `gather_shards`: what comes has the shape of our own part. The first time,
    the ranks meet, so that one whose loss does not depend on what was gathered is named.
    """
    agree((("call", _WAY_BACK),), group)
    own = parts[dist.get_rank(group)]
    found = [own if part is own else torch.empty_like(own) for part in parts]
    with span("exchange the shards of {} ranks", len(parts)):
        _exchange(parts, found, group)
    return found


def _exchange(sent: Sequence[Tensor], received: Sequence[Tensor], group: ProcessGroup) -> None:
    """One message to and from every other rank."""
    rank = dist.get_rank(group)
    transport = DistributedTransport(group, sent[rank].device)
    others = [r for r in range(len(sent)) if r != rank]
    try:
        transport.post(
            [
                *(Message(received[r], r, receive=True) for r in others),
                *(Message(sent[r], r, receive=False) for r in others),
            ]
        )
        transport.wait()
    except BaseException as error:
        transport.abandon([bool(others)], drain=isinstance(error, Exception))
        raise


class DistributedTransport:
    """This process's end of a group.

    NCCL waits are waits of the current stream, never of the host. gloo cannot send CUDA tensors:
    they are staged through pinned host memory, which blocks the host.
    """

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        meet_after_failure(group)
        self._group, self._device, self._posted = group, device, 0
        self._gloo = is_gloo(group, device)
        made_by_torch = not self._gloo and type(group) is ProcessGroup
        self._coalesces = made_by_torch and group._get_backend(device).supports_coalescing
        self._staged = self._gloo and device.type != "cpu"
        self._requests: list[Any] = []
        self._arrivals: list[tuple[Tensor, Tensor]] = []  # (on the device, on the host)
        self._sent: list[Tensor] = []  # host copies, alive until they are sent

    def post(self, messages: Sequence[Message]) -> None:
        """Start all messages, receives first.

        What torch's batch_isend_irecv does; its checks of each message cost the host more than the
        messages. If one cannot be started, `abandon` finds the others.
        """
        there = [message for message in messages if message.tensor.numel()]
        there.sort(key=lambda message: not message.receive)
        if there and self._coalesces:
            self._group._start_coalescing(self._device)
            try:
                for message in there:
                    self._start(message)
            finally:  # a group that stays open would swallow what users send next
                together = self._group._end_coalescing(self._device)
                self._requests += [together] if together else []  # None: nothing was started
        else:
            for message in there:
                self._requests.append(self._start(message))
        self._posted += 1

    def _start(self, message: Message) -> dist.Work:
        tensors = [self._stage(message) if self._staged else message.tensor]
        start = self._group.recv if message.receive else self._group.send
        return start(tensors, message.peer, _TAG if self._gloo else 0)

    def _stage(self, message: Message) -> Tensor:
        tensor = message.tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        if message.receive:
            self._arrivals.append((tensor, host))
        else:
            self._sent.append(host.copy_(tensor))
        return host

    def wait(self, timeout: timedelta | None = None) -> None:
        """Make the current stream wait for what was posted; with gloo the host, up to a timeout."""
        for request in self._requests:
            if timeout is not None and self._gloo:
                request.wait(timeout)
            else:
                request.wait()
        for tensor, host in self._arrivals:
            tensor.copy_(host)  # from pinned memory; returns when the copy is done
        self._requests, self._arrivals, self._sent = [], [], []

    def abandon(self, steps: Sequence[bool], drain: bool) -> None:
        """Where other ranks may wait for messages that will not come, the next call asks them."""
        if not any(steps):
            return
        under_way = bool(self._requests)
        if drain:
            try:
                self.wait(min(_DRAIN, group_timeout(self._group) / 4))
                under_way = False
            except RuntimeError:
                pass
        if under_way:
            call_failed(self._group, UNDER_WAY)
        elif any(steps[self._posted :]):
            call_failed(self._group, f"after {self._posted} of {len(steps)} steps were posted")
