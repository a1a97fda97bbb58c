"""Damage a checkpoint folder, and let several processes write to one: is the history ever wrong, or an error without a name?

    python -m experiments.benchmarks.damage [--cases 300] [--writers 20] [--seed 0]

A case is a copy of a folder, of a run that ended or was killed, with one file damaged: mostly a byte flipped or the end cut
off, else the file lost, empty, longer, exchanged for another, or a link. The run goes on there. Right is the history of a
run left alone, in every bit but the seconds, also the next time; or a ValueError that names the folder, and every file as
it was.

A round of writers is two processes on one folder: twins; one that is suspended, anywhere or just before some step of a
write, while the other takes its place, to wake up after that or meanwhile; one on what passes for another machine; one that
is killed where it was suspended. Right is: one finishes with the history of a run left alone, who lost the folder says so in
an error that names it, and the folder holds that history.
"""

import argparse
import collections
import json
import os
import pathlib
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import hypergrad as hg


DONE, WANTED = 4, 6  # meta-steps in the folder that is damaged, and in the history that is wanted
LONG = 200  # of writers: some seconds


def train_fn(hypers: Any, key: jax.Array) -> Any:
    loss = lambda w, _, batch: jnp.sum((w - batch) ** 2)  # noqa: E731
    start = jnp.array([2.0, -1.0]) + 0.1 * jax.random.normal(key, 2)
    return hg.train(loss, start, hg.SGD(hypers["rate"], 0.5), hg.full_batch(jnp.ones(2)), steps=4).params


def learn(folder: pathlib.Path | None, meta_steps: int, callbacks: Any = ()) -> hg.Result:
    hypers = {"rate": hg.positive(hg.PerStep(jnp.full(4, 0.05)))}
    return hg.optimize(
        train_fn, lambda w: jnp.sum((w - 0.5) ** 2), hypers, meta_steps=meta_steps, meta_optimizer=optax.adam(0.1),
        monitor_fn=lambda w: jnp.sum(jnp.abs(w)), checkpoint=folder, callbacks=callbacks,
    )  # fmt: skip


def digest(result: hg.Result) -> list[Any]:
    """Everything but times, to the last bit."""
    steps = [done._replace(seconds=0.0) for done in result.history]
    return [repr(np.asarray(x).tolist()) for x in jax.tree.leaves((steps, result.hypers, result.best.step))]


def contents(folder: pathlib.Path) -> dict[str, Any]:
    """What is in a folder, but for claims and files on their way, which come and go."""
    paths = [path for path in folder.iterdir() if not path.name.startswith(("owner-", "."))]
    return {path.name: os.readlink(path) if path.is_symlink() else path.read_bytes() for path in paths}


def damaged(folder: pathlib.Path, rng: random.Random) -> str:
    """Damage one file; what was done, in words."""
    path = rng.choice(sorted(folder.iterdir()))
    content, kind = bytearray(path.read_bytes()), rng.choice(6 * ["flipped"] + 6 * ["cut"] + list(OTHERS))
    if kind == "flipped":
        place, change = rng.randrange(len(content)), rng.randrange(1, 256)
        content[place] ^= change
        path.write_bytes(content)
        return f"{path.name}: byte {place} ^ {change}"
    if kind == "cut":
        length = rng.randrange(len(content))
        path.write_bytes(content[:length])
        return f"{path.name}: cut to {length} of {len(content)} bytes"
    other = rng.choice(sorted(set(folder.iterdir()) - {path}))
    if kind == "linked":
        path.rename(folder / "elsewhere")
        path.symlink_to(folder / "elsewhere")
    elif kind == "lost":
        path.unlink()
    else:
        path.write_bytes({"emptied": b"", "longer": bytes(content) + b"\n ", "exchanged": other.read_bytes()}[kind])
    return f"{path.name}: {kind}{f' for {other.name}' if kind == 'exchanged' else ''}"


OTHERS = ("lost", "emptied", "longer", "exchanged", "linked")


def outcome(folder: pathlib.Path, expected: list[Any], learn: Any = learn) -> str:
    """What becomes of a run that goes on in a damaged folder; "WRONG: ..." is what must not be."""
    before = contents(folder)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            learn(folder, WANTED - 1)
            found = digest(learn(folder, WANTED))
    except ValueError as error:
        if str(folder) not in str(error):
            return f"WRONG: an error without a name: {error}"
        after = contents(folder)
        changed = [name for name in before if after.get(name) != before[name]]
        return f"WRONG: an error, and {changed} changed" if changed else "an error that names the folder"
    except Exception as error:
        return f"WRONG: {type(error).__name__}: {error}"
    if found != expected:
        return "WRONG: another history"
    return "the right history, and a warning" if caught else "the right history"


def damage(root: pathlib.Path, cases: int, seed: int) -> collections.Counter[str]:
    expected, bases = digest(learn(None, WANTED)), [root / "ended", root / "killed"]
    learn(bases[0], DONE)
    child(bases[1], meta_steps=DONE + 1, kill=DONE).wait()
    counts: collections.Counter[str] = collections.Counter()
    for case in range(cases):
        rng, folder = random.Random(f"{seed} {case}"), root / f"case-{case}"
        shutil.copytree(bases[case % 2], folder)
        what = damaged(folder, rng)
        result = outcome(folder, expected)
        counts[result] += 1
        if result.startswith("WRONG") or case % 50 == 49:
            print(f"case {case} of {cases} ({what}): {result}", flush=True)
        shutil.rmtree(folder)
    return counts


