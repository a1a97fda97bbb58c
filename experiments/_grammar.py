"""A loss drawn at random from a grammar of JAX, as Python source: the same text for the same generator of random numbers.

Each line of the source is one operation on values whose shapes are known here, so that every text is a loss that works. All
values stay of order one: what could overflow or divide by zero is written in a form that cannot. Everything ends up in the
loss, and every leaf of theta weighs something in it. The source may call what `experiments/_bent_rules.py` has.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from experiments._grammar_operations import BINARY, FIRST, RULES, STOPPED, VECTORS, Table


Shape = tuple[int, ...]


class Value(NamedTuple):
    name: str
    shape: Shape


class Writer:
    """Lines of a loss, and the values that they have made so far."""

    def __init__(self, rng: np.random.Generator, rough: bool, table: Table) -> None:
        self.rng, self.rough, self.table = rng, rough, table
        self.lines: list[str] = []
        self.pool: list[Value] = []
        self.used: set[str] = set()
        self.scalars: list[str] = []  # of theta
        self.marks: set[str] = set()  # what the text contains: "own rule", "16 bits"

    def pick(self, options: Any) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def some(self, wanted: Callable[[Shape], bool] = lambda shape: True) -> Value | None:
        """A value of such a shape: rather one that nothing has used, or none."""
        options = [v for v in self.pool if wanted(v.shape)]
        fresh = [v for v in options if v.name not in self.used]
        options = fresh if fresh and self.rng.random() < 0.6 else options
        if not options:
            return None
        chosen = self.pick(options)
        self.used.add(chosen.name)
        return chosen

    def scalar(self) -> str:
        return self.pick(self.scalars) if self.scalars else "0.7"

    def write(self, text: str, shape: Shape) -> None:
        if int(np.prod(shape)) > 60:
            return
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        self.pool.append(Value(name, shape))

    def chain(self, name: str, depth: int) -> str:
        """Operations of one value, one inside of the other."""
        for _ in range(depth):
            name = self.unary().format(name)
        return name

    def unary(self) -> str:
        which = self.rng.random()
        return self.pick(self.table.smooth if which < 0.75 else self.table.kinked if which < 0.93 else STOPPED)

    def attempt(self, operation: str) -> None:
        """One of the methods below: each writes a line if there are values that it can take."""
        used, lines = set(self.used), len(self.lines)
        getattr(self, operation)()
        if len(self.lines) == lines:
            self.used = used

    def elementwise(self) -> None:
        if a := self.some():
            self.write(self.unary().format(a.name), a.shape)

    def binary(self) -> None:
        a = self.some()
        fits = lambda s: all(m == n or 1 in (m, n) for m, n in zip(a.shape[::-1], s[::-1], strict=False))  # noqa: E731
        if a and (b := self.some(fits)):
            self.write(self.pick(BINARY).format(a.name, b.name), np.broadcast_shapes(a.shape, b.shape))

    def weighed(self) -> None:
        if a := self.some():
            self.write(f"{a.name} * jnp.asarray({self.scalar()}, {a.name}.dtype)", a.shape)

    def along(self) -> None:
        if a := self.some(lambda shape: len(shape) > 0 and max(shape) > 1):
            axis = self.pick([i for i, n in enumerate(a.shape) if n > 1])
            self.write(self.pick(self.table.along).format(a.name, axis, a.shape[axis]), a.shape)

    def reduced(self) -> None:
        if a := self.some(lambda shape: len(shape) > 0):
            axis = int(self.rng.integers(len(a.shape)))
            self.write(self.pick(self.table.reduced).format(a.name, axis), a.shape[:axis] + a.shape[axis + 1 :])

    def reshaped(self) -> None:
        a = self.some(lambda shape: len(shape) > 1)
        if a and self.rng.random() < 0.5:
            order = tuple(int(i) for i in self.rng.permutation(len(a.shape)))
            self.write(f"jnp.transpose({a.name}, {order})", tuple(a.shape[i] for i in order))
        elif a:
            self.write(f"{a.name}.reshape(-1)", (int(np.prod(a.shape)),))
        elif a := self.some(lambda shape: len(shape) == 1):
            self.write(f"jnp.outer({a.name}, jnp.flip({a.name}))", (*a.shape, *a.shape))

    def joined(self) -> None:
        a = self.some(lambda shape: len(shape) > 0)
        if a and (b := self.some(lambda shape: shape[1:] == a.shape[1:] and len(shape) == len(a.shape))):
            self.write(f"jnp.concatenate([{a.name}, {b.name}])", (a.shape[0] + b.shape[0], *a.shape[1:]))

    def product(self) -> None:
        a = self.some(lambda shape: len(shape) > 0)
        fits = lambda s: len(s) > 0 and s[-2 if len(s) > 1 else 0] == a.shape[-1] and len(s) < 3  # noqa: E731
        if a and (b := self.some(fits)):
            shape = a.shape[:-1] + b.shape[1:]
            root = round(float(a.shape[-1]) ** -0.5, 3)
            self.write(f"{root} * jnp.matmul({a.name}, {b.name})", shape)

    def solved(self) -> None:
        if not self.rough and (a := self.some(lambda shape: len(shape) == 2)):
            n = a.shape[1]
            text = self.pick(self.table.solved)
            is_vector = any(name in text for name in VECTORS)
            self.write(text.format(f"({a.name}.T @ {a.name} + jnp.eye({n}))", n), (n,) if is_vector else (n, n))

    def convolved(self) -> None:
        a, k = self.some(lambda shape: len(shape) in (2, 3)), self.some(lambda shape: len(shape) in (1, 2))
        if not a or not k:
            return
        kernel = f"{k.name}.reshape({k.shape[0]}, 1, -1).astype({a.name}.dtype)"
        if len(a.shape) == 2:
            options = "(1,), 'SAME', dimension_numbers=('NWC', 'WIO', 'NWC')"
            self.write(f"jax.lax.conv_general_dilated({a.name}[..., None], {kernel}, {options})[..., 0]", a.shape)
        else:
            options = "(1, 1), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC')"
            self.write(f"jax.lax.conv_general_dilated({a.name}[..., None], {kernel}[:, None], {options})[..., 0]", a.shape)

    def gathered(self) -> None:
        if a := self.some(lambda shape: len(shape) > 0):
            n, rest = a.shape[0], a.shape[1:]
            text, shape = self.pick(
                (
                    ("{a}[batch['places'] % {n}]", (5, *rest)),
                    ("jnp.zeros((3, {rest}), {a}.dtype).at[batch['places'][:{k}] % 3].add({a}[:{k}])", (3, *rest)),
                    ("{a}.at[batch['places'][0] % {n}].multiply(0.5)", a.shape),
                    ("jax.ops.segment_sum({a}[:{k}], batch['places'][:{k}] % 4, num_segments=4)", (4, *rest)),
                    ("jax.lax.top_k({a}.reshape(-1), {t})[0]", (min(3, int(np.prod(a.shape))),)),
                    ("jax.lax.dynamic_slice_in_dim({a}, batch['which'], {h})", (max(n // 2, 1), *rest)),
                )
            )
            inner = "".join(f"{m}, " for m in rest)
            parts = {"a": a.name, "n": n, "rest": inner, "k": min(n, 5), "t": shape[0], "h": max(n // 2, 1)}
            self.write(text.format(**parts), shape)

    def recurrent(self) -> None:
        """A scan over the leading axis, each row mixed into a state."""
        if a := self.some(lambda shape: len(shape) > 1):
            chain = self.chain("(0.5 * h + row)", 1)
            step = f"lambda h, row: (({chain}).astype(h.dtype),) * 2"
            which = self.pick(("", ", reverse=True", ", unroll=2"))
            self.write(f"jax.lax.scan({step}, jnp.zeros_like({a.name}[0]), {a.name}{which})[1]", a.shape)

    def wrapped(self) -> None:
        if a := self.some():
            chain = self.chain("z", 2)
            text = self.pick(self.table.wrapped).replace("{1_of_0}", re.sub(r"\bz\b", a.name, chain))
            self.write(text.format(a.name, chain, f"jnp.asarray({self.scalar()}, {a.name}.dtype)"), a.shape)

    def batched(self) -> None:
        if a := self.some(lambda shape: len(shape) > 1):
            self.write(f"jax.vmap(lambda z: {self.chain('z', 2)})({a.name})", a.shape)

    def ruled(self) -> None:
        """A derivative rule of the user's own."""
        if a := self.some():
            rule = self.pick(tuple(RULES))
            if not RULES[rule]:
                self.marks.add("own rule")
            self.write(rule.format(a.name, f"jnp.asarray({self.scalar()}, {a.name}.dtype)"), a.shape)

    def cast(self) -> None:
        if self.rough and (a := self.some()):
            dtype = self.pick(self.table.casts)
            self.marks.add("32 bits" if dtype == "float32" else "16 bits")
            if "," in dtype:
                self.write(f"jax.lax.reduce_precision({a.name}, {dtype})", a.shape)
            else:
                self.write(f"{a.name}.astype(jnp.{dtype}).astype({a.name}.dtype)", a.shape)

    def randomized(self) -> None:
        """By a key that is fixed, or one that the batch brings along."""
        if a := self.some():
            key = self.pick(("jax.random.key(3)", "jax.random.fold_in(jax.random.key(0), batch['which'])"))
            text = self.pick(
                (
                    "{a} * jax.random.bernoulli({key}, 0.7, {a}.shape)",
                    "{a} + 0.3 * jax.random.normal({key}, {a}.shape, {a}.dtype)",
                    "{a} * jax.random.gumbel({key}, {a}.shape, {a}.dtype)",
                    "jax.random.permutation({key}, {a})" if a.shape else "jnp.sin({a})",
                )
            )
            self.write(text.format(a=a.name, key=key), a.shape)

    def pooled(self) -> None:
        if a := self.some(lambda shape: len(shape) > 0):
            window = (1,) * (len(a.shape) - 1) + (2,)
            kind = self.pick(("-jnp.inf, jax.lax.max", "jnp.inf, jax.lax.min", "0.0, jax.lax.add"))
            strides = (1,) * len(a.shape)
            self.write(f"jax.lax.reduce_window({a.name}, {kind}, {window}, {strides}, 'SAME')", a.shape)


