"""Invalid input: strategies that make it, and the outcomes that are allowed."""

from __future__ import annotations

import atexit
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from workbench.errors import WorkbenchError

EXAMPLES = int(os.environ.get("WORKBENCH_FUZZ", "100"))  # bad inputs a test; `make fuzz` tries thousands
FEW = settings(max_examples=max(10, EXAMPLES // 10), suppress_health_check=list(HealthCheck))
SLOW = settings(max_examples=max(10, EXAMPLES // 4), suppress_health_check=list(HealthCheck))
OFTEN = settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
TRIED: Counter[str] = Counter()

MARKUP = "<script>document.title='harmed'</script>"
WORDS = [
    "",
    "a",
    "NaN",
    "1e999",
    "../../etc",
    "null\0",
    "\x1b[2J",
    MARKUP,
    "__import__('os').system('false')",
    "é\ud7ff",
    "x" * 300,
]
texts = st.one_of(st.sampled_from(WORDS), st.text(max_size=8))
numbers = st.one_of(
    st.integers(-3, 3),
    st.floats(),
    st.sampled_from([2**31, 2**63, -(2**64), 10**30, 10**400, -(10**400), 5e-324, 1.7e308, float("inf")]),
)
scalars = st.one_of(st.none(), st.booleans(), numbers, texts)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
)


def twisted(good: Any) -> st.SearchStrategy[Any]:
    """A good value in which some parts are replaced by something else, taken out, or doubled."""

    @st.composite
    def twist(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Any:
        value = json.loads(json.dumps(good))
        for _ in range(draw(st.integers(1, 3))):
            holder, key = draw(st.sampled_from(list(places(value))))
            how = draw(st.sampled_from(["other", "other", "away", "more"]))
            if how == "other" or (how == "more" and isinstance(holder, list)):
                holder[key] = draw(values)
            elif how == "away" and isinstance(holder, dict):
                del holder[key]
            elif isinstance(holder, dict):
                holder[draw(texts)] = draw(values)
            if not list(places(value)):
                break
        return value

    return twist()


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (holder, key) of every part of a tree of dictionaries and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items):
        yield value, key
        yield from places(item)


def damaged(text: bytes) -> st.SearchStrategy[bytes]:
    """The text cut off, with bytes of it changed, or with a part of it twice."""
    places = st.integers(0, len(text))
    cut = st.builds(lambda at: text[:at], places)
    changed = st.builds(
        lambda at, some: text[:at] + some + text[at + len(some) :], places, st.binary(min_size=1, max_size=4)
    )
    doubled = st.builds(lambda one, other: text[: max(one, other)] + text[min(one, other) :], places, places)
    return st.one_of(cut, changed, doubled, st.binary(max_size=40))


@contextmanager
def calm(what: str) -> Iterator[None]:
    """Either it works, or one of our errors says what is wrong, in a short message."""
    TRIED[what] += 1
    said = "nothing"
    try:
        yield
    except WorkbenchError as error:
        said = str(error)
    assert said and len(said) < 5000, f"an error of {len(said)} characters: {said[:500]}"


@atexit.register
def _count() -> None:
    """Count the inputs for WORKBENCH_FUZZ_COUNT."""
    if path := os.environ.get("WORKBENCH_FUZZ_COUNT"):
        Path(path).write_text(json.dumps(TRIED, indent=1, sort_keys=True) + "\n")
