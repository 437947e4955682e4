"""The browser of the tests in this folder."""

from __future__ import annotations

import shutil

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


def needs_browser() -> None:
    """Skip the test if there is no browser."""
    if BROWSER is None:
        pytest.skip("no Chrome or Chromium on the PATH (Debian: apt-get install chromium)")
