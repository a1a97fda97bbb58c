"""What can go wrong while training, as a value (`Status`), as an exception, and as one sentence used by both.

Invariant: a run whose status is not OK returns NaN in every float it returns, whether or not it raises.
"""

import math

import equinox as eqx
import jax
import numpy as np
from jax import Array


class HypergradError(Exception):
    """Base of the errors that a training run can end in; `.status` holds the numbers of the sentence."""

    status: "Status | None" = None


class ReversalError(HypergradError):
    """The reversed run did not end on the bits it started from: the derivative would belong to another trajectory."""


class RangeError(HypergradError, ValueError):
    """A parameter or accumulator left the range of its grid, or a decay its interval."""


class BufferFullError(HypergradError):
    """More digits were lost than the information buffer has words for; `.status.words` says how many it needs."""


class NonFiniteError(HypergradError, FloatingPointError):
    """A loss, gradient, update or hypergradient is NaN or infinite."""


class StorageError(HypergradError, OSError):
    """The files of a run's lost digits, or of a record, cannot be written, or are not what was written."""


for _class in (HypergradError, ReversalError, RangeError, BufferFullError, NonFiniteError, StorageError):
    _class.__module__ = "hypergrad"
    _class.__name__ = f"hypergrad.{_class.__name__}"  # XLA reports only this of an error raised in compiled code

ISOLATED = (
    "XLA rounds a gradient of this loss otherwise beside its derivative than by itself. The run was reversed with the two "
    "compiled apart, which is exact, and takes one more gradient a step, a twentieth to a third more time. "
    "adjoint=hg.Reversible(isolate=True) has it so from the start and without this warning."
)

LOSSES, BATCHES = -1, -2  # in the place of a place
OK, DECAY, NON_FINITE, RANGE, BUFFER_FULL, REVERSAL = range(6)
_CLASSES: dict[int, type[HypergradError]] = {
    DECAY: RangeError,
    NON_FINITE: NonFiniteError,
    RANGE: RangeError,
    BUFFER_FULL: BufferFullError,
    REVERSAL: ReversalError,
}


class Status(eqx.Module):
    """How a run went, as numbers that live in compiled code. Scalars, or batched under `jax.vmap`.

    code: int32, 0 = fine; step, place: int32, where first (-1: does not apply); magnitude: float32, the value found;
    words: int32, 32-bit buffer words a parameter needs; bits, ideal_bits: float32, per parameter and step, stored
    and log2(1/rho); names: what `place` indexes; approximate: what the derivative leaves out by choice, a phrase each;
    microbatches: how many gradients were added on a grid, if any.
    """

    code: Array
    step: Array
    place: Array
    magnitude: Array
    words: Array
    bits: Array
    ideal_bits: Array
    names: tuple[str, ...] = eqx.field(static=True)
    limits: tuple[float, ...] = eqx.field(static=True)
    isolated: Array | bool = False  # whether the way back had to compute gradients apart, though nobody asked for it
    small: Array | int = -1  # the place whose updates are so small that rounding to the grid shows; -1: none
    quanta: Array | float = 0.0  # how many of the grid's quanta they are
    faint: Array | float = 0.0  # the largest derivative in float16 results, where it has lost digits; 0: it has not
    approximate: tuple[str, ...] = eqx.field(static=True, default=())
    microbatches: int = eqx.field(static=True, default=0)

    @property
    def ok(self) -> Array:
        return self.code == OK

    def sentence(self) -> str:
        """What happened, where, and what to do next; "" if nothing did."""
        code, step, place, words = (int(x) for x in (self.code, self.step, self.place, self.words))
        value = float(self.magnitude)
        where = self.names[place] if 0 <= place < len(self.names) else "the loss"
        at = f" at step {step}" if step >= 0 else " before the first step"
        match code:
            case 0:
                return ""
            case 1:
                return decay_sentence(where, value, step, self.limits[place])
            case 2:
                return _non_finite(where, step, self.microbatches)
            case 3:
                return (
                    f"{where} left the range of its fixed-point grid{at}: magnitude {value:.4g}, range "
                    f"+-{self.limits[place]:.4g}. "
                    "Lower the learning rate or the init scale, or take fewer fraction bits: "
                    "hg.Reversible(fraction_bits=...) doubles the range with each bit less."
                )
            case 4:
                return (
                    f"the information buffer needs {words} 32-bit words per parameter and has fewer. "
                    f"Pass capacity={words} to the adjoint, beside what else it is given: hg.Reversible(capacity={words})."
                )
            case _:
                return _not_reversed(place, where)

    def notes(self) -> tuple[str, ...]:
        """What should be known of a run that went well: a sentence each."""
        found = []
        if bool(self.isolated):
            found.append(ISOLATED)
        if int(self.small) >= 0:
            shift = math.ceil(math.log2(2**16 / max(float(self.quanta), 2.0**-100)))
            found.append(
                f"{self.names[int(self.small)]} is too small for its fixed-point grid: it holds, or changes by, no more "
                f"than {float(self.quanta):.2g} quanta, so that what is trained is a rounded version of this run. Count in "
                f"other units: the loss times 2^{shift} (with the learning rate of SGD divided by it), or parameters that "
                f"small times 2^{shift}. A finer grid, hg.Reversible(fraction_bits=...), goes up to 60 bits."
            )
        if float(self.faint) > 0:
            shift = math.ceil(-math.log2(float(self.faint)))
            found.append(
                f"the derivative of the value in the trained parameters is at most {float(self.faint):.2g}. They are "
                "float16, which has few digits for numbers below 6e-5 and none below 6e-8, and JAX has rounded it before "
                f"hypergrad sees it. Count the value in larger units: differentiate it times 2^{shift}, and divide the "
                "result; or make the parameters float32, and cast them in the loss."
            )
        return tuple(found)

    def error(self) -> HypergradError:
        error = _CLASSES[int(self.code)](self.sentence())
        error.status = self
        return error

    def worst(self) -> "Status":
        """One element of a batched status: the first that failed, or else the one that needs most words."""
        elements = self.elements()
        failed = [x for x in elements if x.code != OK]
        return failed[0] if failed else max(elements, key=lambda x: int(x.words))

    def elements(self) -> list["Status"]:
        """Those of a batched status."""
        leaves = np.broadcast_arrays(*(np.asarray(x) for x in jax.tree.leaves(self)))
        rows = zip(*(x.reshape(-1) for x in leaves), strict=True)
        return [jax.tree.unflatten(jax.tree.structure(self), row) for row in rows]

    def __repr__(self) -> str:
        if any(isinstance(x, jax.core.Tracer) or np.ndim(x) for x in jax.tree.leaves(self)):
            return f"Status(code={self.code}, step={self.step})"
        left_out = f"derivative approximate: {'; '.join(self.approximate)}, " if self.approximate else ""
        return f"Status({self.sentence() or 'ok'!r}, {left_out}words={int(self.words)}, bits={float(self.bits):.4g})"


