"""Optimizers as chains of leaky links. Knows the exact layer, and which buffer a block takes; knows no loop."""

from hypergrad.optimizers.adam import Adam as Adam
from hypergrad.optimizers.adam import AdamW as AdamW
from hypergrad.optimizers.chain import Link as Link
from hypergrad.optimizers.chain import Optimizer as Optimizer
from hypergrad.optimizers.diagonal import DiagonalGGN as DiagonalGGN
from hypergrad.optimizers.diagonal import DiagonalGGNMC as DiagonalGGNMC
from hypergrad.optimizers.partition import Partition as Partition
from hypergrad.optimizers.partition import partition as partition
from hypergrad.optimizers.rms import Adagrad as Adagrad
from hypergrad.optimizers.rms import RMSProp as RMSProp
from hypergrad.optimizers.sgd import SGD as SGD
from hypergrad.optimizers.sgd import HeavyBall as HeavyBall
from hypergrad.optimizers.statistics import Statistics as Statistics
from hypergrad.optimizers.transform import Transformed as Transformed
from hypergrad.optimizers.transform import add_decayed_weights as add_decayed_weights
from hypergrad.optimizers.transform import clip as clip
from hypergrad.optimizers.transform import clip_by_global_norm as clip_by_global_norm
from hypergrad.optimizers.transform import freeze as freeze
