"""What the notebooks of papers compute: repeated trainings, networks by their shapes, timing models, decision rules.

Each module is one kind of experiment: `trials` on real ranks with slept compute, `stragglers` and `backup_rule` with
drawn delays, `shapes` and `timing_model` without data, `quadratic` and `regret` where a theory is exact. The notebooks
choose the cases, report findings and draw. May import the rest of `papers` and below. Begin with `trials`.
"""
