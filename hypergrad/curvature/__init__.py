"""What a batch knows besides its mean gradient: gradients of examples, their moments, and curvature, of any loss.

This room knows losses and not optimizers.
"""

from hypergrad.curvature._kinds import Layer as Layer
from hypergrad.curvature._kinds import add_pattern as add_pattern
from hypergrad.curvature._kinds import register as register
from hypergrad.curvature._kronecker import Diagonal as Diagonal
from hypergrad.curvature._kronecker import Kronecker as Kronecker
from hypergrad.curvature._likelihoods import likelihood as likelihood
from hypergrad.curvature._listing import LayerUse as LayerUse
from hypergrad.curvature._listing import layers as layers
from hypergrad.curvature._operator import Operator as Operator
from hypergrad.curvature._quantities import quantities as quantities
