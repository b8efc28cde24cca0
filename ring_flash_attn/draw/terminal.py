"""Schedules as text: who holds what, the mask with its steps, and each rank's turn in each step."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .schedule import DIGITS, LONGER, Schedule, colour, percent, ranges

_LARGEST = 40  # tokens of a mask that fits into 100 columns
_LINE, _HELD = 96, 70  # tokens of a line; characters for the tokens of a rank
_BAR = 16  # characters of the busiest rank's bar


def render(schedule: Schedule) -> RenderableType:
    parts: list[RenderableType] = [_headline(schedule), "", *_holders(schedule), ""]
    if len(schedule.owners()) <= _LARGEST:
        parts += [*_picture(schedule), ""]
    return Group(*parts, _steps(schedule), _balance(schedule), "")


def _headline(schedule: Schedule) -> Text:
    problem, mask = schedule.problem, schedule.problem.mask
    documents = [length for length in problem.lengths_k if length]
    left, right = ("all" if side is None else side for side in (mask.left, mask.right))
    seen = f"window of {left} keys before and {right} after"
    if left == "all" and right in ("all", 0):
        seen = "no mask" if right == "all" else "causal"
    facts = [
        f"{schedule.world_size} ranks",
        f"{sum(documents)} tokens" + (f" in {len(documents)} documents" * (len(documents) > 1)),
        seen,
        "backward" if schedule.backward else "forward",
    ]
    title = Text(f"{problem.layout.name} × {schedule.route}", style="bold")
    return title.append(f"   {', '.join(facts)}", style="not bold")


def _digit(number: int) -> str:
    return DIGITS[number] if number < len(DIGITS) else "*"


def _paint(text: str, rank: int, schedule: Schedule) -> Text:
    return Text(text, style=f"white on {colour(rank, schedule.world_size)}")


def _holders(schedule: Schedule) -> Iterator[Text]:
    """The rank of each token, then the tokens of each rank."""
    owners = schedule.owners()
    yield Text("Who holds which tokens", style="bold")
    if len(owners) <= _LINE:
        yield Text.assemble("  ", *(_paint(_digit(owner), owner, schedule) for owner in owners))
    for rank in range(schedule.world_size):
        held = [token for token, owner in enumerate(owners) if owner == rank]
        tokens = ranges(held)
        if len(tokens) > _HELD:
            tokens = tokens[: _HELD - 2] + " …"
        name = _paint(f" rank {rank} ", rank, schedule)
        yield Text.assemble("  ", name, f" {len(held)} tokens: {tokens}")


def _picture(schedule: Schedule) -> Iterator[Text]:
    """The mask: in each cell the step, in the colour of the rank that computes it."""
    owners = schedule.owners()
    cells = {pair: (patch.rank, patch.step) for patch in schedule.patches() for pair in patch.pairs}
    who = "colours: the rank that computes"
    for side, name in enumerate(("key", "query")):  # in words, for those who see no colours
        if all(rank == owners[pair[1 - side]] for pair, (rank, _) in cells.items()):
            who = f"the rank that holds the {name} computes"
    yield Text("Which step computes which pair", style="bold")
    yield Text(f"  rows: queries, columns: keys; {who}")
    edge = (_paint(f"{_digit(owner)} ", owner, schedule) for owner in owners)
    yield Text.assemble("  rank │ ", *edge)
    for query, owner in enumerate(owners):
        found = (cells.get((query, key)) for key in range(len(owners)))
        row = (
            _paint(f"{_digit(each[1])} ", each[0], schedule) if each else ("· ", "dim")
            for each in found
        )
        yield Text.assemble("    ", _paint(f" {_digit(owner)}", owner, schedule), " │ ", *row)


def _steps(schedule: Schedule) -> Table:
    """A row for each step and rank."""
    table = Table(box=box.SIMPLE, padding=(0, 1), pad_edge=False, title_justify="left")
    table.add_column("step", justify="right")
    table.add_column("rank", justify="right")
    table.add_column("computes")
    table.add_column("pairs", justify="right")
    table.add_column("share of the rank's work", min_width=_BAR)
    table.add_column("sends meanwhile", overflow="fold")
    longest, pairs = max(1, *schedule.step_times), schedule.rank_pairs
    for turn in chain.from_iterable(schedule.turns):
        hue = colour(turn.rank, schedule.world_size)
        bar = Text("█" * round(_BAR * turn.pairs / longest), hue)
        if turn.pairs:
            bar.append(f" {percent(turn.pairs / pairs[turn.rank])}", style="default")
        table.add_row(
            str(turn.step) if turn.rank == 0 else "",
            str(turn.rank),
            ", ".join(turn.work) or "idle",
            str(turn.pairs or ""),
            bar,
            ", ".join(turn.sends),
            end_section=turn.rank == schedule.world_size - 1,
        )
    return table


def _balance(schedule: Schedule) -> Text:
    """Pairs of each rank, and how much of the time is work."""
    each, time = schedule.rank_pairs, sum(schedule.step_times)
    return Text.assemble(
        f"Pairs of each rank: {', '.join(map(str, each))}; together {sum(each)}.\n",
        (f"{percent(schedule.busy)} busy", "bold"),
        f": a step lasts as long as its busiest rank, all steps {time} pairs.\n"
        f"{sum(each)} / ({schedule.world_size} × {time}) = {percent(schedule.busy, 1)}; "
        f"with {LONGER * len(schedule.owners()):,} tokens {percent(schedule.longer().busy, 1)}.",
    )