def write_loss(
    rng: np.random.Generator,
    params: dict[str, Shape],
    theta: dict[str, Shape],
    rough: bool,
    evidence: bool,
    table: Table = FIRST,
) -> tuple[str, set[str]]:
    """(source of `loss(p, theta, batch)`, what it contains). The batch: x [4, 3], y [4], places int [5], which int."""
    w = Writer(rng, rough, table)
    full = {name: shape for name, shape in params.items() if 0 not in shape}
    for name, shape in full.items():
        w.write(f'p["{name}"]', shape)
    for name, shape in theta.items():
        if name == "rows":
            w.write(f'theta["rows"][batch["places"] % {shape[0]}]', (5, *shape[1:]))
        elif shape == ():
            w.scalars.append(f'theta["{name}"]')
        else:
            w.write(f'theta["{name}"]', shape)
    w.write('batch["x"]', (4, 3))
    w.write('batch["y"]', (4,))
    weights = np.array([weight for _, weight in table.operations], float)
    for which in rng.choice(len(weights), int(rng.integers(4, 15)), p=weights / weights.sum()):
        w.attempt(table.operations[which][0])
    loose = [v for v in w.pool if v.name not in w.used]
    mean = lambda text: f"jnp.mean({text}.astype(wide))"  # noqa: E731
    joint = [f"{1 + 0.3 * i:.1f} * {mean(f'jnp.tanh({v.name})')}" for i, v in enumerate(loose)]
    terms = [f'0.1 * {mean(f"""((p["{name}"] - 0.2) ** 2)""")}' for name in full]
    square = mean(f"""(p["{min(full)}"] ** 2)""")
    terms += [f'0.3 * theta["{name}"].astype(wide) * {square}' for name, shape in theta.items() if shape == ()]
    lines = ['wide = batch["x"].dtype', *w.lines, f"joint = {' + '.join(joint)}"]
    lines.append(f"total = {' + '.join(['joint + jnp.sin(2 * joint)', *terms])}")
    if evidence:
        row = "jnp.tanh(batch['x'][:, 0] * total).astype(wide)"
        lines.append(f"return total, {{'seen': {mean(loose[0].name)}, 'row': {row}}}")
    else:
        lines.append("return total")
    return "def loss(p, theta, batch):\n" + "".join(f"    {line}\n" for line in lines), w.marks
