"""Laws of algorithms, for your own class and for those of the package: `workbench check file.py:Class`.

- `checks`: the list of laws, and a check of one algorithm against all of them.
- `declared`: what an algorithm declares is what it does: replicas, staleness, bytes, timing.
- `counts`: every gradient counts once. `identities`: limiting cases that are plain SGD.
- `means`: averages of parameters keep the mean. `convergence`: long runs with stragglers.
- `resume`: a stopped and resumed run is the unbroken one.
- `training`, `jitter`, `tiny`: trainings on simulated workers, with and without delays, of a small model. `serial`:
  the oracle, plain PyTorch. `sentences`: what a law says where it does not hold.

The tests in the folder tests/laws use these functions for all algorithms of the package, and have more laws.

May import `runtimes`, but no algorithm and no cluster. Begin with `checks`.
"""

from workbench.laws.checks import LAWS, Law, Verdict, check

__all__ = ["LAWS", "Law", "Verdict", "check"]
