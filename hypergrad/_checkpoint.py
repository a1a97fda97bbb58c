"""A meta-loop on disk: killed at any moment, it goes on from its last complete meta-step; one damaged file loses nothing.

Invariant: `run.json` is only ever replaced whole, after every file that it speaks of is on disk. It holds checksums of them
and of itself, and what does not match is not used.

    run.json               what run this is, where it was made, one record per meta-step, and how many there are (n)
    hypers-<i>.npz         the learned hypers of meta-step i < n, unconstrained, and again those of i - 1
    point-<k>-<token>.npz  hypers and meta-optimizer state that meta-step k starts from, for k = n and n - 1
    run-<k>-<token>.json   run.json as it was after k meta-steps, for k = n - 1

Of several processes (`_processes`) the first writes, and all read: the folder is one that all of them see.

The token is that of the owner that wrote the file (`_folder_owner`). A name that is taken is passed by: hypers then bear a
token too.
"""

import contextlib
import os
import pathlib
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from hypergrad._arrays import largest, packed, unpacked
from hypergrad._descent import Point
from hypergrad._folder_owner import Owner
from hypergrad._processes import gathered, in_all, in_first, is_first
from hypergrad._run_record import PASSING, RUN, Run, environment, file_entry, read_record
from hypergrad._safe_files import Damaged, digest, read, sealed
from hypergrad.hypers import describe


def folder_of(path: Any, run: Run) -> "Folder":
    """In several processes the same one, as far as they can tell."""
    cure = "All must see the same folder: name one of a file system that they share."
    return in_all(lambda: Folder(path, run), lambda folder: f"{folder.done} meta-steps in `checkpoint`", cure)


