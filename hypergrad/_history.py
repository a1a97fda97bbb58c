"""`MetaStep`, what the meta-loop remembers of a step, and its form on disk.

Invariant: `restored(recorded(history), hypers of each step) == history`.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from hypergrad import errors
from hypergrad._forms import misfit, number, shown, text
from hypergrad._forms import natural as is_natural
from hypergrad._hyper_names import named_leaves
from hypergrad._processes import divided
from hypergrad.errors import Status
from hypergrad.hypers import at_bounds, natural, split_fixed


class MetaStep(NamedTuple):
    """One evaluation of the meta-loop, before its update; means over the seeds that went well."""

    step: int
    value: float
    gradient_norm: float
    seconds: float
    status: Status | None  # of the training run inside, the worst of all seeds; None if there was none
    bits_per_parameter_step: float  # that its information buffer stored
    hypers: Any  # as stored (domains)
    value_error: float = math.nan  # standard error of `value` over seeds; NaN for one seed
    gradient_error: float = math.nan  # norm of the standard error of the hypergradient
    failed_seeds: int = 0
    monitor: float = math.nan  # of `monitor_fn`, infinity where that is NaN; NaN: there is none
    gradients: Mapping[str, float] = MappingProxyType({})  # norm of the hypergradient by hyperparameter, "l2/hidden/w"
    clipped_seeds: int = 0  # weighed down, since their hypergradients were so much longer than those of the others
    growth: float = math.nan  # how much the derivative of training grows backwards, at most: from 100 on it explodes

    @property
    def signal_to_noise(self) -> float:
        """|hypergradient| / |its standard error|. NaN for one seed, and where both are zero.

        Noise alone gives about 1, however many seeds there are: both are then the noise of a mean. From 2 on three quarters
        of the hypergradient's square are signal.
        """
        if self.gradient_error:
            return self.gradient_norm / self.gradient_error
        return math.inf if self.gradient_norm else math.nan

    @property
    def at_bounds(self) -> tuple[str, ...]:
        """The hyperparameters that have come to an end of their interval, a sentence each."""
        return at_bounds(self.hypers)

    @property
    def judged(self) -> float:
        """What `Result.best` compares: `monitor` if there is one, else `value`; infinity if that is NaN."""
        number = self.value if math.isnan(self.monitor) else self.monitor
        return number if math.isfinite(number) else math.inf

    def record(self) -> dict[str, Any]:
        """The numbers, for JSON: NaN as null, the status by its code, of hyperparameters that are arrays a summary."""
        more = {"signal_to_noise": _json(self.signal_to_noise), "hypers": summaries(self.hypers)}
        return numbers(self) | {"status": None if self.status is None else int(self.status.code)} | more


def numbers(done: MetaStep) -> dict[str, Any]:
    """All but the status and the hypers, for JSON."""
    kept = {k: v for k, v in done._asdict().items() if k not in ("status", "hypers")}
    return {k: {name: _json(x) for name, x in v.items()} if k == "gradients" else _json(v) for k, v in kept.items()}


def summaries(hypers: Any) -> dict[str, Any]:
    """Of every learned hyperparameter its value in natural units; of an array its extremes, mean, first and last.

    Nothing of one that is divided among processes: one of them may ask alone.
    """
    found: dict[str, Any] = {}
    for name, x in named_leaves(natural(split_fixed(hypers)[0])):
        if divided(x):
            found[name] = {}
            continue
        values = np.asarray(x, np.float64).reshape(-1)
        many = (
            {"min": values.min(), "max": values.max(), "mean": values.mean(), "first": values[0], "last": values[-1]}
            if values.size
            else {}
        )
        found[name] = {k: _json(float(v)) for k, v in many.items()} if np.ndim(x) else _json(float(values[0]))
    return found


def recorded(history: list[MetaStep]) -> dict[str, Any]:
    """{"steps": one record per meta-step with its whole status, "places": what statuses index, once}."""
    places: list[Any] = []
    steps = []
    for done in history:
        record = numbers(done) | {"status": None}
        if done.status is not None:
            of_run = (done.status.names, done.status.limits, done.status.approximate)
            place = [*map(list, of_run), done.status.microbatches]
            places += [] if place in places else [place]
            fields = {k: np.asarray(getattr(done.status, k)).item() for k in _DTYPES}
            record["status"] = {k: _json(v) for k, v in fields.items()} | {"places": places.index(place)}
        steps.append(record)
    return {"steps": steps, "places": places}


def restored(run: dict[str, Any], hypers: list[Any]) -> list[MetaStep]:
    """The inverse of `recorded`."""
    history = []
    for record, h in zip(run["steps"], hypers, strict=True):
        status = record["status"]
        if status is not None:
            *of_run, parts = run["places"][status["places"]]
            names, limits, approximate = map(tuple, of_run)
            fields: Any = {k: dtype(_number(status[k])) for k, dtype in _DTYPES.items()}
            status = Status(**fields, names=names, limits=limits, approximate=approximate, microbatches=parts)
        kept: Any = {k: v if k == "status" else _number(v) for k, v in record.items() if k != "gradients"}
        kept["gradients"] = {k: _number(v) for k, v in record["gradients"].items()}
        history.append(MetaStep(**{**kept, "status": status, "hypers": h}))
    return history


def best(history: list[MetaStep]) -> MetaStep:
    return min(history, key=lambda done: done.judged)


# The arrays of a `Status`.
_DTYPES: dict[str, Any] = {
    "code": np.int32, "step": np.int32, "place": np.int32, "magnitude": np.float32, "words": np.int32,
    "bits": np.float32, "ideal_bits": np.float32, "isolated": np.bool_, "small": np.int32, "quanta": np.float32,
    "faint": np.float32,
}  # fmt: skip


def _json(x: int | float) -> int | float | str | None:
    """JSON has no NaN and no infinity: null, and a string that `float` reads."""
    if isinstance(x, int) or math.isfinite(x):
        return x
    return None if math.isnan(x) else str(x)


def _number(x: Any) -> Any:
    return math.nan if x is None else float(x) if isinstance(x, str) else x


def _real(x: Any) -> bool:
    """What `_json` makes of a float."""
    return x is None or (text(x) and x in ("inf", "-inf")) or number(x)


def _single(x: Any) -> bool:
    return _real(x) and not (number(x) and abs(x) > float(np.finfo(np.float32).max))


def _index(x: Any) -> bool:
    return is_natural(x) or (type(x) is int and x in (errors.LOSSES, errors.BATCHES))


def _places(x: Any) -> bool:
    """[names, limits, what is approximate, microbatches]"""
    formed = isinstance(x, list) and len(x) == 4 and all(isinstance(part, list) for part in x[:3]) and is_natural(x[3])
    return formed and len(x[0]) == len(x[1]) and all(map(text, x[0] + x[2])) and all(map(number, x[1]))


# The forms of what `recorded` gives.
_FORMS: dict[Any, Any] = {np.int32: _index, np.float32: _single, np.bool_: lambda x: type(x) is bool}
_STATUS: dict[str, Any] = {k: _FORMS[dtype] for k, dtype in _DTYPES.items()}
_STATUS |= {"code": lambda x: is_natural(x) and x <= errors.REVERSAL, "places": is_natural}
RECORD: dict[str, Any] = {k: _real for k in MetaStep._fields if k != "hypers"}
RECORD |= dict.fromkeys(("step", "failed_seeds", "clipped_seeds"), is_natural)
RECORD |= {"gradients": lambda x: isinstance(x, dict) and all(map(_real, x.values()))}
RECORD |= {"status": lambda x: x is None or not misfit(x, _STATUS, "status")}
PLACES = [_places]


def contradiction(steps: list[Any], places: list[Any]) -> str:
    """What cannot be true of records that have their form, in words; "" if all can."""
    numbers = [step["step"] for step in steps]
    if numbers != list(range(len(steps))):
        return f"its meta-steps are numbered {shown(numbers)}"
    for status in (step["status"] for step in steps if step["status"] is not None):
        names = places[status["places"]][0] if status["places"] < len(places) else ()
        if max(status["place"], status["small"], 0) >= len(names):
            return f"the status {shown(status)} speaks of a place that is not there"
    return ""
