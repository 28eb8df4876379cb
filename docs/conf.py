"""Settings of Sphinx, which builds the site from the Markdown that ``docs/generate.py`` wrote.

``make docs`` does both. The pages load nothing from outside, and open from a folder without a
server.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, not an installed release

project = "Regimes"
html_title = "Regimes"
extensions = [
    "myst_parser",  # pages in Markdown
    "sphinx.ext.autodoc",  # the reference, from docstrings
    "sphinx.ext.napoleon",  # docstrings with Args: and Returns:
    "sphinx_copybutton",
]
myst_heading_anchors = 4  # page.md#a-heading, as on GitHub

default_role = "literal"  # `x` in a docstring is code, as in Markdown
autodoc_mock_imports = ["accelerate", "lightning", "tensorboard", "transformers", "wandb"]
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True  # as they are written, not as they are printed
autodoc_typehints_format = "short"
add_module_names = False
python_use_unqualified_type_names = True
maximum_signature_line_length = 88
napoleon_custom_sections = [("Attributes", "params_style")]
napoleon_use_rtype = False
toc_object_entries_show_parents = "hide"
suppress_warnings = ["ref.python"]  # a field named like two methods: no link, and no warning

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["style.css"]
html_copy_source = False


def escape(
    _app: Any, _kind: str, _name: str, _object: Any, _options: Any, lines: list[str]
) -> None:
    """Escape what reStructuredText would read as a substitution or a link: ``|x|`` and ``x_``.

    Code keeps its text: what stands in backticks, in examples and in indented blocks.
    """
    for i, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...", ".. ", ":")):
            parts = re.split(r"(`+[^`]*`+)", line)
            parts[::2] = [re.sub(r"\||(?<=\w)_(?!\w)", r"\\\g<0>", part) for part in parts[::2]]
            lines[i] = "".join(parts)


def skip(_app: Any, _kind: str, _name: str, member: Any, skipped: bool, _options: Any) -> bool:
    """Leave out what matplotlib adds to each of its subclasses: `set`, with a role of its own."""
    return skipped or getattr(member, "__module__", None) == "matplotlib.artist"


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-skip-member", skip)
    app.connect("autodoc-process-docstring", escape, priority=400)  # before napoleon
