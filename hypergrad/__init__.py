"""Exact hypergradients: train a JAX model, run the training backwards bit for bit, learn its hyperparameters."""

from hypergrad._train import Trained as Trained
from hypergrad._train import train as train
from hypergrad.adjoints import Checkpointed as Checkpointed
from hypergrad.adjoints import Reversible as Reversible
from hypergrad.adjoints import Unrolled as Unrolled
from hypergrad.batches import full_batch as full_batch
from hypergrad.batches import minibatches as minibatches
from hypergrad.batches import stacked as stacked
from hypergrad.errors import BufferFullError as BufferFullError
from hypergrad.errors import HypergradError as HypergradError
from hypergrad.errors import NonFiniteError as NonFiniteError
from hypergrad.errors import RangeError as RangeError
from hypergrad.errors import ReversalError as ReversalError
from hypergrad.hypers import bounded as bounded
from hypergrad.hypers import fixed as fixed
from hypergrad.hypers import natural as natural
from hypergrad.hypers import PerStep as PerStep
from hypergrad.hypers import positive as positive
from hypergrad.hypers import unit_interval as unit_interval
from hypergrad.optimizers import HeavyBall as HeavyBall
from hypergrad.optimizers import SGD as SGD
