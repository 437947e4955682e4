"""The browser of the tests in this folder."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


def needs_browser() -> None:
    """Skip the test if there is no browser."""
    if BROWSER is None:
        pytest.skip("no Chrome or Chromium on the PATH (Debian: apt-get install chromium)")


def share_of_ground(canvas: Any) -> float:
    """How much of a timeline's canvas has the colour of its ground."""
    found: float = canvas.evaluate(
        """canvas => {
            const wanted = getComputedStyle(canvas.closest(".wb-Timeline")).getPropertyValue("--ground").trim();
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            const hex = at => "#" + [...data.slice(at, at + 3)].map(one => one.toString(16).padStart(2, "0")).join("");
            const whole = wanted.length === 4 ? wanted.replace(/[0-9a-f]/g, "$&$&") : wanted;
            let count = 0;
            for (let at = 0; at < data.length; at += 4) count += hex(at) === whole;
            return count / (canvas.width * canvas.height);
        }"""
    )
    return found
