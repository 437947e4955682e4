"""The interactive timeline: ranks that fold, zoom by keys, messages of a span, two runs on one axis.

- `page`: `TraceViewer`, in a notebook or as an HTML page.
- `payload`: what the browser gets of a run.
- `difference`: what two runs differ in, step by step.
- `newest`: the newest steps of a run that trains.
- `widget`: a viewer that is redrawn meanwhile.
- `script`: the text of viewer.js, which is all that the browser does. Pages, notebooks and the panel of JupyterLab
  share it.

May import `plots/gantt` and `plots/style`. Begin with `page`.
"""
