"""`input()` of ranks: one question of several ranks is asked once, whenever they ask it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("IPython", reason="needs the notebooks extra: pip install 'sgd-workbench[notebooks]'")

from workbench.kernel.outputs import HOLD_S
from workbench.kernel.questions import Questions


class User:
    """Answers each question with its number; questions of three ranks with their own clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked: list[str] = []
        self.error: Exception | None = None
        self.answers: dict[tuple[int, int], Any] = {}
        self.questions = Questions(3, self.ask, self.send, clock=lambda: self.now)

    def ask(self, prompt: str, secret: bool) -> str:
        self.asked.append(prompt + "(secret)" * secret)
        if self.error is not None:
            raise self.error
        return f"answer {len(self.asked)}"

    def send(self, rank: int, number: int, answer: dict[str, Any]) -> None:
        self.answers[rank, number] = answer.get("value", answer)

    def add(self, rank: int, number: int, prompt: str = "x? ", secret: bool = False) -> None:
        self.questions.add(rank, {"number": number, "prompt": prompt, "secret": secret})


def test_a_question_of_all_is_asked_once_and_at_once() -> None:
    user = User()
    for rank in range(3):
        user.add(rank, 7)
    user.questions.settle({0, 1, 2})
    assert user.asked == ["[0-2] x? "]
    assert user.answers == {(rank, 7): "answer 1" for rank in range(3)}


def test_a_question_of_some_waits_for_the_others_but_not_for_long() -> None:
    user = User()
    user.add(2, 0)
    user.questions.settle({0, 1, 2})
    assert user.asked == []
    user.now = HOLD_S
    user.questions.settle({0, 1, 2})
    assert user.asked == ["[2] x? "]


def test_ranks_that_have_returned_are_not_waited_for() -> None:
    user = User()
    user.add(1, 0)
    user.questions.settle({1})
    assert user.asked == ["[1] x? "]


def test_a_rank_that_asks_later_gets_the_answer_that_the_others_had() -> None:
    user = User()
    for number in (0, 1):  # twice the same prompt: two questions
        user.add(0, number)
        user.now += HOLD_S
        user.questions.settle({0, 1})
    for number in (4, 5):
        user.add(1, number)
    user.questions.settle({0, 1})
    assert user.asked == ["[0] x? ", "[0] x? "]
    assert user.answers == {(0, 0): "answer 1", (0, 1): "answer 2", (1, 4): "answer 1", (1, 5): "answer 2"}


def test_other_prompts_and_secrets_are_other_questions() -> None:
    user = User()
    user.add(0, 0, "rank 0? ")
    user.add(1, 0, "rank 1? ")
    user.add(2, 0, "rank 1? ", secret=True)
    user.now = HOLD_S
    user.questions.settle({0, 1, 2})
    assert user.asked == ["[0] rank 0? ", "[1] rank 1? ", "[2] rank 1? (secret)"]


def test_a_front_end_that_cannot_ask_is_an_error_on_the_ranks() -> None:
    user = User()
    user.error = RuntimeError("no input here.")
    user.add(0, 0)
    user.questions.settle({0})
    user.error = EOFError()
    user.add(0, 1, "end?")
    user.questions.settle({0})
    assert user.answers == {
        (0, 0): {"status": "error", "message": "no input here. It cannot ask for 'x? '."},
        (0, 1): {"status": "end"},
    }
