"""Optuna studies that use hypergradients: `import hypergrad as hg`, then `hg.studies`. Needs the extra "studies".

Invariant: all that a sampler decides is a function of the trials in the storage. A process that starts anew, or a second one
beside it, reads there what it needs.
"""

try:
    import optuna as _optuna  # noqa: F401
except ImportError as error:
    raise ImportError("hypergrad.studies needs optuna: pip install optuna") from error

from hypergrad.studies._gradients import report_gradient as report_gradient
from hypergrad.studies._record import RecordTrials as RecordTrials
from hypergrad.studies._record import prune_on_error as prune_on_error
from hypergrad.studies._sampler import HypergradientSampler as HypergradientSampler
from hypergrad.studies._trees import suggest_tree as suggest_tree
