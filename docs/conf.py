"""Settings of Sphinx: `bash jobs/docs.sh` builds these pages, and a warning fails the build."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from numpydoc.xref import DEFAULT_LINKS

from mpipipe import __version__

project = "mpipipe"
author = "The mpipipe developers"
copyright = "The mpipipe developers, BSD-3-Clause"
release = version = __version__

extensions = [
    "myst_nb",  # Markdown pages, and the notebook, which is executed at build time
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.mathjax",
    "numpydoc",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = [
    "_build",
    "examples",
    "jupyter_execute",
    "sg_execution_times.rst",
    "auto_examples/sg_execution_times.rst",
    "auto_examples/*.ipynb",
    "**/.ipynb_checkpoints",
]
suppress_warnings = ["config.cache"]  # the settings of the gallery hold a function

default_role = "py:obj"  # a name in single backticks is code, and a link if it is known here
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_timeout = 120
nb_execution_raise_on_error = True

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # numpydoc's sections have the types
numpydoc_show_class_members = False  # automodule lists them
numpydoc_class_members_toctree = False
numpydoc_xref_param_type = True
numpydoc_xref_ignore = "all"  # but whole names, such as mpi4py.MPI.Comm
numpydoc_xref_aliases = {word: word for word in DEFAULT_LINKS}  # bool and its kind lead nowhere

INVENTORIES = {"numpy": "https://numpy.org/doc/stable/", "mpi4py": "https://mpi4py.readthedocs.io/en/stable/"}


def reachable(folder: Path) -> dict[str, tuple[str, str]]:
    """Fetch the inventories of other pages into a folder; without a network there are none, and no links."""
    found = {}
    for name, address in INVENTORIES.items():
        file = folder / f"{name}.inv"
        if not file.exists():
            try:
                with urlopen(f"{address}objects.inv", timeout=5) as answer:
                    content = answer.read()
            except (URLError, OSError, ValueError):
                continue
            folder.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        found[name] = address, str(file)
    return found


intersphinx_mapping = reachable(Path(__file__).with_name("_build") / "inventories")

sphinx_gallery_conf = {
    "examples_dirs": "examples",
    "gallery_dirs": "auto_examples",
    "plot_gallery": False,  # an example needs four ranks: the tests run it and compare what it prints with its head
    "default_thumb_file": str(Path(__file__).with_name("figures") / "one_f_one_b.svg"),
    "download_all_examples": False,
    "show_signature": False,
    "notebook_extensions": set(),  # a notebook has one rank
    "remove_config_comments": True,
    "within_subsection_order": "FileNameSortKey",
}

html_theme = "pydata_sphinx_theme"
html_title = "mpipipe"
html_show_sourcelink = False
html_theme_options = {
    "navigation_with_keys": False,
    "navbar_center": [],  # all pages stand at the left
    "primary_sidebar_end": [],
    "secondary_sidebar_items": ["page-toc"],
    "show_toc_level": 1,
}
html_sidebars = {"**": ["contents.html"]}
templates_path = ["_templates"]
html_static_path = ["_static"]
html_css_files = ["mpipipe.css"]
copybutton_exclude = ".linenos, .gp, .go"
copybutton_selector = "div:not(.highlight-output):not(.output) > div.highlight pre"


def link_to_gallery(_app: object, _page: str, source: list[str]) -> None:
    """Lead from a page to the gallery where the file leads to a script, so that both show on a forge, too."""
    text = re.sub(r"\]\(examples/(\w+)\.py\)", r"](auto_examples/\1.rst)", source[0])
    source[0] = text.replace("](examples)", "](auto_examples/index.rst)")


def setup(app: object) -> None:
    app.connect("source-read", link_to_gallery)
