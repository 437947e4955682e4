"""The contract stays small: a closed list of requests, few members. A sum that names a collective becomes messages."""

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import fields

import pytest
import torch

import workbench
from workbench import codecs, ops
from workbench.collectives import Native, Once, PowerSGD, Ring
from workbench.errors import ConfigError
from workbench.ops import FREE, AllGather, AllReduce, Backward, Local, Program, ReduceScatter, Request, Send, Start
from workbench.program import Algorithm, Context, lower
from workbench.runtimes.execution import interpreter
from workbench.runtimes.simulator import simulation

CTX = Context(0, 2)


def first_of(*requests: Request) -> Request:
    """The first request of a lowered program that begins with these."""

    def program() -> Program:
        for request in requests:  # noqa: UP028 - a tuple takes no answers
            yield request

    return next(lower(CTX, program()))


def test_no_module_has_a_request_of_its_own() -> None:
    for module in pkgutil.walk_packages(workbench.__path__, "workbench."):
        if "runtimes" in module.name or "algorithms" in module.name or "collectives" in module.name:
            importlib.import_module(module.name)
    ours = {kind.__module__ for kind in Request.__subclasses__() if kind.__module__.startswith("workbench.")}
    assert ours == {ops.__name__}


def test_an_algorithm_has_few_members_and_its_context_few_fields() -> None:
    """decisions/0038: group a new one with others (`Requirements`, `Roles`) before you raise a number."""
    members = {name for name in [*vars(Algorithm), *Algorithm.__annotations__] if not name.startswith("_")}
    assert {"worker", "requires", "card"} <= members and len(members) <= 20, sorted(members)
    names = [field.name for field in fields(Context)]
    assert {"rank", "num_workers", "memory"} <= {*names} and len(names) <= 9, names


@pytest.mark.parametrize("handlers", [interpreter.HANDLERS, simulation.HANDLERS], ids=["real ranks", "simulator"])
def test_one_table_answers_every_request(handlers: Mapping[type, object]) -> None:
    everything = {kind for kind in vars(ops).values() if isinstance(kind, type) and issubclass(kind, Request)}
    assert set(handlers) == everything - {Request, ops.EndStep}


@pytest.mark.parametrize("kind", [AllReduce, ReduceScatter, AllGather])
def test_a_sum_becomes_what_takes_it(kind: type) -> None:
    value = torch.ones(4)
    lowered = first_of(kind(value, Native()))
    assert type(lowered) is kind and lowered.value is value and lowered.collective is None
    plain = kind(value)
    assert first_of(plain) is plain
    started = first_of(kind(value, Ring()))
    assert isinstance(started, Start) and not hasattr(started.work, "collective")


def test_what_is_started_is_lowered_too() -> None:
    def program() -> Program:
        yield AllReduce(torch.ones(4), Ring())

    begun = first_of(Start(program(), lane=FREE, priority=3))
    assert isinstance(begun, Start) and (begun.lane, begun.priority) == (FREE, 3)
    assert isinstance(next(begun.work), Start)  # type: ignore[call-overload]
    message = Start(Send(1, torch.ones(1)))
    assert first_of(message) is message
    backward = first_of(Backward(0, on_bucket=lambda bucket: AllReduce(torch.ones(4), Native())))
    assert isinstance(backward, Backward) and backward.on_bucket is not None
    work = backward.on_bucket(None)  # type: ignore[arg-type]
    assert isinstance(work, AllReduce) and work.collective is None


def test_a_sum_inside_a_sum_is_lowered_too() -> None:
    once = Once(codec=codecs.get("shared-int"), inner=Ring())
    program = lower(CTX, iter_of(AllReduce(torch.ones(4), once)))
    request, answer = next(program), None
    while isinstance(request, Local):
        answer = request.action()
        request = program.send(answer)
    assert isinstance(request, Start), "the ring's first receive"


def iter_of(request: Request) -> Program:
    yield request


def test_each_lane_of_a_collective_has_its_own_memory() -> None:
    ctx = Context(0, 1)
    for lane in (0, 1):
        program = lower(
            ctx, iter_of(AllReduce(torch.ones(3), Once(codec=codecs.ErrorFeedback(codec=codecs.get("top-k"))), lane))
        )
        next(program)
    assert {name.split("/")[0] for name in ctx.memory} == {"once.residual", "lane-1"}


def test_what_a_collective_refuses_is_refused_when_the_sum_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="needs the shapes"):
        first_of(AllReduce(torch.ones(3), PowerSGD()))
