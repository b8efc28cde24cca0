"""The book: a page for each step, both languages alike; what it names exists; it can be read."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import pytest
from answers import Planted, planted
from browsers import Tab, start_browser

from ring_flash_attn.lab.registry import STEPS

pytest.importorskip("myst_parser", reason="needs myst-parser: the extra `book`")
from translations import blocks, differences

ROOT = Path(__file__).parents[2]
BOOK = ROOT / "docs" / "lab" / "book"
LAB = ROOT / "ring_flash_attn" / "lab"
LANGUAGES = ("en", "zh")
CHAPTERS = [step.module.rpartition(".")[2] for step in STEPS]
PAGES = ["index", *CHAPTERS]


def source(language: str, page: str) -> str:
    return (BOOK / language / f"{page}.md").read_text(encoding="utf-8")


def directives(page: str, name: str) -> list[str]:
    """The arguments of each; of the English page, the other has the same."""
    found = (each.info for each in blocks(source("en", page)))
    return [info.split("}", 1)[1].strip() for info in found if info.startswith(f"{{{name}}}")]


# Pages


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_step_has_a_page_and_every_page_a_step(language: str) -> None:
    assert sorted(path.stem for path in (BOOK / language).iterdir()) == sorted(PAGES)


def listed(language: str) -> list[tuple[str, str, str, str]]:
    """Number, title, page and line of each chapter on the first page."""
    line = r"^(\d+)\. \[(.+)\]\((\w+)\.md\)(?:: |：)(.+)$"
    return re.findall(line, source(language, "index"), re.M)


def test_the_first_page_lists_the_steps() -> None:
    want = [(str(s.number), s.title, page, s.teaches) for s, page in zip(STEPS, CHAPTERS)]
    assert listed("en") == want
    assert [(number, page) for number, _, page, _ in listed("zh")] == [
        (number, page) for number, _, page, _ in want
    ]


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_chapter_has_the_title_that_the_first_page_says(language: str) -> None:
    titles = {page: f"{number}. {title}" for number, title, page, _ in listed(language)}
    assert {page: blocks(source(language, page))[0].text for page in CHAPTERS} == titles


# Two languages


@pytest.mark.parametrize("page", PAGES)
def test_both_languages_have_the_same_blocks_and_numbers(page: str) -> None:
    found = differences(*(source(language, page) for language in LANGUAGES), page)
    assert not found, "\n".join(found)


SAMPLE = """# 1. A title

Text with 1,024 keys and $x^2$.

- one
- two, 2

| a | b |
|---|---|
| 1 | 2 |

$$y = 3$$

```{step-figure} name
:alt: Shows 4 things.

A caption with 5.
```

```{step-output}
:end-before: Without
```
"""


def test_a_translation_is_no_difference() -> None:
    other = SAMPLE.replace("Text with 1,024 keys", "有 1024 个键的文字").replace("Shows", "显示")
    assert differences(SAMPLE, other.replace("A caption with 5.", "说明：5。")) == []


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("Text with 1,024 keys and $x^2$.\n\n", "", "block 2: other blocks"),
        ("1,024", "1,025", "block 2: other numbers: 1024 / 1025"),
        ("$x^2$", "$x^3$", "other numbers: 2 / 3"),
        ("# 1. A", "## 1. A", "block 1: other blocks"),
        ("- one\n- two, 2", "- one\n\n  two, 2", "other blocks"),
        ("two, 2", "two, 3", "other numbers: 2 / 3"),
        ("| 1 | 2 |", "| 1 | 2 |\n| 1 | 2 |", "other blocks"),
        ("| 1 | 2 |", "| 1 | 3 |", "other numbers: 2 / 3"),
        ("y = 3", "y = 4", "other code, options or formulas"),
        ("{step-figure} name", "{step-figure} other", "other blocks"),
        (":alt: Shows 4 things.\n", "", "other code, options or formulas"),
        ("Shows 4", "Shows 5", "other numbers: 4 / 5"),
        ("caption with 5", "caption with 6", "line 17, ``` {step-figure} name/p: A caption with 6"),
        (":end-before: Without", ":end-before: With", "other code, options or formulas"),
        ("```{step-output}\n:end-before: Without\n```\n", "", "\n  nothing"),
    ],
)
def test_differences_are_found(old: str, new: str, says: str) -> None:
    assert old in SAMPLE
    (found,) = differences(SAMPLE, SAMPLE.replace(old, new), "page")
    assert found.startswith("page, block ")
    assert says in found


# What pages name


def figures(page: str) -> list[str]:
    """`__all__` of the page's figures; not imported, since that would import triton."""
    path = BOOK / "figures" / f"{page}.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (names,) = (
        ast.literal_eval(each.value)
        for each in tree.body
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "__all__"
    )
    assert set(names) <= set(defined(path)), path
    return list(names)


