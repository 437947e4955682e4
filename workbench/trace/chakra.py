"""Chakra execution traces, which ASTRA-sim and other simulators read: a graph of work and communication for each rank.

A record has times and no dependencies. They are derived, for each rank, from what the record shows:

- A lane is a program order: a node depends on the last ones of its lane that had ended when it began. Collectives of
  one lane run one after the other.
- Communication depends on what ended last before it, and that of a gradient on its backward pass. If it begins within
  a compute span, that span is cut in two nodes there.
- An `apply` depends on the collectives of its gradient: those of its step and bucket.
- Other computation depends on the communication that ended since its lane was free. If nothing ended in that time, but
  its program waited, or it is an `apply`, it depends on the last communication of each lane: that can be more than it
  needs.

Time on a lane that nothing explains is a node "unrecorded". So a replay with the recorded durations has the recorded
times. Every dependency ended before its dependent began, or delayed it, so the graph has no cycle.

What the record does not show is missing. When a sum of messages (`Ring`) had to wait for its lane, its dependency on a
backward pass is not seen. A graph from such a run is too fast on a much faster network. A server's updates keep the
order of the record.

ASTRA-sim 518bd51 has no barrier. At its end it stops with an error if a graph has work on the processor (`is_cpu_op`),
which is work on lanes of communication, and that of a server on a worker's rank.

Source: MLCommons Chakra, schema/protobuf/et_def.proto (github.com/mlcommons/chakra).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np

from workbench.errors import ConfigError
from workbench.trace.files.atomic import atomic_file
from workbench.trace.kinds import COMMUNICATION_KINDS, COMPUTE_KINDS, KINDS
from workbench.trace.links import COLLECTIVES, collective_numbers
from workbench.trace.spans import Spans

VERSION = "1.0.0"  # of the schema
UNRECORDED = "unrecorded"
COMPUTE, SEND, RECEIVE, COLLECTIVE = 4, 5, 6, 7  # NodeType
TYPES = {"all_reduce": 0, "all_gather": 2, "broadcast": 5, "reduce_scatter": 7, "barrier": 9}  # CollectiveCommType
PASSES = ("forward", "backward", "compute")
MAX_S = 1e12  # longest trace: microseconds are 64-bit integers
NEAR_SHARE = 0.01  # share of a step: on a lane, communication with a smaller gap continues what ended before it


def export_chakra(
    prefix: Path, spans: Spans, about: Mapping[str, str], *, bytes_are_buffers: bool = False
) -> list[Path]:
    """Write PREFIX.RANK.et for each rank. Returns the paths.

    Times are whole microseconds. `comm_size` of a collective is the size of the buffer for which a ring sends the
    recorded bytes. Each node has its recorded `bytes`, `step`, `bucket` and `lane` too. Encoding, decoding and sums
    are compute nodes. So is communication that only some of its ranks recorded. A message between two programs of one
    rank is no node, only a dependency.

    Args:
        prefix: folder and beginning of the files' names.
        spans: on one clock.
        about: describes the run, in each file's metadata.
        bytes_are_buffers: the recorded bytes of a collective are its buffer's, as in profiles, not those sent.

    Raises:
        ConfigError: there are no spans, their times are not those of a run, `prefix` has no file name, or protobuf is
            not installed.
        OSError: a file cannot be written.
    """
    if not len(spans):
        raise ConfigError("the run has no trace, so it has no graph: record one with trace_steps=None or a number")
    if not prefix.name:
        raise ConfigError(f"{prefix} has no file name: give the beginning of one, such as {prefix / 'graph'}")
    origin_s = float(spans.table["start_s"].min())
    lasted_s = float(max(spans.table["start_s"].max(), spans.table["end_s"].max())) - origin_s
    if not lasted_s < MAX_S:
        raise ConfigError(f"the trace lasts {lasted_s:g} s, more than any run: its file is damaged")
    schema = _schema()
    from google.protobuf.proto import serialize_length_prefixed

    links = _Links(spans, bytes_are_buffers)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    paths = []
    for rank in spans.ranks:
        path = prefix.with_name(f"{prefix.name}.{rank}.et")
        metadata = schema["GlobalMetadata"](version=VERSION)
        metadata.attr.extend(schema["AttributeProto"](name=name, string_val=text) for name, text in about.items())
        with atomic_file(path) as file:
            serialize_length_prefixed(metadata, file)
            for node in _Graph(spans, rank, links, origin_s).messages(schema):
                serialize_length_prefixed(node, file)
        paths.append(path)
    return paths


@final
class _Links:
    """What spans of different ranks have in common. Spans are places in the table of all ranks."""

    def __init__(self, spans: Spans, bytes_are_buffers: bool) -> None:
        table = spans.table
        ranks, sizes = table["rank"].tolist(), table["bytes"].tolist()
        self.message: dict[int, tuple[int, int, int, int]] = {}  # span -> sender, receiver, tag, bytes
        self.own: list[tuple[int, int]] = []  # send and receive of a message between two programs of one rank
        tags: dict[tuple[int, int], int] = defaultdict(int)
        for send, receive in zip(*(side.tolist() for side in spans.messages), strict=True):
            pair = ranks[send], ranks[receive]
            if pair[0] == pair[1]:
                self.own.append((send, receive))
                continue
            self.message[send] = self.message[receive] = (*pair, tags[pair], sizes[send])
            tags[pair] += 1
        self.collective: dict[int, int] = {}  # span -> bytes of the buffer
        numbers = collective_numbers(table)
        calls = np.flatnonzero(numbers >= 0)
        num_ranks = len(np.unique(table["rank"][calls]))
        of_number: dict[int, list[int]] = defaultdict(list)
        for call in calls.tolist():
            of_number[int(numbers[call])].append(call)
        for group in of_number.values():
            if len(group) == num_ranks:
                kind, most = KINDS[table["kind"][group[0]]], max(sizes[call] for call in group)
                size = most if bytes_are_buffers else _buffer_bytes(kind, most, num_ranks)
                self.collective.update(dict.fromkeys(group, size))

    def is_communication(self, span: int) -> bool:
        """Return whether a span is a node of communication."""
        return span in self.message or span in self.collective


def _buffer_bytes(kind: str, sent: int, num_ranks: int) -> int:
    """Return the bytes of the buffer for which each rank of a ring sends `sent` bytes.

    >>> _buffer_bytes("all_reduce", 600, 4), _buffer_bytes("reduce_scatter", 300, 4), _buffer_bytes("all_gather", 300, 4)
    (400, 400, 100)
    """
    others = max(num_ranks - 1, 1)
    share = {"all_reduce": num_ranks / 2 / others, "reduce_scatter": num_ranks / others, "all_gather": 1 / others}
    return min(math.ceil(sent * share.get(kind, 1) - 1e-9), 2**63 - 1)


@final
@dataclass(slots=True, eq=False)
class _Node:
    """A span, a part of one (of `span`, a place in the table), or unrecorded time before one (`span` is -1)."""

    span: int
    kind: str
    lane: int
    begin_s: float
    end_s: float
    after: list[_Node] = field(default_factory=list)
    number: int = -1


@final
class _Lane:
    """The nodes of one lane that have begun, in order, without those that a later one follows."""

    def __init__(self) -> None:
        self.begun: list[_Node] = []
        self.waited = False  # since the last node

    def ended(self, by_s: float) -> list[_Node]:
        """Return the nodes that have ended by a time, except those that ended before another of these began."""
        latest_s, last, running = -math.inf, list[_Node](), list[_Node]()
        for node in reversed(self.begun):
            if node.end_s > by_s:
                running.append(node)
            elif node.end_s > latest_s:
                last.append(node)
                latest_s = max(latest_s, node.begin_s)
        self.begun = sorted([*last, *running], key=self.begun.index)
        return last


@final
class _Graph:
    """The nodes of one rank."""

    def __init__(self, spans: Spans, rank: int, links: _Links, origin_s: float) -> None:
        self._links, self._origin_s, self._lane_names = links, origin_s, spans.lanes
        places = np.flatnonzero(spans.table["rank"] == rank)
        self._table = spans.table[places]
        self._first = int(places[0])  # a rank's spans are one slice of the table
        names = [KINDS[kind] for kind in self._table["kind"].tolist()]
        columns = (self._table[name].tolist() for name in ("lane", "start_s", "end_s"))
        found = [
            _Node(self._first + at, kind, lane, begin_s, max(begin_s, end_s))
            for at, (kind, lane, begin_s, end_s) in enumerate(zip(names, *columns, strict=True))
        ]
        computing = [{node.lane for node in found if node.kind in kinds} for kinds in (PASSES, COMPUTE_KINDS)]
        self._main = computing[0] or computing[1]  # the others are lanes of communication, and of a server
        self._set_near(found)
        self.nodes = self._ordered(found)

    def _set_near(self, found: Sequence[_Node]) -> None:
        """Note when background work ended, and how small a gap is within it."""
        self._ends = sorted(node.end_s for node in found if node.lane not in self._main)
        num_steps = max(len(np.unique(self._table["step"])), 1)
        self._near_s = NEAR_SHARE * (float(self._table["end_s"].max()) - found[0].begin_s) / num_steps

    def _begins_work(self, node: _Node) -> bool:
        """Return whether the rank's program began this communication; otherwise it continues what ended before it."""
        if node.kind in COLLECTIVES:
            return True
        place = bisect_right(self._ends, node.begin_s) - (node.end_s <= node.begin_s)
        return place <= 0 or node.begin_s - self._ends[place - 1] > self._near_s

    def _ordered(self, found: Sequence[_Node]) -> list[_Node]:
        """Cut compute spans where communication begins within them, and let every node depend on earlier ones."""
        begins = sorted(
            node.begin_s
            for node in found
            if node.lane not in self._main
            and node.kind in (*COMMUNICATION_KINDS, "barrier")
            and self._begins_work(node)
        )
        pieces = [piece for node in found for piece in self._pieces(node, begins)]
        pieces.sort(key=lambda node: (node.begin_s, node.end_s))  # stable: of equal times, in the order of the record
        self._lanes: dict[int, _Lane] = defaultdict(_Lane)
        self._collectives: dict[int, list[_Node]] = defaultdict(list)  # by step of the gradient
        self._backward: dict[int, list[_Node]] = defaultdict(list)
        nodes = []
        for node in pieces:
            lane = self._lanes[node.lane]
            if node.kind == "wait":
                lane.waited = True
                continue
            own = lane.ended(node.begin_s)
            node.after = own + (self._awaited if node.lane in self._main else self._causes)(node, own)
            lane.begun.append(node)
            lane.waited = False
            if node.kind in COLLECTIVES:
                self._collectives[self._of(node, "step")].append(node)
            if node.kind == "backward":
                self._backward[self._of(node, "step")].append(node)
            nodes.append(node)
        return [one for node in self._without_instants(nodes) for one in self._with_gap(node)]

    def _pieces(self, node: _Node, begins: list[float]) -> Iterator[_Node]:
        cuts = []
        if node.lane in self._main and node.kind in COMPUTE_KINDS:
            place = bisect_right(begins, node.begin_s)
            while place < len(begins) and begins[place] < node.end_s:
                cuts.append(begins[place])
                place += 1
        bounds = list(dict.fromkeys([node.begin_s, *cuts])), list(dict.fromkeys([*cuts, node.end_s]))
        for begin_s, end_s in zip(*bounds, strict=True):
            yield _Node(node.span, node.kind, node.lane, begin_s, end_s)

    def _of(self, node: _Node, column: str) -> int:
        return int(self._table[column][node.span - self._first])

    def _others(self, node: _Node) -> list[_Node]:
        """Return what ended last, by the node's begin, on each other lane."""
        lanes = [lane for number, lane in self._lanes.items() if number != node.lane]
        return [other for lane in lanes for other in lane.ended(node.begin_s)]

    def _awaited(self, node: _Node, own: list[_Node]) -> list[_Node]:
        """Return the communication on which a computation depends."""
        if node.kind == "apply":
            step, bucket = self._of(node, "step"), self._of(node, "bucket")
            summed = [
                call
                for call in self._collectives.get(step, ())
                if call.end_s <= node.begin_s and (bucket < 0 or self._of(call, "bucket") in (-1, bucket))
            ]
            if summed:
                return summed
        free_s = max((before.end_s for before in own), default=-math.inf)
        ended = self._others(node)
        needs_any = node.kind == "apply" or self._lanes[node.lane].waited
        return [other for other in ended if other.end_s > free_s] or (ended if needs_any else [])

    def _causes(self, node: _Node, own: list[_Node]) -> list[_Node]:
        """Return what started a communication (or a server's update), apart from its lane's order."""
        ended = self._others(node)
        latest_s = max((other.end_s for other in [*own, *ended]), default=-math.inf)
        found = [other for other in ended if other.end_s == latest_s]
        is_gradient = node.kind in COLLECTIVES or (node.kind == "send" and self._of(node, "bucket") >= 0)
        if is_gradient:  # then its step is the gradient's
            passes = self._backward[self._of(node, "step")]
            found += [other for other in passes if other.end_s <= node.begin_s][-1:]
        if node.kind in COLLECTIVES:
            queue = [
                other
                for other in self._lanes[node.lane].begun
                if other.kind in COLLECTIVES and node.begin_s < other.end_s <= node.end_s
            ]
            found += queue[-1:]
        return found

    def _without_instants(self, nodes: Sequence[_Node]) -> list[_Node]:
        """Return the nodes without those that take no time themselves: what follows one depends on what led to it.

        These are messages between programs of the rank, whose receive depends on what the send depends on, and work
        of less than a microsecond on lanes of communication. All dependencies of a node come before it in the result.
        """
        of_span = {node.span: node for node in nodes}
        instants = {of_span[span] for pair in self._links.own for span in pair if span in of_span}
        instants |= {
            node
            for node in nodes
            if node.lane not in self._main
            and not self._links.is_communication(node.span)
            and self._micros(node.end_s) == self._micros(node.begin_s)
        }
        before = {node: list(node.after) for node in instants}
        for send, receive in self._links.own:
            if send in of_span and receive in of_span:
                before[of_span[receive]] += of_span[send].after
        place = {node: number for number, node in enumerate(nodes)}
        known: dict[_Node, list[_Node]] = {}  # in place of a node that is left out

        def kept_before(node: _Node) -> list[_Node]:
            """Return the remaining nodes on which a node depends."""
            found = list[_Node]()
            for other in before.get(node, node.after):
                if other in instants and other not in known:
                    known[other] = []  # if instants of one time depend on each other
                    known[other] = kept_before(other)
                found += known.get(other, [other])
            implied = {third for other in found if place[other] < place[node] for third in other.after}
            return [other for other in dict.fromkeys(found) if other not in implied]

        for node in nodes:
            if node not in instants:
                node.after = [other for other in kept_before(node) if place[other] < place[node]]
        return [node for node in nodes if node not in instants]

    def _with_gap(self, node: _Node) -> Iterator[_Node]:
        """Yield the node after unrecorded time, if there is any between its dependencies and its begin."""
        ready_s = max((other.end_s for other in node.after), default=self._origin_s)
        if self._micros(node.begin_s) > self._micros(ready_s):
            gap = _Node(-1, UNRECORDED, node.lane, ready_s, node.begin_s, node.after)
            node.after = [gap]
            yield gap
        node.begin_s = max(node.begin_s, ready_s)
        yield node

    def _micros(self, time_s: float) -> int:
        return round((time_s - self._origin_s) * 1e6)

    def messages(self, schema: Mapping[str, Any]) -> Iterator[Any]:
        """Yield the nodes in the schema's form, in order of time."""
        for number, node in enumerate(self.nodes):
            node.number = number
        for node in self.nodes:
            begin, end = self._micros(node.begin_s), self._micros(node.end_s)
            kind, values = self._attributes(node)
            message = schema["Node"](
                id=node.number,
                name=node.kind,
                type=kind,
                data_deps=sorted(other.number for other in node.after),
                start_time_micros=begin,
                duration_micros=max(end - begin, 0),
            )
            message.attr.extend(schema["AttributeProto"](name=name, **value) for name, value in values)
            yield message

    def _attributes(self, node: _Node) -> tuple[int, Iterable[tuple[str, dict[str, Any]]]]:
        """Return the type of a node, and its attributes as (name, {field of the schema: value})."""
        kind, values = COMPUTE, list[tuple[str, dict[str, Any]]]()
        if node.span in self._links.message:
            source, to, tag, size = self._links.message[node.span]
            kind = SEND if node.kind == "send" else RECEIVE
            values += [("comm_src", {"int32_val": source}), ("comm_dst", {"int32_val": to})]
            values += [("comm_tag", {"int32_val": tag}), ("comm_size", {"int64_val": size})]
        elif node.span in self._links.collective:
            kind, size = COLLECTIVE, self._links.collective[node.span]
            values += [("comm_type", {"int64_val": TYPES[node.kind]}), ("comm_size", {"int64_val": size})]
        on_cpu = kind == COMPUTE and node.lane not in self._main
        values += [("is_cpu_op", {"bool_val": on_cpu}), ("lane", {"string_val": self._lane_names[node.lane]})]
        if node.span >= 0:
            values += [
                (name, {"int64_val": value})
                for name in ("step", "bucket", "bytes")
                if (value := self._of(node, name)) >= 0
            ]
        return kind, values