def _non_finite(where: str, step: int, microbatches: int) -> str:
    if step < 0:
        return f"{where} is NaN or infinite before the first step. Look at how it is initialized."
    added = (
        f" As microbatches={microbatches} are added on a grid, what is above {2**22:,} in the gradient or the statistics of "
        "one counts as infinite, too."
    )
    first = "Nothing was trained before it: look for NaN in the batch and in the hyperparameters, and "
    later = (
        "Training diverged, or a hyperparameter, a batch or the loss is not finite: lower the learning rate, clip the "
        "gradient, or "
    )
    return (
        f"{where} became NaN or infinite at step {step}. {later if step else first}check the loss for log(0), sqrt(0) and "
        f"0/0.{added if microbatches else ''}"
    )


def _not_reversed(place: int, where: str) -> str:
    otherwise = "so its derivative would not be that of this training run"
    if place == BATCHES:
        return (
            f"the reversed run saw other batches than the training, {otherwise}. Make `batches` a pure function of t, with "
            "randomness from jax.random.fold_in(key, t), or in Python np.random.default_rng((seed, t)). "
            "hg.check_reversal(...) names the step."
        )
    back = "see the losses of the training again" if place == LOSSES else f"return to the initial bits of {where}"
    return (
        f"the reversed run did not {back}, {otherwise}. Unless isolate=False was passed, it was tried with gradients "
        "compiled apart from their derivatives too. So something else differed between the passes: a sum that this device "
        "adds up in no fixed order (on a GPU, in a jax.jit of your own: give it compiler_options=hg.compiler_options()), an "
        "increment of an optimizer of your own (hg.testing.check_optimizer), or a loss that calls Python and gets another "
        "answer. If it is none of these, it is a defect of hypergrad: please report it. hg.check_reversal(...) names the "
        "step, the place and the cause; hg.Checkpointed() and hg.Unrolled() reverse nothing."
    )


def decay_sentence(name: str, value: float, step: int = -1, highest: float = 1 - 2.0**-16) -> str:
    """The sentence for a decay that no n/d stands for: outside (0, 1), or inside but rounding to 0 or 1.

    highest: the largest that can be; 1 - 1/d, or 1 where it makes sense that nothing decays.
    """
    at = f" at step {step}" if step >= 0 else ""
    lowest, interval = max(1 - highest, 2.0**-16), "(0, 1]" if highest == 1 else "(0, 1)"
    if np.isnan(value):
        why, nearest = "It is NaN.", highest
    elif 0 < value < lowest and 1 - highest < lowest:
        why, nearest = f"One step would lose more digits than it can keep: below 1/{round(1 / lowest)}.", lowest
    elif 0 < value < lowest:
        why, nearest = f"It rounds to 0 on the grid of 1/{round(1 / lowest)}: nothing would be kept.", lowest
    elif 0 < value < 1:
        why, nearest = f"It rounds to 1 on the grid of 1/{round(1 / (1 - highest))}: nothing would decay.", highest
    elif value <= 0 and highest == 1:
        why, nearest = (
            "With 0 a step forgets where it was and has no inverse; a negative one turns all around.",
            lowest,
        )
    elif value <= 0:
        why = (
            "With 0 a step forgets its past and has no inverse (SGD, RMSProp and Adagrad without momentum would add a "
            "gradient taken at the very parameters that undoing the step must find), and a negative decay is not a decay."
        )
        nearest = lowest
    elif highest == 1:
        why, nearest = "Above 1 all grows.", highest
    else:
        why, nearest = "With 1 nothing decays, and what 1 minus it weighs vanishes; above 1 all grows.", highest
    return f"`{name}` must be in {interval}; got {value!r}{at}. {why} The nearest representable value is {nearest!r}."
