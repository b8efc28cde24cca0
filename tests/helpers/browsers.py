"""A real browser for tests of pages, and what goes wrong in them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def start_browser() -> Iterator[Any]:
    """Skips the test where there is no playwright, or no browser."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.skip(f"needs a browser, of {', '.join(_NAMES)}: `apt-get install chromium`")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


class Tab:
    """One page, and what went wrong in it: messages, errors, dialogs, forbidden requests."""

    def __init__(
        self, browser: Any, width: int, allowed: Callable[[str], bool], **options: Any
    ) -> None:
        view = {"width": width, "height": 900}
        self.context = browser.new_context(viewport=view, **options)
        self.page = self.context.new_page()
        self.wrong: list[str] = []
        self.page.on("console", lambda message: self.wrong.append(message.text))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("dialog", lambda dialog: self.wrong.append(dialog.message))
        self.page.on("request", lambda each: allowed(each.url) or self.wrong.append(each.url))
