"""The site: `sphinx-build -W --keep-going docs build/site`. Pages are Markdown, the reference comes from docstrings."""

import inspect
import os
import re
import sys


os.environ.setdefault("JAX_PLATFORMS", "cpu")  # documenting needs no accelerator
sys.path.insert(0, os.path.abspath(".."))

project = "hypergrad"
author = "The hypergrad authors"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {"light_css_variables": {"code-font-size": "var(--font-size--small--2)"}}
html_title = "hypergrad"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
pygments_style = "friendly"
pygments_dark_style = "monokai"

smartquotes = False
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3  # links to headings, as on GitHub

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings say shapes and units; long annotations would bury the signature
autodoc_preserve_defaults = True


def as_restructured_text(app, what, name, obj, options, lines):
    """Docstrings are plain text, with formulas, and code between single backticks; fields are commented in the source."""
    del app, name, options
    if what == "class":
        lines += ["", *(f"- `{field}`{comment and f': {comment}'}" for field, comment in fields(obj))]
    if what in ("class", "function"):
        names = "|".join(inspect.signature(obj).parameters)
        lines[:] = [re.sub(rf"(?<![`\w.])({names}):(?= |$)", r"`\1`:", line) for line in lines]
    prose_and_code = "\n".join(lines).split("`")
    prose_and_code[::2] = [re.sub(r"([\\*|]|_(?!\w))", r"\\\1", prose) for prose in prose_and_code[::2]]
    lines[:] = "``".join(prose_and_code).split("\n")


def fields(cls):
    """(name, comment) of the annotated fields of a class whose source comments at least one of them."""
    found = re.findall(r"^    (\w+): [^#\n]*?(?:  # (.*))?$", inspect.getsource(cls), flags=re.MULTILINE)
    return found if any(comment for _, comment in found) else []


def setup(app):
    import hypergrad

    for error in (hypergrad.HypergradError, *hypergrad.HypergradError.__subclasses__()):
        error.__name__ = error.__qualname__  # its name carries the package, for the messages of compiled code
    app.connect("autodoc-process-docstring", as_restructured_text)
