"""The tables of docs/predictions.md: every published row, what is predicted, and the error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .constants import FITTED, LISTED
from .fit import fitted_rows
from .limits import limit, missed, orders
from .predict import predict
from .rows import SOURCES, PublishedRow, read_rows

BEGIN, END = "<!-- predictions -->", "<!-- /predictions -->"


def pages() -> str:
    """All tables, as Markdown."""
    lines = ["### Constants", "", _count(), "", *_constants(), ""]
    for source, name in SOURCES.items():
        rows = read_rows(source)
        lines += [f"### {name}", "", *_summary(source, rows), "", *_table(source, rows), ""]
    lines += ["### Which degree of Ulysses is best", "", *_degrees(), ""]
    return "\n".join(lines)


def written(page: str) -> str:
    """A page with these tables between its two marks."""
    before, rest = page.split(BEGIN, 1)
    _, after = rest.split(END, 1)
    return f"{before}{BEGIN}\n\n{pages()}\n{END}{after}"


def _count() -> str:
    sources = {each.source for each in LISTED}
    fitted = sum(len(fitted_rows(source)) for source in sources)
    usable = sum(row.usable for row in read_rows())
    return f"{len(LISTED)} constants, fitted on {fitted} rows; {usable - fitted} others test them."


def _constants() -> Iterator[str]:
    yield "| constant | value | what it is | fitted on every other row of |"
    yield "|---|---|---|---|"
    for each in LISTED:
        value = f"{getattr(FITTED, each.name):.4g} {each.unit}".strip()
        yield f"| `{each.name}` | {value} | {each.meaning} | {SOURCES[each.source]} |"


def _summary(source: str, rows: Sequence[PublishedRow]) -> Iterator[str]:
    usable, fitted = [row for row in rows if row.usable], fitted_rows(source)
    constants = [each for each in LISTED if each.source == source]
    held = [row for row in usable if row not in fitted]
    errors = sorted(abs(row.error(predict(row))) for row in held)
    median = errors[len(errors) // 2]
    used = f"{len(constants)} constants, {len(fitted)} rows" if constants else "nothing"
    beyond = [row for row in usable if missed(row, predict(row))]
    pairs, wrong = orders(tuple(rows))
    yield (
        f"Fitted: {used}. The other {len(held)} rows: median error {median:.1%}, "
        f"largest {errors[-1]:.1%}. Pairs of schemes whose spans do not overlap: {pairs}, of which "
        f"{len(wrong)} are predicted the wrong way."
    )
    if any(limit(row) for row in rows):
        yield f"Beyond the limit: {len(beyond)} of {len(usable)} rows (**bold**)."


def _table(source: str, rows: Sequence[PublishedRow]) -> Iterator[str]:
    fitted = fitted_rows(source)
    yield "| machine | scheme | passes | unit | published | predicted | error | |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        seconds = predict(row)
        error = f"{row.error(seconds):+.1%}"
        error = f"**{error}**" if missed(row, seconds) else error
        role = (
            "fitted"
            if row in fitted
            else ""
            if row.usable
            else "speed"
            if row.ranks == 1
            else "unusable"
        )
        published = " ".join(f"{value:g}" for value in row.values)
        cells = (_machine(row), str(row), row.passes, row.unit, published)
        yield f"| {' | '.join(cells)} | {row.published(seconds):.4g} | {error} | {role} |"


def _machine(row: PublishedRow) -> str:
    return f"{row.ranks} × {row.machine}" if row.ranks > 1 else row.machine.split()[0]


def _degrees() -> Iterator[str]:
    yield "| machine | tokens | scheme | published, best first | predicted |"
    yield "|---|---|---|---|---|"
    groups: dict[tuple[str, int, str], list[PublishedRow]] = {}
    for row in read_rows("yunchang"):
        groups.setdefault((row.machine, row.tokens, row.scheme), []).append(row)
    for (machine, tokens, scheme), rows in groups.items():
        published, predicted = (
            " ".join(str(row.ulysses) for row in sorted(rows, key=key))
            for key in (lambda row: row.seconds, predict)
        )
        yield f"| {machine} | {tokens >> 10} k | {scheme} | {published} | {predicted} |"