def defined(path: Path) -> Iterator[str]:
    """Functions and classes of a file, methods as Class.method."""
    for each in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(each, (ast.FunctionDef, ast.ClassDef)):
            yield each.name
            inside = each.body if isinstance(each, ast.ClassDef) else ()
            yield from (f"{each.name}.{m.name}" for m in inside if isinstance(m, ast.FunctionDef))


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_is_shown_once(page: str) -> None:
    assert sorted(directives(page, "step-figure")) == sorted(figures(page))


def test_every_file_of_figures_has_a_page() -> None:
    files = {path.stem for path in (BOOK / "figures").glob("*.py")}
    assert files == {"__init__", "style", *PAGES}


@pytest.mark.parametrize("page", CHAPTERS)
def test_code_that_is_named_exists(page: str) -> None:
    names = " ".join(directives(page, "step-code")).split()
    assert names, "a chapter shows code of its step"
    assert set(names) <= set(defined(LAB / "steps" / f"{page}.py"))
    for file, name in map(str.split, directives(page, "file-code")):
        assert name in defined(ROOT / "ring_flash_attn" / file), (file, name)


@pytest.mark.parametrize(
    ("language", "last"),
    [
        ("en", ["What can go wrong", "Your turn", "Questions"]),
        ("zh", ["容易出错的地方", "轮到你了", "思考题"]),
    ],
)
def test_chapters_end_alike(language: str, last: list[str]) -> None:
    for step, page in zip(STEPS, CHAPTERS):
        titles = re.findall(r"^## (.+)$", source(language, page), re.M)
        wanted = [title for title in last if title != last[1] or step.has_exercise]
        assert [title for title in titles if title in last] == wanted, page
        assert titles[-1] == last[-1] or not step.has_exercise


@pytest.mark.parametrize("step", STEPS, ids=CHAPTERS)
def test_a_chapter_has_the_exercise_of_its_step(step: Any) -> None:
    page = CHAPTERS[step.number - 1]
    assert len(directives(page, "step-exercise")) == step.has_exercise
    assert (f"rfa lab check {step.number} " in source("en", page)) == step.has_exercise


