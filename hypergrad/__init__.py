"""Exact hypergradients: train a JAX model, run the training backwards bit for bit, learn its hyperparameters."""

import importlib

from hypergrad import callbacks as callbacks
from hypergrad import curvature as curvature
from hypergrad import plots as plots
from hypergrad import testing as testing
from hypergrad._agreement import GradientCheck as GradientCheck
from hypergrad._agreement import Smoothness as Smoothness
from hypergrad._agreement import check_gradient as check_gradient
from hypergrad._agreement import check_smoothness as check_smoothness
from hypergrad._check import Certificate as Certificate
from hypergrad._check import check_reversal as check_reversal
from hypergrad._diagnose import Diagnosis as Diagnosis
from hypergrad._diagnose import diagnose as diagnose
from hypergrad._history import MetaStep as MetaStep
from hypergrad._meta_loop import Result as Result
from hypergrad._optimize import hypergradient as hypergradient
from hypergrad._optimize import optimize as optimize
from hypergrad._optimize import restarts as restarts
from hypergrad._plan import Plan as Plan
from hypergrad._plan import plan as plan
from hypergrad._programs import compiler_options as compiler_options
from hypergrad._record import Record as Record
from hypergrad._record import record as record
from hypergrad._to_optax import to_optax as to_optax
from hypergrad._train import Trained as Trained
from hypergrad._train import train as train
from hypergrad.adjoints import Auto as Auto
from hypergrad.adjoints import Checkpointed as Checkpointed
from hypergrad.adjoints import Disk as Disk
from hypergrad.adjoints import Reversible as Reversible
from hypergrad.adjoints import Truncated as Truncated
from hypergrad.adjoints import Unrolled as Unrolled
from hypergrad.batches import full_batch as full_batch
from hypergrad.batches import host_batches as host_batches
from hypergrad.batches import minibatches as minibatches
from hypergrad.batches import stacked as stacked
from hypergrad.dropout import concrete_dropout as concrete_dropout
from hypergrad.errors import BufferFullError as BufferFullError
from hypergrad.errors import HypergradError as HypergradError
from hypergrad.errors import NonFiniteError as NonFiniteError
from hypergrad.errors import RangeError as RangeError
from hypergrad.errors import ReversalError as ReversalError
from hypergrad.errors import StorageError as StorageError
from hypergrad.hypers import bounded as bounded
from hypergrad.hypers import fixed as fixed
from hypergrad.hypers import natural as natural
from hypergrad.hypers import positive as positive
from hypergrad.hypers import scatter as scatter
from hypergrad.hypers import unit_interval as unit_interval
from hypergrad.optimizers import ADOPT as ADOPT
from hypergrad.optimizers import KFAC as KFAC
from hypergrad.optimizers import KFLR as KFLR
from hypergrad.optimizers import KFRA as KFRA
from hypergrad.optimizers import LAMB as LAMB
from hypergrad.optimizers import LARS as LARS
from hypergrad.optimizers import SGD as SGD
from hypergrad.optimizers import SOAP as SOAP
from hypergrad.optimizers import Adagrad as Adagrad
from hypergrad.optimizers import Adam as Adam
from hypergrad.optimizers import AdamW as AdamW
from hypergrad.optimizers import AdEMAMix as AdEMAMix
from hypergrad.optimizers import DiagonalGGN as DiagonalGGN
from hypergrad.optimizers import DiagonalGGNMC as DiagonalGGNMC
from hypergrad.optimizers import HeavyBall as HeavyBall
from hypergrad.optimizers import Lion as Lion
from hypergrad.optimizers import Muon as Muon
from hypergrad.optimizers import NAdamW as NAdamW
from hypergrad.optimizers import Nesterov as Nesterov
from hypergrad.optimizers import NorMuon as NorMuon
from hypergrad.optimizers import RMSProp as RMSProp
from hypergrad.optimizers import ScheduleFreeAdamW as ScheduleFreeAdamW
from hypergrad.optimizers import Shampoo as Shampoo
from hypergrad.optimizers import Sophia as Sophia
from hypergrad.optimizers import SophiaG as SophiaG
from hypergrad.optimizers import Statistics as Statistics
from hypergrad.optimizers import add_decayed_weights as add_decayed_weights
from hypergrad.optimizers import clip as clip
from hypergrad.optimizers import clip_by_global_norm as clip_by_global_norm
from hypergrad.optimizers import freeze as freeze
from hypergrad.optimizers import muon_with_adamw as muon_with_adamw
from hypergrad.optimizers import norm_constraint as norm_constraint
from hypergrad.optimizers import partition as partition
from hypergrad.optimizers import with_gradient_link as with_gradient_link
from hypergrad.run.microbatches import Microbatches as Microbatches
from hypergrad.schedules import PerStep as PerStep
from hypergrad.schedules import knots as knots


_NOT_REVERSIBLE = {
    "NAdam": "hg.NAdamW",
    "Adadelta": "hg.RMSProp",
}


def __getattr__(name: str) -> object:
    if name == "studies":  # optuna takes its time to import, and not everybody has it
        return importlib.import_module("hypergrad.studies")
    if name in _NOT_REVERSIBLE:
        raise AttributeError(
            f"hg.{name} does not exist: the rule has no exact inverse. Its step adds to the parameters something made of "
            "the gradient at those very parameters, and undoing it would need that before they are recovered. Take "
            f"{_NOT_REVERSIBLE[name]}: there the parameters move by accumulated values alone."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
