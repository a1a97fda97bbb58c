"""The rooms of the house: imports point one way, importing is light and quiet, and the public names are the agreed ones."""

import ast
import inspect
import os
import pathlib
import subprocess
import sys

import pytest

import hypergrad as hg


PACKAGE = pathlib.Path(hg.__file__).parent
EXPERIMENTS = PACKAGE.parent / "experiments"

DESIGN = PACKAGE.parent / "docs" / "design.md"


def rooms() -> list[set[str]]:
    """The rows of the table in docs/design.md, top to bottom: a room imports from its own row and from those above."""
    text = DESIGN.read_text().split("## Rooms")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return [set(row.replace("`", "").replace(",", " ").split()) for row in rows]


# Importable by all of the rooms; themselves they import only each other and `exact`.
GROUND, *ROOMS = rooms()
PLACE = {name: place for place, room in enumerate(ROOMS) for name in room}

PUBLIC = {
    "train", "Trained", "Statistics", "PerStep", "minibatches", "stacked", "full_batch", "host_batches",
    "SGD", "HeavyBall", "Adam", "AdamW", "RMSProp", "Adagrad", "DiagonalGGN", "DiagonalGGNMC", "KFAC", "KFLR", "KFRA",
    "norm_constraint",
    "AdEMAMix", "ADOPT", "Muon", "NorMuon", "muon_with_adamw", "Shampoo", "SOAP", "LARS", "LAMB", "Lion", "Nesterov",
    "NAdamW", "ScheduleFreeAdamW", "Sophia", "SophiaG",
    "with_gradient_link",
    "clip", "clip_by_global_norm", "add_decayed_weights", "freeze", "partition", "to_optax",
    "Reversible", "Truncated", "Unrolled", "Checkpointed", "Auto", "plan", "Plan", "Disk", "record", "Record",
    "positive", "unit_interval", "bounded", "fixed", "natural", "scatter", "knots", "concrete_dropout",
    "Microbatches", "hypergradient", "optimize", "restarts", "compiler_options", "Result", "MetaStep", "callbacks",
    "check_reversal", "Certificate", "testing", "plots", "studies", "curvature",
    "diagnose", "Diagnosis", "check_gradient", "GradientCheck", "check_smoothness", "Smoothness",
    "HypergradError", "ReversalError", "RangeError", "BufferFullError", "NonFiniteError", "StorageError",
}  # fmt: skip


def modules(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder.rglob("*.py"))


