"""Different rules for different leaves; and what moves each leaf: its rule, and the transformations around it.

Invariant: the layers that cover a leaf, outermost first, end in exactly one rule.
"""

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax

from hypergrad._prefixes import hint, outline
from hypergrad.hypers import describe
from hypergrad.optimizers.chain import Link, Optimizer, Signal, check_has_chain
from hypergrad.optimizers.gradient_link import WithGradientLink
from hypergrad.optimizers.transform import Freeze, Transformed


class Partition(Optimizer):
    """Each leaf is moved by the rule that its label names. Made by `partition`."""

    rules: dict[str, Optimizer]
    labels: Any = eqx.field(static=True)  # (tree, leaves) or a function of the parameters: hashable

    def hyperparameters(self) -> dict[str, Any]:
        return {}

    @property
    def linear(self) -> bool:  # type: ignore[override]
        return all(rule.linear for rule in self.rules.values())

    @property
    def signals(self) -> Mapping[str, Signal]:  # type: ignore[override]
        found: dict[str, Signal] = {}
        for label, rule in self.rules.items():
            for name, function in rule.signals.items():
                if found.setdefault(name, function) is not function:
                    raise ValueError(f"hg.partition: rules[{label!r}] and another have different signals {name!r}.")
        return found

    def labels_of(self, params: Any) -> list[str]:
        """Of each leaf."""
        if callable(self.labels):
            given = self.labels(params)
        else:
            tree, leaves = self.labels
            given = jax.tree.unflatten(tree, leaves)
        try:
            found = jax.tree.leaves(jax.tree.broadcast(given, params))
        except ValueError as e:
            raise ValueError(
                "hg.partition: `labels` must be a pytree prefix of `params` with labels as leaves; got the tree "
                f"{outline(given)} for params {outline(params)}.{hint(given, params)}"
            ) from e
        for (path, _), label in zip(jax.tree_util.tree_leaves_with_path(params), found, strict=True):
            if not isinstance(label, Hashable) or label not in self.rules:
                raise ValueError(
                    f"hg.partition: the label of params{jax.tree_util.keystr(path)} is {label!r}, for which there is no "
                    f"rule; `rules` has {list(self.rules)}."
                )
        return found


def partition(rules: Mapping[str, Optimizer], labels: Any) -> Partition:
    """Each leaf of the parameters by the rule that its label names, as `optax.partition`.

    rules: {label: optimizer}, transformations around them included. labels: a pytree prefix of the parameters with labels as
    leaves, or a function of the parameters that gives one. Each rule's hyperparameters are scalars, `PerStep`, or pytree
    prefixes of the parameters, of which the leaves of its label count (None may stand for the others); all are
    differentiated. `state` has every link of every rule, with None for the leaves that do not have it.
    """
    if not isinstance(rules, Mapping) or not rules:
        raise TypeError(f"hg.partition: `rules` must be a dict {{label: optimizer}}; got {describe(rules)}.")
    for label, rule in rules.items():
        if not isinstance(rule, Optimizer):
            raise TypeError(
                f"hg.partition: rules[{label!r}] must be an optimizer such as hg.SGD(0.1); got {describe(rule)}."
            )
    try:
        sorted(rules)
    except TypeError as e:
        raise TypeError(
            "hg.partition: the labels in `rules` must be of one kind, strings for instance, as JAX sorts them; got "
            f"{list(rules)}."
        ) from e
    if callable(labels):
        return Partition(dict(rules), labels)
    leaves, tree = jax.tree.flatten(labels)
    if not leaves or not all(isinstance(x, Hashable) for x in leaves):
        raise TypeError(
            "hg.partition: `labels` must be a pytree prefix of the parameters with keys of `rules` as leaves, or a function "
            f"of the parameters that gives one; got {describe(labels)}."
        )
    return Partition(dict(rules), (tree, tuple(leaves)))


class Layer(NamedTuple):
    """A rule, or a transformation around some, and the leaves that it covers."""

    path: str  # as users find it: "optimizer.inner.rules['a']"
    optimizer: Optimizer
    leaves: frozenset[int]
    labels: tuple[str, ...]  # of the partitions around it

    @property
    def is_rule(self) -> bool:
        return not isinstance(self.optimizer, Transformed)

    def key(self, field: str) -> str:
        """What h calls a field: a rule's by their own names, those of transformations by all of their path."""
        return field if self.is_rule else f"{self.path}.{field}"


def layers_of(optimizer: Optimizer, params: Any) -> tuple[Layer, ...]:
    """Outermost first. Those of rules that no leaf is labelled for are there, too: their fields are hyperparameters."""
    every = frozenset(range(len(jax.tree.leaves(params))))
    return tuple(_layers("optimizer", optimizer, params, every, ()))


def _layers(
    path: str,
    optimizer: Any,
    params: Any,
    leaves: frozenset[int],
    labels: tuple[str, ...],
    frozen: frozenset[int] = frozenset(),
) -> list[Layer]:
    """frozen: by transformations around it, so that those inside give them no gradient, nor take them into a norm."""
    if isinstance(optimizer, Partition):
        found: list[Layer] = []
        names = optimizer.labels_of(params)
        for label, rule in optimizer.rules.items():
            own = frozenset(i for i in leaves if names[i] == label)
            found += _layers(f"{path}.rules[{label!r}]", rule, params, own, (*labels, label), frozen)
        return found
    if isinstance(optimizer, Transformed):
        covered = frozenset(i for i, seen in enumerate(optimizer.covers(params)) if seen)
        layer = Layer(path, optimizer, (leaves & covered) - frozen, labels)
        frozen |= layer.leaves if isinstance(optimizer, Freeze) else frozenset()
        return [layer, *_layers(f"{path}.inner", optimizer.inner, params, leaves, labels, frozen)]
    check_has_chain(optimizer)
    return [Layer(f"{path}.rule" if isinstance(optimizer, WithGradientLink) else path, optimizer, leaves, labels)]


class Stack(NamedTuple):
    """What moves one leaf."""

    layers: tuple[Layer, ...]  # outermost first, the rule last

    @property
    def rule(self) -> Layer:
        return self.layers[-1]

    @property
    def chain(self) -> tuple[Link, ...]:
        chain = self.rule.optimizer.chain
        for layer in reversed(self.layers[:-1]):
            chain = layer.optimizer.adapted(chain)  # type: ignore[attr-defined]
        return chain

    @property
    def entrywise(self) -> bool:
        around = all(layer.optimizer.entrywise_transform for layer in self.layers[:-1])  # type: ignore[attr-defined]
        return around and self.rule.optimizer.entrywise


def stacks_of(layers: tuple[Layer, ...], leaves: int) -> list[Stack]:
    """One for each leaf."""
    return [Stack(tuple(layer for layer in layers if i in layer.leaves)) for i in range(leaves)]
