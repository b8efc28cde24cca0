"""Communication: the only place that knows torch.distributed; and virtual ranks in one process."""

from .agreement import agree, check_mode
from .base import Message, Transport, virtual_transports
from .distributed import (
    DistributedTransport,
    Group,
    connect,
    exchange_shards,
    gather_shards,
    group_and_node,
    group_called,
    is_gloo,
    rank_and_node,
    rank_and_size,
    resolve_group,
    share_seed,
    sum_over,
)

__all__ = [
    "DistributedTransport",
    "Group",
    "Message",
    "Transport",
    "agree",
    "check_mode",
    "connect",
    "exchange_shards",
    "gather_shards",
    "group_and_node",
    "group_called",
    "is_gloo",
    "rank_and_node",
    "rank_and_size",
    "resolve_group",
    "share_seed",
    "sum_over",
    "virtual_transports",
]
