"""The documentation is true: its programs run and print what they say, and what it names exists.

A Python block runs after the blocks above it in the same file. `print(...)  # -> text` must print that text; a number in it
stands for every number within one unit of its last digit, so the writer chooses the tolerance by the digits shown.
"""

import ast
import functools
import pathlib
import re
import sys
from typing import Any

import pytest
from covering import some_of

import hypergrad as hg


ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
OPTIONAL = {"flax"}  # no dependency: its pages run where it happens to be installed
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


def programs(page: pathlib.Path) -> list[str]:
    """The Python blocks of a page, each preceded by so many empty lines that line numbers are those of the page."""
    text = page.read_text()
    blocks = re.finditer(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return ["\n" * text.count("\n", 0, block.start(1)) + block[1] for block in blocks]


def imported(page: pathlib.Path) -> set[str]:
    """The packages that a page imports."""
    nodes = [node for program in programs(page) for node in ast.walk(ast.parse(program))]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


def run(page: pathlib.Path) -> dict[int, str]:
    """Execute a page; what each line printed."""
    printed: dict[int, str] = {}

    def keep(*values: Any) -> None:
        line = sys._getframe(1).f_lineno
        printed[line] = " ".join(filter(None, [printed.get(line), *map(str, values)]))

    namespace = {"__name__": page.stem, "print": keep}
    for program in programs(page):
        exec(compile(program, str(page), "exec"), namespace)
    return printed


def promises(page: pathlib.Path) -> dict[int, str]:
    """What each line says that it prints."""
    numbered = (pair for program in programs(page) for pair in enumerate(program.splitlines(), 1))
    return {number: m[1] for number, line in numbered if (m := re.search(r"print\(.*\)  # -> (.*\S)", line))}


def agree(promised: str, printed: str) -> bool:
    if NUMBER.sub("#", promised) != NUMBER.sub("#", printed):
        return False
    pairs = zip(NUMBER.findall(promised), NUMBER.findall(printed), strict=True)
    return all(abs(float(shown) - float(got)) <= 1.001 * unit(shown) for shown, got in pairs)


def unit(number: str) -> float:
    """One unit of the last digit: 0.01 of "0.54", 1e-7 of "5.4e-6"; 0 of an integer, which must be equal."""
    mantissa, _, exponent = number.lower().partition("e")
    decimals = len(mantissa.partition(".")[2])
    return 10.0 ** (int(exponent or 0) - decimals) if decimals or exponent else 0.0


RUN = [p for p in PAGES if "```python" in p.read_text()]
SHORT = {"README.md", "derivation.md"}  # a tenth of the time; what others show has tests


@some_of("page", RUN, *(p for p in RUN if p.name in SHORT), ids=lambda p: p.name)
def test_programs_print_what_they_promise(page: pathlib.Path) -> None:
    for library in OPTIONAL & imported(page):
        pytest.importorskip(library)
    printed = run(page)
    for line, text in promises(page).items():
        assert agree(text, printed.get(line, "")), f"{page.name}:{line} promises {text!r}, prints {printed.get(line)!r}"


@pytest.mark.parametrize(
    ("promised", "printed", "same"),
    [
        ("-0.59", "-0.5951", True),
        ("-0.59", "-0.6011", False),
        ("0.59", "-0.59", False),
        ("True", "False", False),
        ("loss 0.5, then 0.1", "loss 0.54, then 0.14", True),
        ("loss 0.5", "gain 0.5", False),
        ("loss 0.5", "", False),
        ("3 words", "4 words", False),
        ("1e-9", "1.9e-9", True),
        ("1e-9", "2.1e-9", False),
    ],
)
def test_promises_can_be_broken(promised: str, printed: str, same: bool) -> None:
    assert agree(promised, printed) == same


def public_names() -> list[str]:
    """What `hypergrad/__init__.py` exports, and what its public modules define."""
    tree = ast.parse((ROOT / "hypergrad" / "__init__.py").read_text())
    names = [alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    package = ast.parse((ROOT / "hypergrad" / "studies" / "__init__.py").read_text())
    exported = [node for node in package.body if isinstance(node, ast.ImportFrom)]
    names += ["studies", *(f"studies.{alias.asname}" for node in exported for alias in node.names)]
    for module in (hg.callbacks, hg.plots, hg.testing):
        own = [n for n, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__ and n[0] != "_"]
        names += [f"{module.__name__.removeprefix('hypergrad.')}.{name}" for name in own]
    return names


@pytest.mark.parametrize("name", public_names())
def test_every_public_name_is_documented(name: str) -> None:
    assert re.search(rf"`hg\.{re.escape(name)}\b", (ROOT / "docs" / "api.md").read_text()), f"docs/api.md lacks `hg.{name}`"


@pytest.mark.parametrize("name", public_names())
def test_every_public_name_is_in_the_reference(name: str) -> None:
    page = (ROOT / "docs" / "reference.md").read_text()
    assert re.search(rf"^\.\. auto\w+:: hypergrad\.{re.escape(name)}\b", page, re.MULTILINE), f"reference.md lacks {name}"


def test_every_page_is_on_the_site() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    listed = {name for tree in re.findall(r"```{toctree}\n(.*?)```", index, re.DOTALL) for name in tree.split("\n")}
    assert {page.stem for page in (ROOT / "docs").glob("*.md")} - {"index"} <= listed


def test_every_error_is_documented() -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    for error in (hg.HypergradError, *hg.HypergradError.__subclasses__()):
        assert f"`hg.{error.__qualname__}`" in page, f"docs/errors.md lacks `hg.{error.__qualname__}`"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_what_a_page_names_exists(page: pathlib.Path) -> None:
    text = page.read_text()
    for dotted in re.findall(r"\bhg((?:\.[A-Za-z_]\w*)+)", text):
        functools.reduce(getattr, dotted.strip(".").split("."), hg)
    for path, name in re.findall(r"\b((?:hypergrad|experiments|tests)/[\w/]+\.py)(?:::(\w+))?", text):
        source = (ROOT / path).read_text()
        assert not name or re.search(rf"^\s*(?:def|class) {name}\b|^{name}\b", source, re.MULTILINE), f"no {name} in {path}"
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_readme_and_ci_run_the_same_command() -> None:
    command = 'pip install -e ".[all]" && pytest -n 2'
    assert command in (ROOT / "README.md").read_text()
    assert command in (ROOT / ".ci" / "run").read_text()