def imported(path: pathlib.Path) -> list[str]:
    """Every module that a file imports, also inside functions: `hypergrad.run.step`, `hypergrad`, `jax.numpy`, ..."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            assert all(alias.name != "*" for alias in node.names), f"{path}: imports name what they take"
            # `from hypergrad import _door` means the module; `from hypergrad import train` the package.
            inner = [f"hypergrad.{a.name}" for a in node.names if node.module == "hypergrad" and is_module(a.name)]
            names += inner or [str(node.module)]
    return names


def is_module(name: str) -> bool:
    return (PACKAGE / f"{name}.py").exists() or (PACKAGE / name / "__init__.py").exists()


def room(module: str) -> str:
    """`hypergrad.run.step` -> `run`."""
    return module.split(".")[1] if "." in module else module


def own_room(path: pathlib.Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


LIBRARY = [path for path in modules(PACKAGE) if path != PACKAGE / "__init__.py"]


@pytest.mark.parametrize("path", LIBRARY, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_left(path):
    own = own_room(path)
    assert own in GROUND or own in PLACE, f"{own} has no place among the rooms"
    for module in imported(path):
        if module.split(".")[0] != "hypergrad":
            continue
        other = room(module)
        if own in GROUND:
            assert other in GROUND | {"exact"}, f"{path} stands on the ground floor and imports {module}"
        else:
            assert other in GROUND or PLACE[other] <= PLACE[own], f"{path} imports {module}, to its right"


def test_the_import_check_catches_a_wrong_import(tmp_path):
    lie = tmp_path / "lie.py"
    lie.write_text("def f():\n    from hypergrad import _optimize\n    import hypergrad.adjoints.reversible\n")
    assert [room(m) for m in imported(lie)] == ["_optimize", "adjoints"]
    assert PLACE["_optimize"] > PLACE["adjoints"] > PLACE["run"]


def test_the_library_never_imports_experiments():
    for path in modules(PACKAGE):
        assert all(module.split(".")[0] != "experiments" for module in imported(path)), path


def uses(path: pathlib.Path) -> set[str]:
    """The attributes of `hg` that a file reads."""
    nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)]
    return {n.attr for n in nodes if isinstance(n.value, ast.Name) and n.value.id == "hg"}


@pytest.mark.parametrize("path", modules(EXPERIMENTS), ids=lambda p: str(p.relative_to(EXPERIMENTS)))
def test_experiments_use_the_public_api_alone(path):
    ours = {module for module in imported(path) if module.split(".")[0] == "hypergrad"}
    assert ours <= {"hypergrad", "hypergrad.callbacks", "hypergrad.optimizers", "hypergrad.testing", "hypergrad.studies"}
    assert uses(path) <= public_names(), f"{path} reads {uses(path) - public_names()} of hypergrad"


def test_import_is_light_and_sets_nothing():
    program = (
        "import sys, jax, hypergrad, jax.numpy as jnp\n"
        "print(sorted({'optuna', 'hypergrad.studies', 'matplotlib', 'sklearn', 'experiments', 'tqdm'} & set(sys.modules)))\n"
        "print(jax.config.jax_enable_x64, jnp.ones(1).dtype)\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "JAX_ENABLE_X64"}
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], env=env, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["[]", "False float32"], done.stderr


def public_names() -> set[str]:
    """What `hypergrad/__init__.py` exports by `from ... import X as X`, and `studies`, which it imports on demand."""
    nodes = [n for n in ast.parse((PACKAGE / "__init__.py").read_text()).body if isinstance(n, ast.ImportFrom)]
    assert all(alias.asname == alias.name for node in nodes for alias in node.names)
    return {alias.name for node in nodes for alias in node.names} | {"studies"}


def test_public_names_are_the_agreed_ones():
    assert public_names() == PUBLIC


def test_names_inside_public_modules():
    assert {"Progress", "StopOnGrowth", "JsonLines"} <= set(vars(hg.callbacks))
    assert {"check_inverse", "check_hypergradient"} <= set(vars(hg.testing))
    assert {"learning", "schedules", "images", "cotangents", "buffer"} <= set(vars(hg.plots))
    studies = {"HypergradientSampler", "report_gradient", "suggest_tree", "RecordTrials", "prune_on_error"}
    assert studies <= set(vars(hg.studies))


def test_studies_without_optuna_names_what_to_install():
    program = "import sys; sys.modules['optuna'] = None\nimport hypergrad as hg\n"
    program += "try: hg.studies\nexcept ImportError as e: print(e)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "hypergrad.studies needs optuna: pip install optuna\n", done.stderr


@pytest.mark.parametrize("name", sorted(PUBLIC) + ["callbacks.Progress", "callbacks.StopOnGrowth", "callbacks.JsonLines"])
def test_public_names_are_documented(name):
    thing = hg
    for part in name.split("."):
        thing = getattr(thing, part)
    text = thing.__doc__ or ""
    # Dataclasses and named tuples write a docstring of their own, the signature, if they have none.
    assert len(text.split()) >= 3 and not text.startswith(f"{name.split('.')[-1]}("), f"hypergrad.{name}: {text!r}"


def names_of(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_signatures_are_the_agreed_ones():
    assert names_of(hg.train) == [
        "loss", "params", "optimizer", "batches", "theta", "steps", "state", "statistics", "metric", "microbatches",
        "adjoint", "throw",
    ]  # fmt: skip
    for function in (hg.hypergradient, hg.diagnose, hg.check_gradient, hg.check_smoothness):
        assert names_of(function)[:4] == ["train_fn", "val_fn", "hypers", "key"]
    assert names_of(hg.optimize)[:3] == ["train_fn", "val_fn", "hypers"]
    assert {"meta_steps", "meta_optimizer", "key", "callbacks", "jit", "skip_nonfinite"} <= set(names_of(hg.optimize))
    assert names_of(hg.optimize)[-3:] == ["aggregate", "diagnose", "stop_on_growth"]
    assert names_of(hg.minibatches) == ["data", "batch_size", "key", "replacement"]
    assert names_of(hg.Reversible) == [
        "capacity", "fraction_bits", "driver", "buffer", "isolate", "progress", "memory_budget",
    ]  # fmt: skip
    agreed = ["loss", "params", "optimizer", "batches", "theta", "steps", "state"]
    assert names_of(hg.check_reversal)[: len(agreed)] == agreed
    assert names_of(hg.studies.HypergradientSampler) == ["meta_optimizer", "inner_sampler", "seed"]
    assert names_of(hg.studies.report_gradient) == ["trial", "grads", "space"]
    assert names_of(hg.studies.suggest_tree) == ["trial", "hypers"]
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    assert all(p.kind is keyword_only for p in list(inspect.signature(hg.train).parameters.values())[4:])


def test_fields_are_the_agreed_ones():
    fields = {"params", "losses", "state", "status", "buffer_words", "statistics", "metrics"}
    assert set(hg.Trained.__dataclass_fields__) == fields
    assert hg.Result._fields == ("hypers", "best", "history")
    assert hg.MetaStep._fields == (
        "step", "value", "gradient_norm", "seconds", "status", "bits_per_parameter_step", "hypers",
        "value_error", "gradient_error", "failed_seeds", "monitor", "gradients", "clipped_seeds", "growth",
    )  # fmt: skip
    agreed = {"exact", "first_mismatch", "bits_per_parameter_step", "ideal_bits_per_parameter_step", "max_abs"}
    assert agreed <= set(hg.Certificate._fields)


def test_errors_have_one_base_and_belong_to_the_package():
    for error in (hg.ReversalError, hg.RangeError, hg.BufferFullError, hg.NonFiniteError, hg.StorageError):
        assert issubclass(error, hg.HypergradError) and error.__module__ == "hypergrad"
    assert issubclass(hg.RangeError, ValueError) and issubclass(hg.NonFiniteError, FloatingPointError)
