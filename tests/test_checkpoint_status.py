"""What a checkpoint keeps of how a run went comes back to the last field."""

import dataclasses
import json

import numpy as np

import hypergrad as hg
from hypergrad._history import recorded, restored
from hypergrad.errors import NON_FINITE, Status


def test_a_status_comes_back_whole() -> None:
    i, f = np.int32, np.float32
    status = Status(
        i(NON_FINITE), i(3), i(0), f(np.inf), i(7), f(0.25), f(0.5), ("velocity['w']",), (16384.0,), np.bool_(True), i(0),
        f(2.5), f(1e-6), ("early steps",), 4,
    )  # fmt: skip
    done = hg.MetaStep(0, 1.0, 1.0, 0.1, status, 0.0, {"x": f(1)})
    (back,) = restored(json.loads(json.dumps(recorded([done]))), [done.hypers])
    for field in dataclasses.fields(Status):
        assert getattr(back.status, field.name) == getattr(status, field.name), field.name
    assert back.status.sentence() == status.sentence()
