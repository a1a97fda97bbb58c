"""Ways to the derivative of one and the same training run. Knows nothing of meta-optimization."""

from hypergrad.adjoints.auto import Auto as Auto
from hypergrad.adjoints.base import Adjoint as Adjoint
from hypergrad.adjoints.reversible import Reversible as Reversible
from hypergrad.adjoints.truncated import Truncated as Truncated
from hypergrad.adjoints.unrolled import Checkpointed as Checkpointed
from hypergrad.adjoints.unrolled import Unrolled as Unrolled
from hypergrad.run.disk import Disk as Disk
