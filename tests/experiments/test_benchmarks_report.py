"""What the benchmarks write into the documents: each number in its place, once, and none lost."""

import pathlib

import pytest

from experiments import _record
from experiments.benchmarks import _tables, performance, report, roads, torch_roads


PLAIN, UNROLL = (next(r for r in roads.ROADS if r.name == name) for name in ("plain training, scan", "unroll"))
PAGE, README, LOG = (
    pathlib.Path(__file__).parents[2] / name
    for name in ("docs/performance.md", "README.md", "experiments/benchmarks/LOG.md")
)
TABLE = "|  | {} | {} |\n| --- | --- | --- |\n| **`hg.Reversible`** | **3.23** | 3.7 |\n| unrolled | 4.15 | 829 |\n"


def place(text, name):
    return text.split(f"<!-- begin {name} -->")[1].split(f"<!-- end {name} -->")[0]


def rows(text):
    """Of the table in a text: {method: {column: cell}}, without code marks."""
    lines = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    header, _, *body = lines
    return {line[0].replace("`", ""): dict(zip(header[1:], line[1:], strict=True)) for line in body}


def check_agreement(readme, page):
    """The README's cost table is a part of the page's."""
    told, full = rows(place(readme, "cost")), rows(place(page, "mlp"))
    assert told and any("hg.Reversible" in method for method in told)
    bare = lambda cells: {column: cell.strip("*") for column, cell in cells.items()}  # noqa: E731
    for name, cells in told.items():
        assert bare(cells).items() <= bare(full.get(name, {})).items(), f"{name}: {cells}, on the page {full.get(name)}"


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    """A record of one workload, measured by the command that measures all, with few roads."""
    out = tmp_path_factory.mktemp("performance")
    with pytest.MonkeyPatch.context() as patch:
        stand_in = UNROLL._replace(name="hg.Reversible, scan", kind="ours")  # quick to compile
        patch.setattr(performance, "roads_for", lambda loops, options: [PLAIN, stand_in, UNROLL])
        performance.main(performance.Config(parts=("mlp",), rounds=2, tiny=True, out=out))
    return out / "mlp.json"


@pytest.fixture
def documents(tmp_path):
    """Copies of what the report writes into."""
    for path in (PAGE, README, LOG):
        (tmp_path / path.name).write_text(path.read_text())
    return dict(docs=tmp_path, readme=tmp_path / README.name, log=tmp_path / LOG.name)


def test_the_report_fills_its_places(record, documents):
    text = report.main(report.Config(results=record.parent, **documents)).read_text()
    numbers = _record.read(record)["numbers"]
    assert f"{numbers['parameters']} parameters. A step of plain training takes" in text
    assert numbers["machine"]["processor"] in place(text, "mlp")
    assert set(rows(place(text, "mlp"))) == {
        "plain training, no gradient",
        "**hg.Reversible**",
        "unrolled, everything stored",
    }
    assert place(text, "conv") == place(PAGE.read_text(), "conv")  # no record of it here
    check_agreement(documents["readme"].read_text(), text)
    assert documents["readme"].read_text() != README.read_text()


def test_the_log_grows_by_what_is_new_and_loses_nothing(record, documents):
    for _ in range(2):
        report.main(report.Config(results=record.parent, **documents))
    text, before = documents["log"].read_text(), LOG.read_text().rstrip()
    assert text.startswith(before) and text.removeprefix(before).count(": mlp\n") == 1
    assert text.removeprefix(before).count("| **hg.Reversible, scan** |") == 1


def test_the_readme_and_the_page_tell_the_same_numbers():
    check_agreement(README.read_text(), PAGE.read_text())


@pytest.mark.parametrize(("number", "wrong"), [("**3.23**", "**3.1**"), ("| 829 |", "| 8.29 |"), ("unrolled", "rolled")])
def test_a_readme_that_differs_from_the_page_is_caught(number, wrong):
    readme = f"<!-- begin cost -->\n{TABLE.format('time', 'MiB')}<!-- end cost -->"
    page = f"<!-- begin mlp -->\n{TABLE.format('time', 'MiB')}<!-- end mlp -->"
    check_agreement(readme, page)
    with pytest.raises(AssertionError):
        check_agreement(readme.replace(number, wrong), page)


def test_each_method_stands_in_its_fastest_form():
    road = dict(kind="ours", steps=4, seconds=[1.0], bytes=2.0**20, predicted_bytes=None, predicted_time=None)
    names = {"hg.Reversible, scan": 4.0, "hg.Reversible, host": 3.0, "unroll": 5.0, "unroll, the same options": 4.5}
    names |= {"plain training, loop": 1.0, "equinox, 8 states": 9.0, "equinox, default": 8.0, "torch: higher": 7.0}
    found = _tables.fastest([road | {"name": name, "ratios": [ratio]} for name, ratio in names.items()])
    assert {key: road["ratios"] for key, road in found.items()} == {
        "hg.Reversible": [3.0], "unroll": [4.5], "plain training": [1.0], "equinox, 8 states": [9.0],
        "equinox, default": [8.0], "torch: higher": [7.0],
    }  # fmt: skip
    assert _tables.label(found["hg.Reversible"]) == "**`hg.Reversible`**, from Python"
    assert _tables.label(found["unroll"]) == "unrolled, everything stored"


def test_every_road_belongs_to_a_method():
    everywhere = [*roads.roads_for(loops=True, options=True), *torch_roads.METHODS]
    assert {_tables.method({"name": getattr(road, "name", road)}) for road in everywhere} == set(_tables.METHODS)


def test_the_documents_have_all_places_and_the_report_says_what_is_missing():
    for document, sections in ((PAGE, report.PAGE), (README, report.README)):
        for name in sections:
            assert report.filled(document.read_text(), name, "new").count("\n\nnew\n\n") == 1
    with pytest.raises(ValueError, match="no place called 'mlp'"):
        report.filled("nothing", "mlp", "new")
    assert report.filled("<!-- begin a -->old<!-- end a --> rest", "a", "new").endswith("new\n\n<!-- end a --> rest")
