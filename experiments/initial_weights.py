"""Where should training start?

    python -m experiments.initial_weights [--data sinusoids|glyphs|omniglot] [--seeds 0 1 2]

The thesis declined to learn the initial weights, "due to philosophical vertigo". Here they are learned over many small
tasks: adapt for k steps to a few examples, descend the loss on others; the learning rate and the momentum of the k steps are
learned with them. The gradients are exact for any k, so that 100 steps can be compared with 1 and 5. Then all adapt to tasks
never seen, for any number of steps, at the learning rate that is best on validation tasks. k = 1 and k = 5 get as many
meta-steps as k = 100, and then ("longer") about as much time. Beside them: random initial weights, with a learning rate and
a momentum learned for 100 steps. The tasks are sinusoids to fit (Finn, Abbeel, Levine 2017), and with `--data glyphs` or
`--data omniglot` then also five characters to tell apart, seen once each, of alphabets that were not learned with.
"""

import dataclasses
import pathlib
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax import Array

import hypergrad as hg
from experiments import _config, _models, _plots, _record, _tasks
from experiments._record import Row


PRESETS = {
    "sinusoids": {
        "shots": 10, "queries": 20, "hidden": (40, 40), "tasks": 15, "meta_steps": 150, "longer": (1500, 800, 0),
        "adam": 0.01, "adaptation": 200, "judged": 100, "steps": 100,
    },
    "glyphs": {"shots": 1, "queries": 5, "side": 7, "hidden": (32, 32), "tasks": 10, "judged": 40},
    "omniglot": {"shots": 1, "queries": 5, "side": 14, "hidden": (32, 32), "tasks": 10, "judged": 40},
    "tiny": {
        "hidden": (3,), "tasks": 2, "meta_steps": 1, "longer": (1, 1, 0), "adaptation": 4, "judged": 3, "steps": 4,
        "arms": ("k = 4",),
    },
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Config:
    data: _tasks.Name = "sinusoids"
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int | None = None  # the largest k
    arms: tuple[str, ...] | None = None  # which of them to run; None: all
    meta_steps: int | None = None
    longer: tuple[int, int, int] | None = None  # meta-steps of k = 1, 5 and the largest, when they get more; 0: left out
    adam: float | None = None  # learning rate of the meta-optimizer, decayed to a tenth
    clip: float = 0.3  # norm of the hypergradient
    tasks: int | None = None  # per meta-step
    ways: int = 5  # characters to tell apart
    shots: int | None = None  # examples to adapt to, of each character
    queries: int | None = None  # examples to judge by, of each character
    side: int | None = None  # pixels
    hidden: tuple[int, ...] | None = None
    learning_rate: float = 0.05  # the start
    longest_learning_rate: float = 0.01  # the start for the largest k: from 0.05 its hypergradients are chaotic
    momentum: float = 0.9  # the start
    adaptation: int | None = None  # steps of adaptation on tasks never seen
    judged: int | None = None  # of these tasks, and as many for validation
    rates: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0)  # tried on validation tasks, times the learned rate
    tiny: bool = False
    out: pathlib.Path = pathlib.Path("results/initial_weights")


class Arm(NamedTuple):
    steps: int  # that gradients go through
    meta_steps: int
    learned: bool = True  # the initial weights; else the rate and the momentum alone


