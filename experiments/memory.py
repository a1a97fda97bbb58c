"""Bits in the information buffer against theory, and how long the savings of the thesis hold.

    python -m experiments.memory [--steps 4000]

A step with momentum gamma loses log2(1/gamma) bits of each velocity, and the buffer keeps them: 0.152 bits at 0.9 and 0.029
at 0.98, against 32 for storing the state in single precision. So the thesis speaks of factors of about 200 and 1,000. Here
the bits are measured for momenta from 0.5 to 0.999, by running training forward and back (each run is certified).

The bits are not all there is. The buffer takes them 16 at a time, in words of 32, and beside it stand the 64-bit integers of
parameters and velocity, in which the latest bits wait. So the factor in memory depends on the number of steps. The table
says from how many steps on a factor of 200 or 1,000 holds for what the buffer occupies, and for buffer and state together.
"""

import dataclasses
import pathlib
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import Array

import hypergrad as hg
from experiments import _config, _plots, _record
from experiments._plots import COLOURS, DASHES, GREY


STORED = 32  # bits of a parameter in single precision, stored at each step instead
HALF = 16  # bits per parameter that go to the buffer at a time
WORD = 2 * HALF  # the library counts them by 32
THESIS = {0.9: (0.152, 200), 0.98: (0.029, 1000)}  # momentum -> bits per parameter and step, factor
STATE = 2 * 64  # bits per parameter of the integers of parameters and velocity


@dataclasses.dataclass(frozen=True)
class Config:
    momenta: tuple[float, ...] | None = None  # 0.5 to 0.999
    steps: int | None = None  # 4,000
    parameters: int = 100
    seed: int = 0
    learning_rate: float = 0.05
    tiny: bool = False
    out: pathlib.Path = pathlib.Path("results/memory")


PRESETS: dict[str, dict[str, Any]] = {
    "digits": {"momenta": (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999), "steps": 4_000},
    "tiny": {"momenta": (0.5, 0.98), "steps": 40},
}


def loss(w: Array, theta: None, batch: Array) -> Array:
    """A quartic bowl around targets that change from step to step."""
    return jnp.mean(jnp.square(jnp.square(w - batch)) + jnp.square(w - batch))


def certify(config: Config, gamma: float, steps: int) -> hg.Certificate:
    key = jax.random.key(config.seed)
    targets = jax.tree_util.Partial(_target, key, jnp.zeros(config.parameters))
    w = jax.random.normal(key, (config.parameters,))
    proof = hg.check_reversal(loss, w, hg.SGD(config.learning_rate, gamma), targets, steps=steps)
    print(
        f"momentum {gamma:<6g} {steps:6,} steps: {proof.bits_per_parameter_step:.5f} bits per parameter and step, theory "
        f"{proof.ideal_bits_per_parameter_step:.5f}, {'exact' if proof.exact else 'NOT EXACT'}",
        flush=True,
    )
    return proof


def _target(key: Array, like: Array, t: Array) -> Array:
    return jax.random.normal(jax.random.fold_in(key, t), like.shape)


def words(gamma: float, t: Any) -> Any:
    """32-bit words per parameter after t steps: half of one for all 16 bits lost."""
    return np.ceil(np.floor(np.asarray(t) * -np.log2(gamma) / HALF) / 2)


def buffer_bits(gamma: float, t: Any) -> Any:
    """What the buffer occupies, bits per parameter."""
    return WORD * words(gamma, t)


def steps_for(factor: float, gamma: float, beside: float, limit: int = 10**6) -> int:
    """The smallest T from which on 32 T >= factor (buffer + beside)."""
    t = np.arange(1, limit)
    short = np.flatnonzero(STORED * t < factor * (buffer_bits(gamma, t) + beside))
    if short[-1] == limit - 2:
        raise ValueError(f"a factor of {factor} is not reached by {limit:,} steps at momentum {gamma}.")
    return int(t[short[-1]]) + 1


class Run(NamedTuple):
    momentum: float
    steps: int
    proof: hg.Certificate

    @property
    def occupied(self) -> int:
        """By the buffer, bits per parameter."""
        return WORD * self.proof.buffer_words


