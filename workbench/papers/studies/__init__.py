"""What the notebooks of papers compute: trainings repeated over seeds, networks by shape, models of time, rules.

Each module is one kind of experiment: `trials` on real ranks with slept compute, `stragglers` and `backup_rule` with
drawn delays, `shapes` and `timing_model` without data, `quadratic` and `regret` where a theory is exact. The notebooks
choose the cases, report findings and draw. May import the rest of `papers` and below. Begin with `trials`.
"""
