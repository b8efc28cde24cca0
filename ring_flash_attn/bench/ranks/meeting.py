"""Where ranks meet: before each timed run, and after each trial to agree on what came of it."""

from __future__ import annotations

import torch

from ...comm import agree, check_mode, gather_shards, rank_and_size, resolve_group

DONE = "done"


class Meeting:
    """This rank's way to the others of the default group.

    Args:
        device: of this rank; with NCCL the meeting is on its current stream, not on the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._group, self._device = resolve_group(None), device
        self._rank, self._size = rank_and_size(self._group)
        self._trials = 0
        self._token = torch.tensor([self._rank], device=device)  # made now: a copy to a GPU waits

    def wait_for_all(self) -> None:
        """Go on when all ranks are here."""
        gather_shards(self._token, [(1,)] * self._size, self._group)

    def agree_on(self, what: str, outcome: str) -> None:
        """Return if the trial had the same outcome on all ranks, and messages still arrive.

        Raises:
            ValueError: outcomes differ, or a rank does not answer within a minute; says which.
            RuntimeError: the trial failed, and it cannot be known whether the others failed, too;
                or its messages are still under way.
        """
        self._trials += 1
        if check_mode() == "off" and outcome != DONE and self._size > 1:
            raise RuntimeError(f"{what}: {outcome} on rank {self._rank}; RFA_CHECK is off")
        fields = (("trial", self._trials), ("function", what), ("outcome", outcome))
        agree(fields, self._group)
        mine = torch.tensor([self._trials, self._rank], device=self._device)
        found = gather_shards(mine, [(2,)] * self._size, self._group)
        if [part.tolist() for part in found] != [[self._trials, r] for r in range(self._size)]:
            raise RuntimeError(f"{what}: {outcome}, and the ranks are out of step after it")
