"""Settings of the documentation site; `nox -s docs` builds and checks it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "tools"))

project = "Stratagem"
copyright = "the authors of Stratagem"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "site_extension",
]
exclude_patterns = ["tools", "_build"]
html_theme = "furo"
html_title = "Stratagem"
html_favicon = "_static/favicon.svg"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
# Colours of code whose contrast is at least 4.5 on its background.
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"

# Every cross-reference must resolve.
nitpicky = True
# An attribute such as `trainer`, which several classes describe, is no link.
suppress_warnings = ["ref.python"]

myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline", "colon_fence"]

# A signature says the types. The text below it, for a class, is also that of its __init__.
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_param = True
napoleon_use_ivar = True
viewcode_follow_imported_members = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

# The prompt of a command is not copied, and neither is what it prints.
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True