def main(config: Config) -> dict[str, Any]:
    begin, config = time.perf_counter(), _config.filled(config, PRESETS)
    claims = {
        (gamma, steps_for(factor, gamma, 0)): factor for gamma, (_, factor) in THESIS.items() if gamma in config.momenta
    }
    wanted = [(gamma, config.steps) for gamma in config.momenta] + [(g, t) for g, t in claims if t is not None]
    runs = [Run(gamma, steps, certify(config, gamma, steps)) for gamma, steps in wanted]
    rows = _rows(config, runs)
    for row in rows:
        print(row)
    pictures = _plots.save(config.out, {"memory": (_picture(runs), "Bits kept, and the factor in memory")})
    seconds = time.perf_counter() - begin
    certificate = {f"momentum {r.momentum:g}, {r.steps:,} steps": r.proof for r in runs}
    record = _record.write(
        config.out, "memory", config, {"runs": runs},
        seeds=[config.seed], seconds=seconds, certificate=certificate, thesis=rows, pictures=pictures,
    )  # fmt: skip
    _plots.announce(record, pictures, seconds)
    return {"runs": runs, "certificate": {name: proof._asdict() for name, proof in certificate.items()}}


def _rows(config: Config, runs: list[Run]) -> list[_record.Row]:
    rows = []

    def add(quantity: str, thesis: Any, ours: Any, why: str = "new") -> None:
        rows.append(_record.Row("6.2.3", quantity, thesis, ours, None, why))

    for run in runs:
        gamma, proof = run.momentum, run.proof
        recorded, factor = THESIS.get(gamma, (None, None))
        if run.steps == config.steps:
            why = "rounded there" if recorded else "new"
            add(f"bits per parameter and step, momentum {gamma:g}", recorded, proof.bits_per_parameter_step, why)
            continue
        add(f"factor in information, momentum {gamma:g}", factor, STORED / proof.bits_per_parameter_step, "rounded there")
        add(f"steps from which on the buffer is {factor:,} times smaller, momentum {gamma:g}", None, run.steps)
        text = f"factor measured after {run.steps:,} steps, momentum {gamma:g}"
        add(text, None, STORED * run.steps / run.occupied, "new: 32 bits a step over the buffer")
        text = f"the same for buffer, parameters and velocity, momentum {gamma:g}"
        add(text, None, steps_for(factor, gamma, STATE), "new: from the size of the buffer")
    excess = max(abs(r.proof.bits_per_parameter_step - r.proof.ideal_bits_per_parameter_step) * r.steps for r in runs)
    add("largest difference from theory, bits per parameter, whole run", None, excess, "new: float32 digits of both")
    agree = all(abs(r.proof.buffer_words - words(r.momentum, r.steps)) <= 1 for r in runs)
    add("words, as predicted to one", None, "in all runs" if agree else "NOT in all runs")
    return rows


def _picture(runs: list[Run]) -> Any:
    figure, (left, right) = _plots.panels(2, size=(5.2, 3.8))
    gammas = np.array([r.momentum for r in runs])
    measured = [r.proof.bits_per_parameter_step for r in runs]
    theory = np.geomspace(min(1 - gammas), max(1 - gammas), 100)
    left.plot(theory, -np.log2(1 - theory), color=GREY, linestyle="--", label="log2(1 / momentum)")
    left.plot(1 - gammas, measured, "o", color=COLOURS[0], markersize=5, label="measured")
    left.set(xscale="log", yscale="log", xlabel="1 - momentum", ylabel="bits per parameter and step", title="information")
    left.legend()
    t = np.unique(np.geomspace(10, 1e6, 400).astype(int))
    for i, gamma in enumerate(g for g in (0.9, 0.98, 0.999) if g in gammas):
        style = {"color": COLOURS[i], "linewidth": 1.6}
        begun = t[buffer_bits(gamma, t) > 0]
        right.plot(
            begun, STORED * begun / buffer_bits(gamma, begun), linestyle=DASHES[0], label=f"momentum {gamma:g}", **style
        )
        right.plot(t, STORED * t / (buffer_bits(gamma, t) + STATE), linestyle=DASHES[3], **style)
        points = [(r.steps, STORED * r.steps / r.occupied) for r in runs if r.momentum == gamma and r.occupied]
        right.plot(*np.reshape(points, (-1, 2)).T, "o", color=COLOURS[i], markersize=5)
    for factor in (200, 1000):
        right.axhline(factor, **_plots.THESIS)
        right.annotate(f"{factor:,}", (12, factor * 1.08), fontsize=8)
    right.plot([], [], color=GREY, linestyle=DASHES[3], label="with parameters and velocity")
    right.plot([], [], "o", color=GREY, label="measured")
    right.set(xscale="log", yscale="log", xlabel="training steps", ylabel="factor against 32 bits a step", title="memory")
    right.legend(fontsize=8)
    return figure


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
