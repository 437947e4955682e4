"""Draws the five figures of docs/concepts/how-it-works.md: `python docs/draw_concepts.py`, into docs/pictures.

They are drawings, not measurements: times are chosen to be easy to read. Timelines of runs are in draw_timelines.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

from workbench.plots.style import GREY, GRID, INK, KIND_COLORS, LIGHT_GREY, MUTED_INK, ink_on

PICTURES = Path(__file__).parent / "pictures"
WIDTH = 860  # as all figures (workbench/plots/pictures.py)
FONT, MONO = "Inter, Segoe UI, Helvetica, Arial, sans-serif", "DejaVu Sans Mono, Menlo, Consolas, monospace"
PANEL, ROW = "#F6F8FA", 28
FORWARD, BACKWARD, APPLY, WAIT, SUM = (
    KIND_COLORS[kind] for kind in ("forward", "backward", "apply", "wait", "all_reduce")
)
LEGEND = {"forward": FORWARD, "backward": BACKWARD, "apply": APPLY, "wait": WAIT, "all-reduce": SUM}
Bar = tuple[float, float, str, str]  # begin, end, colour, label


def drawing(title: str, height: int, parts: Iterable[str]) -> str:
    """Return an SVG with a white ground, on which it is read in a dark theme, too."""
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    letters = f'font-family="{FONT}" font-size="13" fill="{INK}"'
    box = 'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto-start-reverse"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {letters} role="img">',
        f"<title>{escape(title)}</title>",
        f'<defs><marker id="head" {box}><path d="M0,0.5L7.5,4L0,7.5Z" fill="{MUTED_INK}"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def text(x: float, y: float, words: str, *, anchor: str = "start", color: str = INK, **style: str | int) -> str:
    """Return a line of text with its baseline at y. `style`: more attributes, such as font_weight."""
    more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{color}"{more} xml:space="preserve">{escape(words)}</text>'


def code(x: float, y: float, words: str, color: str = INK) -> str:
    return text(x, y, words, color=color, font_family=MONO, font_size=12)


def note(x: float, y: float, words: str, anchor: str = "start") -> str:
    return text(x, y, words, anchor=anchor, color=MUTED_INK, font_size=12)


def panel(x: float, y: float, width: float, height: float, heading: str = "") -> str:
    """Return a box with a heading."""
    box = (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{PANEL}" stroke="{LIGHT_GREY}"/>'
    )
    return box + (text(x + 14, y + 24, heading, font_weight=600) if heading else "")


def arrow(x1: float, y1: float, x2: float, y2: float, *, both: bool = False) -> str:
    start = ' marker-start="url(#head)"' if both else ""
    return (
        f'<path d="M{x1:g},{y1:g}L{x2:g},{y2:g}" stroke="{MUTED_INK}" stroke-width="1.5" fill="none"'
        f'{start} marker-end="url(#head)"/>'
    )


def row(name: str, left: float, y: float, scale: float, bars: Iterable[Bar]) -> str:
    """Return a row of a timeline: its name, and bars with their labels. `scale`: pixels for a unit of time."""
    parts = [text(left - 12, y + 18, name, anchor="end")]
    for begin, end, color, label in bars:
        x, width = left + scale * begin, scale * (end - begin)
        parts.append(
            f'<rect x="{x:.5g}" y="{y:g}" width="{width:.5g}" height="{ROW - 4}" fill="{color}" stroke="white"/>'
            + text(round(x + width / 2, 1), y + 16, label, anchor="middle", color=ink_on(color), font_size=12)
        )
    return "".join(parts)


def legend(left: float, y: float, kinds: Iterable[str]) -> str:
    parts = []
    for kind in kinds:
        parts.append(f'<rect x="{left:g}" y="{y - 10:g}" width="11" height="11" fill="{LEGEND[kind]}"/>')
        parts.append(text(left + 18, y, kind, font_size=12))
        left += 36 + 7 * len(kind)
    return "".join(parts)


def bracket(x1: float, x2: float, y: float, words: str) -> str:
    """Return a double arrow with words below it."""
    return arrow(x1 + 1, y, x2 - 1, y, both=True) + note((x1 + x2) / 2, y + 18, words, anchor="middle")


def program() -> str:
    """The program of a rank yields requests; the runtime answers them, and runs background tasks on lanes."""
    lines = (
        "gradient = yield Backward(step)",
        "ticket = yield Start(AllReduce(gradient))",
        "...",
        "total = yield Wait(ticket)",
        "yield Apply(total)",
        "yield EndStep(step)",
    )
    left, scale = 584, 24
    main = [
        (0, 3.5, BACKWARD, "Backward 0"),
        (3.5, 7, BACKWARD, "Backward 1"),
        (7, 8.5, WAIT, "Wait"),
        (8.5, 10.5, APPLY, "Apply"),
    ]
    return drawing(
        "The program and the tasks of one rank",
        290,
        [
            panel(16, 16, 352, 216, "Program: a generator, the algorithm"),
            *(code(30, 74 + 26 * number, line) for number, line in enumerate(lines)),
            arrow(376, 96, 474, 96),
            note(425, 88, "request", anchor="middle"),
            arrow(474, 136, 376, 136),
            note(425, 128, "answer", anchor="middle"),
            panel(482, 16, 362, 216, "Runtime of this rank"),
            row("main task", left, 56, scale, main),
            row("lane 0", left, 56 + 44, scale, [(3.5, 8.5, SUM, "sum 0")]),
            row("lane 1", left, 56 + 88, scale, [(7, 10.5, SUM, "sum 1")]),
            note(498, 204, "Start puts a background task on a lane. Wait asks for it."),
            arrow(663, 238, 663, 264, both=True),
            note(663, 282, "messages to and from the other ranks", anchor="middle"),
        ],
    )


def synchronous_and_pipe() -> str:
    """Three steps of synchronous SGD and more steps of Pipe-SGD on one axis of time."""
    forward, backward, total, update = 2.0, 4.0, 5.5, 0.5
    left, scale, end = 96, 20.6, 36.0
    step = forward + backward + total + update
    compute: list[Bar] = []
    sums: list[Bar] = []
    for number in range(3):
        at = number * step
        compute += [
            (at, at + forward, FORWARD, f"{number}"),
            (at + forward, at + forward + backward, BACKWARD, f"{number}"),
            (at + forward + backward, at + step - update, WAIT, "wait"),
            (at + step - update, at + step, APPLY, ""),
        ]
        sums.append((at + forward + backward, at + step - update, SUM, f"sum {number}"))
    pipe: list[Bar] = []
    piped: list[Bar] = []
    at = 0.0
    for number in range(6):
        pipe += [
            (at, at + forward, FORWARD, f"{number}"),
            (at + forward, min(end, at + forward + backward), BACKWARD, f"{number}"),
        ]
        at += forward + backward
        if at < end:
            piped.append((at, min(end, at + total), SUM, f"sum {number}"))
        if number:  # the sum of the step before is complete
            pipe.append((at, at + update, APPLY, ""))
            at += update
    first = left + scale * (2 * (forward + backward) + update / 2)  # where sum 0 is applied
    return drawing(
        "Synchronous SGD and Pipe-SGD on one axis of time",
        288,
        [
            legend(left, 24, LEGEND),
            text(left, 58, "SynchronousSGD: 3 steps", font_weight=600),
            row("compute", left, 68, scale, compute),
            row("comm", left, 96, scale, sums),
            text(left, 158, "PipeSGD(width=2): more than 5 steps in the same time", font_weight=600),
            note(first + 10, 186, "here gradient 0 is applied, after that of step 1 was computed: it is one step late"),
            arrow(first, 174, first, 196),
            row("compute", left, 196, scale, [bar for bar in pipe if bar[0] < end and bar[1] <= end]),
            row("comm", left, 224, scale, piped),
            arrow(left, 264, left + scale * end, 264),
            note(left + scale * end, 281, "time", anchor="end"),
        ],
    )


def exposed_and_hidden() -> str:
    """A step of layer-wise SGD: communication that runs during compute, and communication that the rank waits for."""
    left, scale = 96, 52.0
    compute = [
        (0, 3, FORWARD, "forward"),
        (3, 9, BACKWARD, "backward"),
        (9, 13, WAIT, "wait"),
        (13, 14, APPLY, "apply"),
    ]
    sums = [(5, 7.5, SUM, "bucket 2"), (7.5, 10.5, SUM, "bucket 1"), (10.5, 13, SUM, "bucket 0")]
    edges = [left + scale * at for at in (5, 9, 13, 14)]
    return drawing(
        "Hidden and exposed communication in a step of layer-wise SGD",
        246,
        [
            text(left, 28, "One step of LayerwiseSGD", font_weight=600),
            row("compute", left, 44, scale, compute),
            row("comm", left, 72, scale, sums),
            *(f'<path d="M{x:g},40V150" stroke="{GREY}" stroke-dasharray="3 3"/>' for x in edges[:3]),
            bracket(edges[0], edges[1], 122, "hidden: during compute"),
            bracket(edges[1], edges[2], 122, "exposed: the rank waits"),
            bracket(left, edges[3], 178, "time of a step = compute + exposed communication"),
            note(
                left,
                228,
                "overlap = hidden / (hidden + exposed), here 50 %. Only exposed communication makes a step longer.",
            ),
        ],
    )


def ways_to_run() -> str:
    """One algorithm object, and five ways to run it."""
    ways = (
        ("in a notebook", "wb.Cluster(4).train(algorithm, problem)", "MPI or torch.distributed", "wall clock"),
        (
            "from a shell, on Slurm",
            "workbench train ..., workbench submit ...",
            "MPI or torch.distributed",
            "wall clock",
        ),
        ("in your own loop", "wb.Trainer(model, optimizer, algorithm)", "MPI or torch.distributed", "wall clock"),
        ("without a cluster", "wb.simulate(algorithm, problem, ...)", "one process, cost model", "virtual time"),
        ("in a test", "ReferenceRuntime(algorithm, 2, gradient)", "one process, your gradients", "no clock"),
    )
    height, top = 54, 44
    parts = [
        panel(16, 150, 168, 78),
        code(30, 182, "algorithm ="),
        code(30, 204, "wb.PipeSGD(width=2)"),
        note(250, 28, "call"),
        note(562, 28, "runtime"),
        note(752, 28, "time"),
    ]
    for number, (where, call, runtime, clock) in enumerate(ways):
        y = top + number * (height + 10)
        parts += [
            arrow(184, 189, 230, y + height / 2),
            panel(236, y, 608, height),
            text(250, y + 22, where, font_weight=600),
            code(250, y + 42, call),
            text(562, y + 32, runtime),
            text(752, y + 32, clock),
        ]
    return drawing("The ways to run one algorithm", top + 5 * (height + 10) + 6, parts)


def run_folder() -> str:
    """The files of a run, who writes them, and who reads them."""
    files = (
        ("run.json", "algorithm, settings, versions, status"),
        ("metrics-00000.jsonl", "loss, accuracy and time of each step; a file for each rank"),
        ("trace-00000.jsonl", "what the rank did, and when"),
        ("output-00000.log", "what the rank printed"),
        ("checkpoints/", "state to continue from"),
        ("model.safetensors", "the weights at the end"),
        ("control.jsonl", "commands: pause, stop, change a setting"),
    )
    top, gap = 72, 38
    last = top + gap * (len(files) - 1)
    parts = [
        panel(16, 16, 104, 316, "Ranks"),
        *(text(30, 72 + 40 * rank, f"rank {name}") for rank, name in enumerate(("0", "1", "..."))),
        panel(198, 16, 392, 316, "runs/20261127-140000-pipesgd-my-net/"),
        panel(668, 16, 176, 316, "You"),
        *(text(682, 72 + gap * place, words) for place, words in enumerate(READERS)),
        arrow(124, 160, 192, 160),
        note(158, 152, "write", anchor="middle"),
        arrow(594, 160, 662, 160),
        note(628, 152, "read", anchor="middle"),
        arrow(662, last - 4, 594, last - 4),
        note(628, last - 12, "command", anchor="middle"),
        arrow(192, last - 4, 124, last - 4),
        note(158, last - 12, "obey", anchor="middle"),
    ]
    for number, (name, about) in enumerate(files):
        parts += [code(212, top - 8 + gap * number, name), note(212, top + 8 + gap * number, about)]
    parts.append(f'<path d="M198,{last - 23}H590" stroke="{GRID}"/>')
    return drawing("What a run leaves", 348, parts)


READERS = ("live view, panel", "wb.compare(runs)", "run.timeline()", "workbench runs", "resume=run", "run.model()")
FIGURES = {
    "program": program,
    "synchronous-and-pipe": synchronous_and_pipe,
    "exposed-and-hidden": exposed_and_hidden,
    "ways-to-run": ways_to_run,
    "run-folder": run_folder,
}


def main() -> None:
    """Draw all figures."""
    for name, draw in FIGURES.items():
        path = PICTURES / f"{name}.svg"
        path.write_text(draw(), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
