"""Live views: figures in JupyterLab that grow while a run trains. A plain figure replaces them at its end.

- `curves`: `watch`, and the curves of a training run.
- `timeline`: the newest steps of a run.
- `moving_figure`: a figure that is redrawn, also if the browser misses drawings.
- `pace`: how often a run is polled and its figure redrawn.
- `header`: what each run does, as text that stays. `still`, `still_timeline`: curves and timelines as pictures that stay.
- `axes`: switches of the axes and the smoothing. `buttons`: pause, resume and stop.

May import the figures of `plots`, which do not import this folder. Begin with `curves`.
"""
