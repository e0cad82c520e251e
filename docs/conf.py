"""How Sphinx builds this folder: `python -m sphinx -W --keep-going -b html docs site`."""

import re

from sphinx.ext.autodoc.mock import _MockObject
from sphinx.ext.napoleon import GoogleDocstring
from sphinx.util.inspect import signature, stringify_signature

project = "twinfeed"
author = "The twinfeed authors"
project_copyright = author
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
html_theme = "furo"
html_title = "twinfeed"
html_copy_source = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]
# Output and prompts are not copied: `$` of `console`, and the others of examples in docstrings.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
exclude_patterns = ["site"]

myst_heading_anchors = 3
default_role = "literal"  # docstrings write names between single backticks
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # a dataclass's field is described once
napoleon_attr_annotations = False  # the signature has the types of fields
autodoc_member_order = "bysource"
# The reference is whole without the frameworks, and the extra `docs` stays small.
autodoc_mock_imports = [
    *("grain", "h5py", "jax", "keras", "matplotlib", "tensorflow", "torch", "webdataset")
]
autodoc_type_aliases = {"ArrayLike": "ArrayLike", "PerStep": "PerStep"}
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "show-inheritance": False}
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
add_module_names = False


_MockObject.__getitem__ = lambda mock, key: mock  # `Dataset[Any]` is shown as Dataset


_parse = GoogleDocstring._parse


def parse(docstring):
    """Parse a property's docstring as any other: napoleon takes its first line for `type: text`."""
    if docstring._what in ("attribute", "data", "property"):
        docstring._what = "method"
    _parse(docstring)


GoogleDocstring._parse = parse


def setup(app):
    """Write signatures and names of types as they are in the source."""
    app.connect("autodoc-process-signature", plain_names)
    app.connect("env-updated", drop_modules_without_source)


def drop_modules_without_source(app, env):
    """Keep builtins, the module of a type alias such as `Batch`, out of the list of sources."""
    for name in [name for name, source in env._viewcode_modules.items() if not source]:
        del env._viewcode_modules[name]


def plain_names(app, what, name, obj, options, given, returns):
    """Undo what Sphinx wraps around a type alias within a union, and what a mocked base hides."""
    if what == "class" and given == "(*args: Any, **kwargs: Any)":
        parameters = signature(obj.__init__, bound_method=True)
        given = stringify_signature(
            parameters, show_return_annotation=False, unqualified_typehints=True
        )
    return tuple(
        text and re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", text) for text in (given, returns)
    )
