"""Optimizers as chains of leaky links. Knows the exact layer; knows no buffer and no loop."""

from hypergrad.optimizers.chain import Link as Link
from hypergrad.optimizers.chain import Optimizer as Optimizer
from hypergrad.optimizers.sgd import SGD as SGD
from hypergrad.optimizers.sgd import HeavyBall as HeavyBall