def test_the_checker_says_what_the_first_page_shows(tmp_path: Path) -> None:
    old, new = "acc = acc * alpha[:, None] + p @ v", "acc = acc + p @ v"
    (shown,) = (each.fixed for each in blocks(source("en", "index")) if each.info == "python")
    assert shown.strip() == f"{new}  # should be: {old.removeprefix('acc = ')}"
    (said,) = (each.fixed for each in blocks(source("en", "index")) if each.info == "text")
    file = tmp_path / "answer.py"
    file.write_text(planted(Planted(4, "rescale", old, new)), encoding="utf-8")
    command = [sys.executable, "-m", "ring_flash_attn.cli", "lab", "check", "4", str(file)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert ran.stdout.strip() == said.strip(), ran.stderr


# The book itself

_LOOK = """async () => {
    const images = [...document.images];
    await Promise.allSettled(images.map(each => { each.loading = 'eager'; return each.decode(); }));
    const text = document.querySelector('article').cloneNode(true);
    text.querySelectorAll('pre, code, math').forEach(each => each.remove());
    const wide = [...document.querySelectorAll('article pre, article table, div.math')].filter(
        each => each.scrollWidth > each.clientWidth);
    const scrolls = 'pre, div.math, div.table-wrapper';
    const box = each => each.getBoundingClientRect();
    const link = document.querySelector('p.language a');
    return {
        width: document.documentElement.scrollWidth,
        broken: images.filter(each => !each.naturalWidth).map(each => each.src),
        unnamed: images.filter(each => !each.alt).map(each => each.src),
        formulas: document.querySelectorAll('article math').length,
        text: text.textContent,
        stuck: wide.filter(each => !['auto', 'scroll'].includes(getComputedStyle(each).overflowX)
            && each.tagName !== 'TABLE').length,
        beyond: [...document.querySelectorAll('article *')].filter(
            each => box(each).right > innerWidth + 1 && !each.parentElement.closest(scrolls)
        ).map(each => each.outerHTML.slice(0, 80)),
        other: link.href,
        seen: box(link).top >= 0 && box(link).bottom < 200 && box(link).height >= 24,
        next: document.querySelector('.next-page')?.href,
        previous: document.querySelector('.prev-page')?.href,
        background: getComputedStyle(document.body).backgroundColor,
    };
}"""


def named(address: str | None) -> str | None:
    """en/s01_weighted_sum of a file's address."""
    if address is None:
        return None
    path = Path(unquote(urlparse(address).path))
    return f"{path.parent.name}/{path.stem}" if path.exists() else f"no file: {path}"


def wrong_with(seen: dict[str, Any], language: str, page: str, width: int) -> Iterator[str]:
    """In words, what should not be so."""
    if seen["width"] > width:
        yield f"is {seen['width']} pixels wide"
    for what in ("broken", "unnamed", "stuck", "beyond"):
        if seen[what]:
            yield f"{what}: {seen[what]}"
    formulas = sum(each.formulas for each in blocks(source(language, page)))
    if seen["formulas"] != formulas:
        yield f"{seen['formulas']} formulas of {formulas}"
    for left in re.findall(r".*(?:\$|\\[A-Za-z]+|\]\(|\*\*|```).*", seen["text"]):
        yield f"is not HTML: {left}"
    (other,) = {*LANGUAGES} - {language}
    place = PAGES.index(page)
    following = f"{language}/{PAGES[place + 1]}" if page != PAGES[-1] else None
    previous = f"{language}/{PAGES[place - 1]}" if place else None
    for link, target in (
        ("other", f"{other}/{page}"),
        ("next", following),
        ("previous", previous),
    ):
        if named(seen[link]) != target:
            yield f"{link}: {named(seen[link])}, not {target}"
    if not seen["seen"]:
        yield "the link to the other language is not on the first screen"
    brightness = sum(int(part) for part in re.findall(r"\d+", seen["background"])[:3])
    if (brightness > 600) != (width > 600):
        yield f"is neither light nor dark: {seen['background']}"


def problems_of(folder: Path) -> list[str]:
    """Of every page, in the dark on a phone, and in the light on a wide screen."""
    problems = []
    with start_browser() as browser:
        inside = folder.as_uri()
        for width, scheme in ((375, "dark"), (1200, "light")):
            tab = Tab(browser, width, lambda url: url.startswith(inside), color_scheme=scheme)
            for language, page in product(LANGUAGES, PAGES):
                where = f"{language}/{page}.html"
                tab.page.goto((folder / where).as_uri())
                found = wrong_with(tab.page.evaluate(_LOOK), language, page, width)
                problems += [f"{where} at {width}: {each}" for each in (*found, *tab.wrong)]
                tab.wrong.clear()
            tab.page.goto((folder / "index.html").as_uri())
            tab.page.wait_for_url("**/en/index.html")
            tab.context.close()
    return problems


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_book_can_be_built_and_read(tmp_path: Path) -> None:
    """One test, since the tests of a file may run in several processes, and each would build."""
    pytest.importorskip("furo", reason="needs furo: the extra `book`")
    command = [sys.executable, str(BOOK / "build.py"), "--output", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.rstrip().endswith(f"open {tmp_path / 'index.html'}")
    problems = problems_of(tmp_path)
    assert not problems, "\n".join(problems)
