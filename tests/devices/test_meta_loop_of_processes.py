"""`hg.optimize` in several processes: one history on all, one folder, and another number of processes goes on from it."""

import json
import pathlib
from typing import Any

import pytest
from covering import long
from processes import in_processes, on_devices, started
from test_same_bits import lines


META = """
import json
mesh = mesh_of(jax.device_count())
data, w = put((X, Y), mesh, P(None, "data")), put(START, mesh, P())
STOP = int(os.environ.get("STOP", "3"))

def train_fn(h, key):
    return run(h, w, data, hg.Microbatches(8, mesh=mesh)).params

def val_fn(params):
    return jnp.mean((layer(params, X[0]) @ params["c"] - Y[0]) ** 2)

def die(done):
    if os.environ.get("DIES") == f"{jax.process_index()} {done.step}":
        os._exit(9)

result = hg.optimize(
    train_fn, val_fn, {"rate": hg.positive(0.05), "l2": hg.positive(0.01)},
    meta_steps=STOP, checkpoint=os.environ["FOLDER"], callbacks=[die],
)
print("history", json.dumps([[done.value, done.gradient_norm] for done in result.history]))
"""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of one process, never stopped."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    return histories([on_devices(META, 1, FOLDER=str(folder), **QUICK)])[0]


QUICK = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def histories(outputs: list[str]) -> list[Any]:
    return [json.loads(lines(output, "history")[0]) for output in outputs]


@pytest.mark.long
@pytest.mark.parametrize("then", [1, 4], ids=["one", "four"])
def test_begun_by_two_and_ended_by_others(then: int, expected: Any, tmp_path: pathlib.Path) -> None:
    options = {"FOLDER": str(tmp_path / "run"), **QUICK}
    first = histories(in_processes(META, 2, STOP="2", **options))
    assert first == [expected[:2]] * 2
    last = [on_devices(META, 1, **options)] if then == 1 else in_processes(META, then, **options)
    assert histories(last) == [expected] * then


@pytest.mark.long
def test_one_that_dies_ends_the_other_and_the_folder_goes_on(expected: Any, tmp_path: pathlib.Path) -> None:
    options = {"FOLDER": str(tmp_path / "run"), **QUICK}
    with started(META, 2, DIES="1 1", **options) as processes:
        codes = [process.wait(timeout=300) for process in processes]
    assert codes[1] == 9 and codes[0] != 0
    assert histories([on_devices(META, 1, **options)]) == [expected]


FAILS = """
mesh = mesh_of(jax.device_count())
data, w = put((X, Y), mesh, P(None, "data")), put(START, mesh, P())
cut = hg.Microbatches(8, mesh=mesh) if "eager" in WAYS else None
trained = lambda rate, w, data, **options: run({**H, "rate": rate}, w, data, cut, **options).params

def optimized(rate, scale=1.0, **options):
    train_fn, val_fn = lambda h, key: trained(h, w, data), lambda w: scale * jnp.sum(w["a"])
    return hg.optimize(train_fn, val_fn, hg.positive(rate), meta_steps=1, **options)

def kept(name, *scale, **options):
    return optimized(0.1, *scale, checkpoint=f"{os.environ['FOLDER']}/{name}", **options)

def bad(done):
    if jax.process_index() == 1:
        raise RuntimeError("mine")

class Begins:
    def begin(self, history):
        bad(None)

    def __call__(self, done):
        pass

own = f"{os.environ['FOLDER']}/own-{jax.process_index()}"
if jax.process_index() == 1:
    open(own, "w").close()
momenta = {"a": 0.9, "b": put(np.full(24, 0.5, np.float32), mesh, P("data")), "c": 0.9}
if "divided" in WAYS:
    done = hg.train(loss, w, hg.SGD(0.05, momenta), hg.stacked(data), theta=0.01)
    print("moved", float(done.losses[-1]) < float(done.losses[0]))

for name, text, call in [
    ("jit", "RangeError", lambda: jax.block_until_ready(jax.jit(trained)(1e9, w, data))),
    ("eager", "RangeError", lambda: trained(1e9, w, data)),
    ("optimize", "RangeError", lambda: optimized(1e9)),
    ("folder", "/dev/null/run cannot be", lambda: optimized(0.1, checkpoint="/dev/null/run")),
    ("callback", "mine", lambda: kept("callback", callbacks=[bad])),
    ("begin", "mine", lambda: kept("begin", callbacks=[Begins()])),
    ("file", "must be a folder", lambda: optimized(0.1, checkpoint=own)),
    ("lines", "", lambda: kept("lines", callbacks=[hg.callbacks.JsonLines(f"{os.environ['FOLDER']}/lines.jsonl")])),
    ("values", "jax.make_array_from_process_local_data", lambda: kept("values", 1.0 + jax.process_index())),
    ("stops", "callbacks must return the same", lambda: kept("stops", callbacks=[lambda _: jax.process_index() == 1])),
    ("text", "returns", lambda: kept("text", callbacks=[lambda _: "x"] * jax.process_index())),
    ("host", "driver='scan'", lambda: trained(0.1, w, data, adjoint=hg.Reversible(driver="host"))),
    ("words", "buffer='device'", lambda: trained(0.1, w, data, adjoint=hg.Reversible(buffer="host"))),
]:
    if name not in WAYS:
        continue
    try:
        call()
        jax.effects_barrier()
    except Exception as error:
        print("error", name, text in f"{type(error).__name__} {error}")
"""


WAYS = (
    "jit",
    "eager",
    "divided",
    "optimize",
    "folder",
    "callback",
    "begin",
    "file",
    "values",
    "stops",
    "text",
    "host",
    "words",
)


@pytest.mark.parametrize("ways", [WAYS[3:], long(WAYS)], ids=["short", "all"])
def test_errors_are_raised_in_all(ways: tuple[str, ...], tmp_path: pathlib.Path) -> None:
    options = {"FOLDER": str(tmp_path), **QUICK}
    found = in_processes(f"WAYS = {(*ways, 'lines')!r}\n{FAILS}", 2, **options)
    outputs = [lines(output, "error") for output in found]
    assert outputs[0] == outputs[1] == [f"{name} True" for name in ways if name != "divided"]
    assert [lines(output, "moved") for output in found] == [["True"] * ("divided" in ways)] * 2
    assert len((tmp_path / "lines.jsonl").read_text().splitlines()) == 1, "of two processes the first writes"


DIAGNOSED = """
mesh = mesh_of(jax.device_count())
data, w = put((X, Y), mesh, P(None, "data")), put(START, mesh, P())
end = lambda h, w, data: jnp.sum(run(h, w, data, None).params["a"] ** 2)
roads = {"eager": end, "jit": jax.jit(end)}
found = [hg.diagnose(lambda h, key, f=f: f(h, w, data), lambda v: v, H) for f in roads.values()]
curved = hg.diagnose(lambda h, key: end(h, w, data), lambda v: v, H, curvature=True)
print("verdict", *[one.verdict for one in (*found, curved)], *[one.runs for one in found], curved.excess.shape == (40,))
"""


@pytest.mark.long
def test_each_of_two_hears_the_diagnosis() -> None:
    outputs = in_processes(DIAGNOSED, 2)
    assert [lines(output, "verdict") for output in outputs] == [["healthy healthy healthy 1 1 True"]] * 2
