"""Questions of ranks to the user: `input()` and `getpass()` in a cell."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

from workbench.kernel.outputs import HOLD_S, label


@final
@dataclass(slots=True)
class Question:
    """A question, which one or more ranks ask.

    Attributes:
        prompt, secret: as the ranks gave them.
        asked_s: when the first rank asked, by the caller's clock.
        waiting: rank -> its number of this question; ranks that have no answer yet.
        answer: what every rank receives that asks this question; None before the user has answered.
    """

    prompt: str
    secret: bool
    asked_s: float
    waiting: dict[int, int] = field(default_factory=dict)
    answer: dict[str, Any] | None = None


@final
class Questions:
    """The questions of one cell. The user answers each once, and the answer goes to every rank that asks the same.

    Two questions are the same if they have the same prompt and are, on each rank, the n-th with this prompt in the
    cell. A rank that asks later receives the earlier answer, so the result does not depend on time.

    Args:
        num_ranks: number of all ranks.
        ask: asks the user (prompt, whether the answer is secret), and returns the answer.
        send: gives an answer to a rank (rank, its number of the question, answer).
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        num_ranks: int,
        ask: Callable[[str, bool], str],
        send: Callable[[int, int, dict[str, Any]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_ranks, self._ask, self._send, self._clock = num_ranks, ask, send, clock
        self._asked: dict[tuple[str, bool, int], Question] = {}
        self._times: Counter[tuple[int, str, bool]] = Counter()

    def add(self, rank: int, content: dict[str, Any]) -> None:
        """Add a question of a rank: its number, prompt, and whether the answer is secret."""
        prompt, secret = content["prompt"], content["secret"]
        self._times[rank, prompt, secret] += 1
        key = (prompt, secret, self._times[rank, prompt, secret])
        question = self._asked.setdefault(key, Question(prompt, secret, self._clock()))
        question.waiting[rank] = content["number"]

    def settle(self, running: set[int]) -> None:
        """Ask the user what is due, and give the ranks their answers.

        A question waits HOLD_S for other ranks, so that its prompt names all that ask it.

        Args:
            running: the ranks that still run the cell.

        Raises:
            KeyboardInterrupt: the user interrupted.
        """
        for question in list(self._asked.values()):
            if not question.waiting:
                continue
            if question.answer is None:
                complete = running <= set(question.waiting)
                if not complete and self._clock() - question.asked_s < HOLD_S:
                    continue
                question.answer = self._answered(question)
            for rank, number in question.waiting.items():
                self._send(rank, number, question.answer)
            question.waiting.clear()

    def _answered(self, question: Question) -> dict[str, Any]:
        prompt = label(sorted(question.waiting), self._num_ranks) + question.prompt
        try:
            return {"status": "ok", "value": self._ask(prompt, question.secret)}
        except EOFError:
            return {"status": "end"}
        except Exception as error:  # noqa: BLE001 - the front end cannot ask; the ranks raise it
            return {"status": "error", "message": f"{error} It cannot ask for {question.prompt!r}."}