# -- the schema ------------------------------------------------------------------------------------------------

_FIELDS: dict[str, dict[str, tuple[int, str]]] = {  # message -> field -> number and type, of the fields used here
    "AttributeProto": {
        "name": (1, "string"),
        "int32_val": (7, "int32"),
        "int64_val": (9, "int64"),
        "bool_val": (27, "bool"),
        "string_val": (29, "string"),
    },
    "GlobalMetadata": {"version": (1, "string"), "attr": (2, "AttributeProto")},
    "Node": {
        "id": (1, "uint64"),
        "name": (2, "string"),
        "type": (3, "int32"),  # NodeType: an enumeration has the form of an int32
        "data_deps": (5, "uint64"),
        "start_time_micros": (6, "uint64"),
        "duration_micros": (7, "uint64"),
        "attr": (10, "AttributeProto"),
    },
}
_REPEATED = ("attr", "data_deps")


def _schema() -> dict[str, Any]:
    """Return the classes of the messages of et_def.proto, from a separate pool.

    Raises:
        ConfigError: protobuf is not installed.
    """
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
        from google.protobuf.proto import serialize_length_prefixed  # noqa: F401 - versions before 5.28 lack it
    except ImportError as error:
        raise ConfigError(f"Chakra traces need protobuf ({error}): pip install 'sgd-workbench[chakra]'") from error
    form = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package="ChakraProtoMsg", syntax="proto3")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        if name == "AttributeProto":
            message.oneof_decl.add(name="value")  # so that a value of 0 is written too
        for title, (number, kind) in fields.items():
            label = form.LABEL_REPEATED if title in _REPEATED else form.LABEL_OPTIONAL
            one = message.field.add(name=title, number=number, label=label)
            if kind in _FIELDS:
                one.type, one.type_name = form.TYPE_MESSAGE, f".ChakraProtoMsg.{kind}"
            else:
                one.type = form.Type.Value(f"TYPE_{kind.upper()}")
            if title.endswith("_val"):
                one.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = pool.FindFileByName(file.name)
    return {name: message_factory.GetMessageClass(found.message_types_by_name[name]) for name in _FIELDS}