def child(folder: pathlib.Path, meta_steps: int = LONG, **options: Any) -> subprocess.Popen[str]:
    """A process that learns into the folder. stop: before which of its steps on disk; kill: after so many meta-steps."""
    command = [sys.executable, "-m", __spec__.name, "--child", str(folder), "--meta-steps", str(meta_steps)]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def be_a_child(arguments: argparse.Namespace) -> None:
    if arguments.host:
        platform.node = lambda: arguments.host
    count = 0

    def stopping(function: Any) -> Any:
        def stopped(*inputs: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == arguments.stop:
                os.kill(os.getpid(), signal.SIGSTOP)
            return function(*inputs, **options)

        return stopped

    def killing(done: hg.MetaStep) -> None:
        if done.step == arguments.kill:
            os.kill(os.getpid(), signal.SIGKILL)

    for name in ("fsync", "replace", "unlink", "listdir"):
        setattr(os, name, stopping(getattr(os, name)))
    learn(arguments.child, arguments.meta_steps, [killing])


def wait_for(process: subprocess.Popen[str], reached: Any) -> None:
    """Until it holds, or the process has ended."""
    while process.poll() is None and not reached():
        time.sleep(0.002)


def is_stopped(process: subprocess.Popen[str]) -> bool:
    return pathlib.Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def steps(folder: pathlib.Path) -> int:
    run = folder / "run.json"
    return len(json.loads(run.read_text())["steps"]) if run.exists() else 0


def suspended(folder: pathlib.Path, rng: random.Random) -> subprocess.Popen[str]:
    """A process that has stopped before some step on disk, of its claim, its first meta-steps or later; or anywhere."""
    if rng.random() < 0.75:
        process = child(folder, stop=rng.randint(1, rng.choice([10, 40, 14 * LONG // 2])))
        wait_for(process, lambda: is_stopped(process))
    else:
        process, reached = child(folder), rng.randrange(LONG)
        wait_for(process, lambda: steps(folder) >= reached)
        process.send_signal(signal.SIGSTOP)
    return process


def twins(folder: pathlib.Path, rng: random.Random) -> list[subprocess.Popen[str]]:
    first = child(folder)
    time.sleep(rng.choice([0.0, rng.uniform(0.0, 0.2), rng.uniform(0.0, 4.0)]))
    return [child(folder), first]


def replaced(folder: pathlib.Path, rng: random.Random) -> list[subprocess.Popen[str]]:
    """It wakes up when the other has finished."""
    first = suspended(folder, rng)
    second = child(folder)
    wait_for(second, lambda: False)
    first.send_signal(signal.SIGCONT)
    return [second, first]


def overtaken(folder: pathlib.Path, rng: random.Random) -> list[subprocess.Popen[str]]:
    """It wakes up while the other is at work."""
    first = suspended(folder, rng)
    second, reached = child(folder), rng.randint(steps(folder) + 1, LONG)
    wait_for(second, lambda: steps(folder) >= reached)
    first.send_signal(signal.SIGCONT)
    return [second, first]


def moved(folder: pathlib.Path, rng: random.Random) -> list[subprocess.Popen[str]]:
    """The first is, or so it says, on another machine, and works on."""
    first, reached = child(folder, host="elsewhere"), rng.randrange(LONG // 2)
    wait_for(first, lambda: steps(folder) >= reached)
    return [child(folder), first]


def killed(folder: pathlib.Path, rng: random.Random) -> list[subprocess.Popen[str]]:
    first = suspended(folder, rng)
    first.kill()
    return [child(folder), first]


SCENES = (twins, replaced, overtaken, moved, killed)


def verdict(folder: pathlib.Path, processes: list[subprocess.Popen[str]], expected: list[Any]) -> str:
    """Of processes, whose order says who is to finish first where both can; "WRONG: ..." is what must not be."""
    told, finished = [], 0
    for process in processes:
        _, errors = process.communicate()
        last = (errors.strip().splitlines() or [""])[-1]
        finished += process.returncode == 0
        if process.returncode not in (0, -signal.SIGKILL):
            if not last.startswith(f"ValueError: `checkpoint` {folder} is "):
                return f"WRONG: an error without a name: {last}"
            told.append("was told at its start" if "is in use" in last else "was told when it looked")
    if not finished:
        return "WRONG: nobody finished"
    before = contents(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the machine was another
        if digest(learn(folder, LONG)) != expected or contents(folder) != before:
            return "WRONG: another history"
    return f"the right history; {' and '.join(['one finished', 'both finished'][finished - 1 : finished] + told)}"


def writers(root: pathlib.Path, rounds: int, seed: int) -> collections.Counter[str]:
    expected = digest(learn(None, LONG))
    counts: collections.Counter[str] = collections.Counter()
    for number in range(rounds):
        rng, scene, folder = random.Random(f"{seed} {number}"), SCENES[number % len(SCENES)], root / f"round-{number}"
        result = verdict(folder, scene(folder, rng), expected)
        counts[f"{scene.__name__}: {result}"] += 1
        print(f"round {number} of {rounds}, {scene.__name__}: {result}", flush=True)
    return counts


def main(cases: int, rounds: int, seed: int) -> collections.Counter[str]:
    with tempfile.TemporaryDirectory() as temporary:
        root = pathlib.Path(temporary)
        counts = damage(root, cases, seed) + writers(root, rounds, seed)
    print(f"jax {jax.__version__}, seed {seed}: {cases} damaged folders, {rounds} rounds of writers")
    for result, count in sorted(counts.items()):
        print(f"{count:5d}  {result}")
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--writers", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    # What a child is told.
    parser.add_argument("--child", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--meta-steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--stop", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--kill", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--host", default="", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is not None:
        be_a_child(given)
    elif any("WRONG" in result for result in main(given.cases, given.writers, given.seed)):
        sys.exit(1)
