"""Pages of the book as lists of blocks, and where two languages of a page differ."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from itertools import zip_longest

from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from myst_parser.config.main import MdParserConfig
from myst_parser.parsers.mdit import create_md_parser

# Directives whose text is the same in all languages; that of others is prose.
CODE = ("{step-code}", "{file-code}", "{step-output}", "{step-exercise}", "{toctree}", "{math}")
_TRANSLATED = ("alt", "caption")  # options


@dataclass(frozen=True)
class Block:
    """A heading, paragraph, item, cell, formula or fence."""

    kind: str  # with what it lies in: ul/li/p
    line: int
    text: str = ""  # translated: numbers stay
    fixed: str = ""  # the same in both languages
    formulas: int = 0
    info: str = ""  # of a fence


def parse(source: str) -> list[Token]:
    """As the book's pages are parsed; see `docs/lab/book/conf.py`."""
    config = MdParserConfig(enable_extensions={"dollarmath", "amsmath"})
    return create_md_parser(config, RendererHTML).parse(source)


def blocks(source: str, where: str = "", line: int = 0) -> list[Block]:
    """All blocks of a page or, inside a directive, of its text."""
    found: list[Block] = []
    path: list[str] = [where] if where else []
    tokens = parse(source)
    for token, following in zip_longest(tokens, tokens[1:]):
        at = line + token.map[0] + 1 if token.map else found[-1].line if found else line
        if token.nesting == 1:
            start = f" from {token.attrs['start']}" if "start" in token.attrs else ""
            path.append(token.tag + start)
            inline = following if following and following.type == "inline" else Token("", "", 0)
            formulas = [each for each in inline.children or () if "math" in each.type]
            found.append(Block("/".join(path), at, inline.content, formulas=len(formulas)))
        elif token.nesting == -1:
            path.pop()
        elif token.type == "fence":
            found += _fence(token, path, at)
        elif token.type != "inline":
            kind, fixed = "/".join([*path, token.type]), re.sub(r"\\text\{.*?\}", "", token.content)
            found.append(Block(kind, at, fixed=fixed, formulas=int("math" in token.type)))
    return found


def _fence(token: Token, path: list[str], line: int) -> list[Block]:
    """A directive's options by name, then its text: prose, or code as it is."""
    info = token.info.strip()
    kind, lines, fixed, text = "/".join([*path, f"``` {info}"]), token.content.split("\n"), "", ""
    while info.startswith("{") and (option := re.match(r":([\w-]+):(.*)", lines[0])):
        lines.pop(0)
        if option[1] in _TRANSLATED:
            fixed, text = f"{fixed}:{option[1]}:\n", f"{text}{option[2]}\n"
        else:
            fixed += f"{option[0]}\n"
    if info.startswith("{") and not info.startswith(CODE):
        skipped = token.content.count("\n") + 1 - len(lines)
        first = Block(kind, line, text, fixed, info=info)
        return [first, *blocks("\n".join(lines), kind, line + skipped)]
    return [Block(kind, line, text, fixed + "\n".join(lines), info=info)]


def numbers(text: str) -> Counter[str]:
    """1,024, 1{,}024 and 1024 are one."""
    text = re.sub(r"(?<=\d)(?:,|\{,\}|\\,|[\u2009\u202f])(?=\d{3}(?!\d))", "", text)
    return Counter(re.findall(r"\d+(?:\.\d+)*", text))


def differences(one: str, other: str, page: str = "") -> list[str]:
    """Where one language has other blocks, other code or other numbers; [] if it has not."""
    found = []
    pairs = zip_longest(blocks(one), blocks(other))
    for number, (a, b) in enumerate(pairs, 1):
        if a is None or b is None or a.kind != b.kind:
            what = "other blocks"
        elif a.fixed != b.fixed:
            what = "other code, options or formulas"
        elif numbers(a.text) != numbers(b.text):
            what = f"other numbers: {_more(a, b)} / {_more(b, a)}"
        else:
            continue
        found.append(f"{page}, block {number}: {what}\n  {_show(a)}\n  {_show(b)}")
        if what == "other blocks":
            break  # all that follow would differ
    return found


def _more(a: Block, b: Block) -> str:
    """Numbers that only a has."""
    return ", ".join((numbers(a.text) - numbers(b.text)).elements()) or "–"


def _show(block: Block | None) -> str:
    if block is None:
        return "nothing"
    return f"line {block.line}, {block.kind}: {(block.text or block.fixed).strip()}"
