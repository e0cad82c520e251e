"""How Sphinx builds this folder: `python -m sphinx -W --keep-going -b html docs site`."""

import re

project = "twinfeed"
author = "The twinfeed authors"
project_copyright = author
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = "twinfeed"
html_copy_source = False
exclude_patterns = ["site"]

myst_heading_anchors = 3
default_role = "literal"  # docstrings write names between single backticks
autodoc_member_order = "bysource"
autodoc_type_aliases = {"ArrayLike": "ArrayLike", "PerStep": "PerStep"}
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "show-inheritance": False}
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
add_module_names = False


def setup(app):
    """Write names of types as they are in the source."""
    app.connect("autodoc-process-signature", plain_names)


def plain_names(app, what, name, obj, options, *texts):
    """Undo what Sphinx wraps around a type alias within a union."""
    return tuple(text and re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", text) for text in texts)
