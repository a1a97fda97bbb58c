"""The benchmarks of rules: references that agree, and choices that are measured."""

import jax.numpy as jnp
import numpy as np
import pytest
from covering import some_of

import hypergrad as hg
from experiments import _data
from experiments.benchmarks import reference_rules, references, shampoo_choices


@pytest.mark.long
@pytest.mark.of_bits
@some_of("name", ["NorMuon", "SOAP, k = 10", "Shampoo, k = 10", "Muon, Nesterov"], "NorMuon")
def test_rules_of_matrices_are_those_of_their_references(name):
    # What is held is right to 1.5e-5; SOAP's eigenvectors are not determined where a factor has not full rank.
    assert apart(references.REFERENCES[name]) < 1e-3


@pytest.mark.long
def test_a_reference_at_another_rate_is_another():
    lie = references.of_matrices(hg.Muon(0.002), lambda r: reference_rules.nesterov_muon(0.006, r(0.95)))
    assert apart(lie) > 1e-2


def apart(member):
    """In float64, relative, over 12 steps of softmax regression."""
    ours, theirs = references.losses(member, _data.load("digits", 0), (), 12, jnp.float64)
    return np.max(np.abs(ours / theirs - 1))


@pytest.mark.long
def test_a_reference_rounds_as_well():
    found = references.differences(references.REFERENCES["SGD"], _data.load("digits", 0), (), 12)
    assert found.wide < 1e-9 and all(1e-9 < x < 1e-5 for x in (found.narrow, found.ours, found.theirs))


@pytest.mark.long
def test_choices_of_shampoo_are_measured(monkeypatch):
    monkeypatch.setattr(shampoo_choices, "RATES", (0.01, 0.001))
    network = shampoo_choices.Network(_data.load("digits", 0), (), 3)
    choices = {"every": 1, "block_size": None, "max_size": 1, "graft": "none"}  # diagonals, which compile fast
    cost = network.cost(network.rule(0.01, choices), plain=1.0)
    assert cost.exact and cost.training > 0 and cost.hypergradient > 0 and cost.bits > 0
    validation, loss, rate = network.best(choices)
    assert rate in (0.01, 0.001) and 0 < loss < 3 and 0 < validation < 3
