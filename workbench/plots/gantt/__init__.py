"""The timeline of a run as a Gantt chart: what every rank did when.

- `figures`: `timeline` and `timelines`, the figures.
- `layout`: which spans are shown, in which rows.
- `merged_bars`: joins bars if there are too many.
- `marks`: arrows of messages, and the critical path.

May import `plots/style` and nothing else of `plots`. Begin with `figures`.
"""
