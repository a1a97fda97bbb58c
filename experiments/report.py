"""Turn the records of the experiments into docs/experiments.md.

    python -m experiments.report [--results results] [--docs docs]

Each script's section is its docstring, its rows (the thesis's number, ours, why they differ), its certificate and its
pictures, copied small into docs/images. A section whose record is not there is kept as it is, so that one experiment can be
redone alone.
"""

import ast
import dataclasses
import pathlib
import re
from typing import Any

import tyro

from experiments import _record


ORDER = (
    "toy_valley", "learning_rate_schedules", "schedule_gradient", "per_weight_penalty", "learned_training_set",
    "architecture_sharing", "chaos", "initial_weights", "memory", "adam_schedules", "gradient_links", "optimizer_race",
    "curvature_optimizers", "language_model", "unlearning", "long_horizon",
)  # fmt: skip

INTRODUCTION = (
    "# Chapter 6, redone",
    "Each figure of Chapter 6 of the thesis, by a script over the public names of the library, with several seeds, images "
    "that nothing was chosen by, and certificates; the last sections go beyond the thesis. `python -m experiments.report` "
    'wrote this page from the records of the scripts. "Ours" is the mean over seeds, and what follows ± is the standard '
    "deviation over them.",
    "Run any of them with `python -m experiments.<name>`. Without data at hand most take scikit-learn's digits, and under "
    "three minutes on two cores (unlearning: five; gradient links: nine; the language model: ten; the long horizon: "
    "twelve; rules of curvature: thirty-five); `--data mnist` reads `mnist.npz` from the folder `HYPERGRAD_DATA` and "
    "repeats the setting of the thesis. `--help` lists what can be changed.",
)


@dataclasses.dataclass(frozen=True)
class Config:
    results: pathlib.Path = pathlib.Path("results")
    docs: pathlib.Path = pathlib.Path("docs")
    width: int = 900  # of a picture's copy, in pixels


def main(config: Config) -> pathlib.Path:
    page = config.docs / "experiments.md"
    sections = _sections(page.read_text()) if page.exists() else {}
    for name in ORDER:
        path = config.results / name / f"{name}.json"
        if path.exists():
            sections[name] = section(name, _record.read(path), config)
        print(f"{name:24}  {path if path.exists() else 'kept as it was' if name in sections else 'no record, left out'}")
    page.parent.mkdir(parents=True, exist_ok=True)
    body = [f"<!-- {name} -->\n\n{sections[name]}" for name in ORDER if name in sections]
    page.write_text("\n\n".join([*INTRODUCTION, *body]) + "\n")
    print(f"wrote {page}")
    return page


def section(name: str, record: dict[str, Any], config: Config) -> str:
    """Markdown, without a newline at the end."""
    title, text = _explained(name)
    parts = [f"## {title}", text, *([_table(record["thesis"])] if record["thesis"] else [])]
    parts += [_certified(record["certificate"])] if record["certificate"] else []
    for picture in record["pictures"]:
        target = config.docs / "images" / f"{name}-{picture['file']}"
        copy_small(config.results / name / picture["file"], target, config.width)
        parts.append(f"![{picture['caption']}](images/{target.name})\n\n*{picture['caption']}*")
    return "\n\n".join([*parts, _provenance(name, record)])


def _sections(page: str) -> dict[str, str]:
    """name -> section of a page that `main` wrote."""
    _, *pieces = re.split(r"^<!-- (\w+) -->\n", page, flags=re.MULTILINE)
    return {name: text.strip() for name, text in zip(pieces[::2], pieces[1::2], strict=True)}


def _explained(name: str) -> tuple[str, str]:
    """(title, text) from the docstring of a script: its first line, and its paragraphs but for the command."""
    docstring = ast.get_docstring(ast.parse((pathlib.Path(__file__).parent / f"{name}.py").read_text())) or name
    title, *paragraphs = docstring.split("\n\n")
    prose = (p for p in paragraphs if not p.startswith("    "))
    return title.rstrip("."), "\n\n".join(" ".join(p.split("\n")) for p in prose)


def _table(rows: list[dict[str, Any]]) -> str:
    lines = ["| figure | quantity | thesis | ours | why different |", "| --- | --- | --- | --- | --- |"]
    last = ""
    for row in (_record.Row(**row) for row in rows):
        why = "as above" if row.why and row.why == last else row.why
        last = row.why
        lines.append(f"| {row.figure} | {row.quantity} | {_record.shown(row.thesis)} | {row.mean_and_spread} | {why} |")
    return "\n".join(lines)


def _certified(certificate: dict[str, Any]) -> str:
    """A sentence; `certificate` is one, or {name: one}."""
    if "exact" in certificate:
        bits, theory = certificate["bits_per_parameter_step"], certificate["ideal_bits_per_parameter_step"]
        if certificate["exact"]:
            return (
                f"Reversal exact, every bit compared; {bits:.4f} bits per parameter and step stored, {theory:.4f} in theory."
            )
        return f"Reversal FAILED: {certificate['first_mismatch']}."
    failed = [name for name, proof in certificate.items() if not proof["exact"]]
    if failed:
        return f"Reversal FAILED: {', '.join(failed)}."
    return f"{len(certificate)} reversals, all exact, every bit compared."


def _provenance(name: str, record: dict[str, Any]) -> str:
    config, versions = record["config"], record["versions"]
    options = f" --data {config['data']}" if config.get("data", "digits") != "digits" else ""
    options += f" --tasks {' '.join(config['tasks'])}" if "tasks" in config else ""
    seconds = f"{record['seconds']:.0f} s on {record['cores']} cores" if record["seconds"] else "time not recorded"
    return f"`python -m experiments.{name}{options}`: {seconds} ({record['device']}, jax {versions['jax']})."


def copy_small(source: pathlib.Path, target: pathlib.Path, width: int) -> None:
    """A picture at most `width` pixels wide, in 256 colours."""
    from PIL import Image  # matplotlib depends on it

    target.parent.mkdir(parents=True, exist_ok=True)
    with Image.open(source) as picture:
        small = picture.convert("RGB")
        if small.width > width:
            small = small.resize((width, round(small.height * width / small.width)), Image.Resampling.LANCZOS)
        small.quantize(256).save(target, optimize=True)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
