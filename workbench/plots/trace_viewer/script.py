"""The viewer's script, as text."""

from __future__ import annotations

from pathlib import Path


def viewer_js() -> str:
    """Return the text of `viewer.js`, an ECMAScript module."""
    return Path(__file__).with_name("viewer.js").read_text(encoding="utf-8")