class Folder:
    """What a run of `hg.optimize` keeps in a folder. Making one reads run.json; to write takes a `claim`."""

    def __init__(self, path: str | os.PathLike[str], run: Run) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f'`checkpoint` must be the path of a folder, like "runs/first"; got {describe(path)}.')
        self.path, self.about = pathlib.Path(path).absolute(), run  # wherever the process goes
        if os.path.lexists(self.path) and not self.path.is_dir():
            raise ValueError(f"`checkpoint` must be a folder; {self.path} is a file.")
        self.owner: Owner | None = None
        self.claimed = False  # by the first process, on behalf of all
        self.content, self.run = read_record(self.path, run)

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *_: object) -> None:
        if self.owner is not None:
            self.owner.release()

    @property
    def done(self) -> int:
        """Complete meta-steps."""
        return len(self.run["steps"])

    @property
    def elsewhere(self) -> str:
        """How the place that wrote this differs from here; "" if it does not."""
        there, here = self.run["environment"], environment()
        return ", ".join(f"{k} {there.get(k)} there and {v} here" for k, v in here.items() if there.get(k) != v)

    def read_again(self) -> bool:
        """Whether run.json has changed since it was read."""
        before = self.content
        self.content, self.run = read_record(self.path, self.about)
        return self.content != before

    def claim(self) -> None:
        """Become the only one who writes here, and read what there is by then."""
        in_first(self._claim)
        self.claimed = True
        if not is_first():
            self.read_again()

    def _claim(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.owner = Owner(self.path)
            self.read_again()
            self.passing = {name for name in os.listdir(self.path) if PASSING.fullmatch(name)}
            if not self.done:
                self._commit(self.about.begun())
        except OSError as error:
            raise ValueError(
                f"`checkpoint` {self.path} cannot be written to ({error.strerror or error}), and there are meta-steps to "
                "keep. Pass a folder that can be, or no `checkpoint`."
            ) from error

    def check(self) -> None:
        """ValueError if the folder has gone over to another process."""
        in_first(lambda: self._owned.check())

    def save(self, hypers: Any, before: Any, point: Point, records: dict[str, Any]) -> None:
        """Commit one more meta-step: its hypers and those before it, the point after it, the records of all "steps"."""
        hypers, before, point = gathered((hypers, before, point))
        in_first(lambda: self._save(hypers, before, point, records))

    def _save(self, hypers: Any, before: Any, point: Point, records: dict[str, Any]) -> None:
        n = len(records["steps"])
        kept = [*self.run["hypers"][: n - 1], self._keep_hypers(n - 1, _hypers_content(hypers, before))]
        points = [file for file in self.run["points"] if file["step"] == n - 1]
        points.append({"step": n, **self._keep_passing(f"point-{n:06d}", "npz", packed({"point": point}))})
        if 0 < self.done < n:  # not where the last meta-step is made again
            self._keep_passing(f"run-{self.done:06d}", "json", self.content)
        self._commit(self.about.begun() | records | {"hypers": kept, "points": points})
        old = {name for name in self.passing if int(name.split("-")[1]) < n - 1}
        self._owned.remove(sorted(old))
        self.passing -= old

    def hypers(self, start: Point) -> list[Any]:
        """The learned hypers of each meta-step. start: the point that this run would begin with.

        Those of a file that cannot be used are taken from where they stand a second time, with a warning.
        """
        files, learned = self.run["hypers"], start.learned
        found, before, problems = dict[int, Any](), dict[int, Any](), dict[int, Damaged]()
        for i, file in enumerate(files):
            try:
                loaded = self._load(file, {"hypers": learned} | ({"before": learned} if i else {}))
                found[i], before[i - 1] = loaded["hypers"], loaded.get("before")
            except Damaged as problem:
                problems[i] = problem
        for i, why in problems.items():
            found[i], told = self._second_copy(i, why, before, start)
            warnings.warn(f"{self.path / files[i]['name']} {why}. {told}", stacklevel=5)
            content = _hypers_content(found[i], found.get(i - 1))
            if self.owner is not None and digest(content) == files[i]["sha256"]:  # it comes out as it was
                files[i] = self._keep_hypers(i, content)
        return [found[i] for i in range(len(files))]

    def point(self, start: Point, learned: list[Any]) -> tuple[Point, int]:
        """(p, k): meta-step k starts from p. k is `done`, or one less where the last point cannot be used.

        Damaged, if that would be so and the folder is not claimed: somebody may just have gone on.
        """
        last = self.done - 1
        try:
            return self._point(self.done, start), self.done
        except Damaged as error:
            if not self.claimed:
                raise
            why = error
        try:
            # At the very start, or without a state of its own, the meta-optimizer goes on from the hypers alone.
            alone = last == 0 or not jax.tree.leaves(start.state)
            point = Point(learned[last], start.state) if alone else self._point(last, start)
        except Damaged as other:
            raise ValueError(
                f"`checkpoint` {self.path} cannot go on: {why}, and {other}. They hold the state of the meta-optimizer: "
                f"restore one of them from a backup. Without them meta_steps={last} still reads the history, and the hypers "
                "that it ends with can begin another run, in another folder."
            ) from other
        warnings.warn(
            f"`checkpoint` {self.path}: {why}. Going on from the point before: meta-step {last} is made again.",
            stacklevel=5,
        )
        return point, last

    def _point(self, step: int, like: Point) -> Point:
        for file in self.run["points"]:
            if file["step"] == step:
                try:
                    return self._load(file, {"point": like})["point"]
                except Damaged as problem:
                    raise Damaged(f"{file['name']} {problem}") from problem
        raise Damaged(f"the point of meta-step {step} was not kept")

    def _second_copy(self, i: int, problem: Damaged, before: dict[int, Any], start: Point) -> tuple[Any, str]:
        """(the hypers of meta-step i from another place than their file, what to say of it)."""
        last = self.done - 1
        if i in before:
            return before[i], "The file after it has its hypers too: nothing is lost."
        if i == last > 0:
            with contextlib.suppress(Damaged):
                return self._point(i, start).learned, "A point has its hypers too: nothing is lost."
        if i == 0 and digest(_hypers_content(start.learned, None)) == self.run["hypers"][0]["sha256"]:
            return start.learned, "Its hypers are those given here: nothing is lost."
        if i in (0, last):
            raise ValueError(
                f"{self.path / self.run['hypers'][i]['name']} {problem}, and its hypers are found nowhere else. "
                "The run is known by them: restore the file from a backup, or pass another `checkpoint` folder."
            )
        nan = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), start.learned)
        return nan, f"The file after it is no better: the hypers of meta-step {i} are lost, and NaN in the history."

    def _load(self, file: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
        """What a file of the record holds, if it is what was written."""
        if file["bytes"] > largest(like):
            raise Damaged(f"is said to have {file['bytes']} bytes, which is too many for what it holds")
        content = read(self.path / file["name"], file["bytes"])
        if len(content) < file["bytes"]:
            raise Damaged(f"has {len(content)} bytes of {file['bytes']}")
        if digest(content) != file["sha256"]:
            raise Damaged(f"does not match its checksum in {RUN}")
        return unpacked(content, like)

    @property
    def _owned(self) -> Owner:
        assert self.owner is not None, "claim() comes first"
        return self.owner

    def _keep_hypers(self, i: int, content: bytes) -> dict[str, Any]:
        return self._keep([f"hypers-{i:06d}.npz", f"hypers-{i:06d}-{self._owned.token}.npz"], content)

    def _keep_passing(self, stem: str, suffix: str, content: bytes) -> dict[str, Any]:
        name = f"{stem}-{self._owned.token}.{suffix}"
        self.passing.add(name)
        return self._keep([name], content)

    def _keep(self, names: list[str], content: bytes) -> dict[str, Any]:
        """A file of this content, under the first name that is free or has it already."""
        for name in names:
            if not os.path.lexists(self.path / name):
                self._owned.publish(name, content)
                return file_entry(name, content)
            with contextlib.suppress(Damaged):
                if read(self.path / name, len(content)) == content:  # of a meta-step that was not committed
                    return file_entry(name, content)
        raise ValueError(f"{self.path / names[-1]} is in the way: it is not of this run. Move it elsewhere.")

    def _commit(self, record: dict[str, Any]) -> None:
        content = sealed(record)
        self._owned.publish(RUN, content)
        self.content, self.run = content, record


def _hypers_content(hypers: Any, before: Any) -> bytes:
    """before: those of the meta-step before, None for the first."""
    return packed({"hypers": hypers} | ({} if before is None else {"before": before}))
