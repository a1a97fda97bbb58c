"""Room for digits that is set aside before anybody knows how many there are."""

import warnings

import jax
import pytest
from tiny import final

import hypergrad as hg
from hypergrad.adjoints import capacity


def test_much_room_for_digits_is_told(monkeypatch):
    def gradient(momentum, adjoint):
        return jax.jit(jax.grad(lambda m: final(optimizer=hg.Adam(0.1, m), adjoint=adjoint))).lower(momentum)

    monkeypatch.setattr(capacity, "MUCH", 1)
    with pytest.warns(UserWarning, match=r"decays are traced.*GiB for `mean`.*capacity=.*buffer_words.*memory_budget="):
        gradient(0.9, hg.Reversible())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        gradient(0.9, hg.Reversible(capacity=4))
        jax.grad(lambda m: final(optimizer=hg.Adam(0.1, m)))(0.9)  # where it is known
    assert not said