def arms(config: Config) -> dict[str, Arm]:
    n, most = config.meta_steps, config.steps
    every = {
        "random weights": Arm(most, max(1, n // 3), learned=False),
        "k = 1": Arm(1, n),
        "k = 5": Arm(5, n),
        f"k = {most}": Arm(most, n),
    }
    every |= {f"k = {k}, longer": Arm(k, n) for k, n in zip((1, 5, most), config.longer, strict=True) if n}
    return {name: arm for name, arm in every.items() if config.arms is None or name in config.arms}


def family(config: Config) -> Any:
    if config.data == "sinusoids":
        return _tasks.Sinusoids(config.shots, config.queries)
    return _tasks.FewShot(config.data, config.side, config.ways, config.shots, config.queries)


class Experiment:
    """The functions that a user of the library writes. The tasks of a meta-step are trained side by side, as one."""

    def __init__(self, config: Config) -> None:
        self.config, self.family = config, family(config)
        self.sizes = self.family.sizes(config.hidden)

    def losses(self, params: Any, batch: Any) -> Array:
        """[tasks]: each under its own weights."""
        return jax.vmap(self.family.loss)(params, *batch)

    def loss(self, params: Any, _: Any, batch: Any) -> Array:
        """A sum: its gradient with respect to the weights of a task is that of the task alone."""
        return jnp.sum(self.losses(params, batch))

    def random(self, key: Array) -> Any:
        """Initial weights; biases of layer 1 spread its units over the inputs."""
        scale = {f"layer_{i + 1}": {"weights": n**-0.5, "biases": 0.1} for i, n in enumerate(self.sizes[:-1])}
        return _models.init_mlp(key, self.sizes, scale)

    def arguments(self, hypers: Any, support: Any, steps: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What `hg.train` and `hg.check_reversal` take."""
        count = len(support[0])
        params = jax.tree.map(lambda w: jnp.broadcast_to(w, (count, *w.shape)), hypers["initial"])
        sgd = hg.SGD(hypers["learning_rate"], hypers["momentum"])
        return (self.loss, params, sgd, hg.full_batch(support)), {"steps": steps}

    def train_fn(self, arm: Arm) -> Any:
        def train_fn(hypers: Any, key: Array) -> Any:
            draw, start = jax.random.split(jax.random.fold_in(key, hypers["seed"]))
            if not arm.learned:
                hypers = hypers | {"initial": self.random(start)}
            support, query = self.family.tasks(draw, "train", self.config.tasks)
            arguments, options = self.arguments(hypers, support, arm.steps)
            return hg.train(*arguments, **options).params, query

        return train_fn

    def val_fn(self, trained: Any) -> Array:
        return jnp.mean(self.losses(*trained))

    def start(self, arm: Arm, seed: int) -> Any:
        config = self.config
        rate = config.longest_learning_rate if arm.steps == config.steps else config.learning_rate
        rest = {"learning_rate": hg.positive(rate), "momentum": hg.unit_interval(config.momentum)}
        initial = {"initial": self.random(jax.random.key(seed))} if arm.learned else {}
        return initial | rest | {"seed": hg.fixed(seed)}

    def curves(self, hypers: Any) -> dict[str, Array]:
        """[rates, adaptation + 1, tasks]: the loss on new tasks after each step, at each rate; NaN once it diverges."""
        config = self.config

        def curve(rate: Array, support: Any, query: Any) -> Array:
            (_, params, sgd, batches), _ = self.arguments(hypers | {"learning_rate": rate}, support, 1)

            def step(state: Any, _: None) -> Any:
                run = hg.train(self.loss, state[0], sgd, batches, steps=1, state=state[1], throw=False)
                return (run.params, run.state), self.losses(run.params, query)

            velocity = {"velocity": jax.tree.map(jnp.zeros_like, params)}
            _, losses = jax.lax.scan(step, (params, velocity), None, length=config.adaptation)
            return jnp.concatenate([self.losses(params, query)[None], losses])

        rates = hypers["learning_rate"] * jnp.asarray(config.rates)
        found = {}
        for part in ("validation", "test"):
            support, query = self.family.tasks(jax.random.key(10_000), part, config.judged)
            found[part] = jax.lax.map(lambda rate, s=support, q=query: curve(rate, s, q), rates)
        return found


class Outcome(NamedTuple):
    """Of one arm and one seed."""

    hypers: Any  # in natural units
    values: list[float]  # at each meta-step
    seconds: float  # of a meta-step, without the first, which compiles
    learned: np.ndarray  # [adaptation + 1]: test loss after each step, at the learned rate
    tuned: np.ndarray  # the same, for each number of steps at the rate that is best on validation tasks


def outcomes(experiment: Experiment, arm: Arm, judge: Any) -> list[Outcome]:
    config = experiment.config
    schedule = optax.cosine_decay_schedule(config.adam, arm.meta_steps, 0.1)
    results = hg.restarts(
        experiment.train_fn(arm), experiment.val_fn, [experiment.start(arm, seed) for seed in config.seeds],
        meta_steps=arm.meta_steps, meta_optimizer=optax.chain(optax.clip_by_global_norm(config.clip), optax.adam(schedule)),
        callbacks=[_record.EveryTenth(arm.meta_steps)], skip_nonfinite=True,
    )  # fmt: skip
    found = []
    for result in sorted(results, key=lambda r: config.seeds.index(int(hg.natural(r.hypers)["seed"]))):
        hypers = hg.natural(result.hypers)
        if not arm.learned:
            hypers = hypers | {"initial": experiment.random(jax.random.key(hypers["seed"]))}
        curves = {part: np.asarray(x).mean(axis=-1) for part, x in judge(hypers).items()}
        best = np.argmin(np.where(np.isfinite(curves["validation"]), curves["validation"], np.inf), axis=0)
        tuned = np.take_along_axis(curves["test"], best[None], axis=0)[0]
        learned = curves["test"][config.rates.index(1.0)]
        seconds = float(np.median([done.seconds for done in result.history[1:]] or [np.nan]))
        found.append(Outcome(hypers, [done.value for done in result.history], seconds, learned, tuned))
    return found


def counts(config: Config) -> tuple[int, ...]:
    """The numbers of steps of adaptation that are reported."""
    return tuple(sorted({n for n in (1, 5, config.steps, config.adaptation) if n <= config.adaptation}))


def picture(config: Config, measure: str, found: dict[str, list[Outcome]]) -> tuple[Any, str]:
    figure, (left, right) = _plots.panels(2, size=(5.2, 3.8))
    styles = [*zip(_plots.COLOURS, _plots.DASHES, strict=True), ("black", (0, (2, 2)))]
    for (name, outcomes), (color, dash) in zip(found.items(), styles, strict=False):
        style = {"label": name, "color": color, "linestyle": dash}
        _plots.band(left, np.arange(config.adaptation + 1), [o.tuned for o in outcomes], **style)
        smooth = max(1, len(outcomes[0].values) // 25)
        runs = [np.convolve(o.values, np.ones(smooth) / smooth, "valid") for o in outcomes]
        _plots.band(right, np.arange(len(runs[0])) + smooth, runs, **style)
    left.set(xlabel="steps of adaptation", ylabel=f"test {measure}", title="tasks never seen", yscale="log")
    left.set_xscale("symlog", linthresh=1)
    left.set(xticks=[0, 1, 5, 20, 100], xticklabels=["0", "1", "5", "20", "100"], xlim=(0, config.adaptation))
    right.set(xlabel="meta-step", ylabel=f"{measure} after k steps", title="while learning", xscale="log", yscale="log")
    for ax in (left, right):
        _plots.plain_log(ax.yaxis)
    left.legend(fontsize=8)
    return figure, "Learning rates are the best on validation tasks for each number of steps; bands: one standard deviation."


def rows(config: Config, measure: str, found: dict[str, list[Outcome]]) -> list[Row]:
    chosen = arms(config)
    return [
        Row(
            "new",
            f"{config.data}: test {measure} after {n} step{'s' * (n > 1)}, {name} ({chosen[name].meta_steps} meta-steps)",
            None,
            *_record.mean_and_spread([o.tuned[n] for o in outcomes]),
            "Not in the thesis, which declined to learn the initial weights.",
        )
        for name, outcomes in found.items()
        for n in counts(config)
    ]


def certificate(experiment: Experiment, arm: Arm, hypers: Any) -> hg.Certificate:
    support, _ = experiment.family.tasks(jax.random.key(0), "train", experiment.config.tasks)
    arguments, options = experiment.arguments(hypers, support, arm.steps)
    return hg.check_reversal(*arguments, **options)


class Study(NamedTuple):
    """Of one family of tasks."""

    numbers: dict[str, Any]
    picture: tuple[Any, str]
    rows: list[Row]
    proof: hg.Certificate  # of the first seed, through the most steps


def study(config: Config) -> Study:
    experiment = Experiment(config)
    judge, measure, found = jax.jit(experiment.curves), experiment.family.measure, {}
    for name, arm in arms(config).items():
        print(f"{config.data}, {name}: {arm.meta_steps} meta-steps for each seed", flush=True)
        found[name] = outcomes(experiment, arm, judge)
        shown = (f"{n}: {np.mean([o.tuned[n] for o in found[name]]):.4f}" for n in counts(config))
        print(f"  test {measure} after steps of adaptation   {'   '.join(shown)}", flush=True)
    most = max(arms(config), key=lambda name: arms(config)[name].steps * arms(config)[name].learned)
    numbers = {
        "settings": dataclasses.asdict(config),
        "hyperparameters": sum(np.size(x) for x in jax.tree.leaves(found[most][0].hypers)) - 1,
        "measure": measure,
        **{k: {name: [getattr(o, k) for o in of] for name, of in found.items()} for k in ("tuned", "learned", "values")},
        "seconds_per_meta_step": {name: [o.seconds for o in of] for name, of in found.items()},
        "rates": {name: [o.hypers["learning_rate"] for o in of] for name, of in found.items()},
        "momenta": {name: [o.hypers["momentum"] for o in of] for name, of in found.items()},
    }
    proof = certificate(experiment, arms(config)[most], found[most][0].hypers)
    return Study(numbers, picture(config, measure, found), rows(config, measure, found), proof)


def families(config: Config) -> list[Config]:
    """A filled configuration for each family of tasks; beside Omniglot, sinusoids get k = 100 for longer too."""
    names = ["sinusoids"] if config.data == "sinusoids" else ["sinusoids", config.data]
    configs = [_config.filled(dataclasses.replace(config, data=name), PRESETS) for name in names]
    if config.data == "omniglot" and config.longer is None and not config.tiny:
        configs[0] = dataclasses.replace(configs[0], longer=(*configs[0].longer[:2], configs[0].longer[1]))
    return configs


def main(config: Config) -> dict[str, Any]:
    begin = time.perf_counter()
    studies = {c.data: study(c) for c in families(config)}
    numbers = {name: s.numbers for name, s in studies.items()}
    drawn = _plots.save(config.out, {name: s.picture for name, s in studies.items()})
    seconds = time.perf_counter() - begin
    record = _record.write(
        config.out, "initial_weights", config, numbers, seeds=config.seeds, seconds=seconds,
        certificate={name: s.proof for name, s in studies.items()},
        thesis=[row for s in studies.values() for row in s.rows], pictures=drawn,
    )  # fmt: skip
    _plots.announce(record, drawn, seconds)
    return numbers


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
