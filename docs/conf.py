"""Settings of Sphinx: `bash jobs/docs.sh` builds these pages, and a warning fails the build."""

from __future__ import annotations

from pathlib import Path

from mpipipe import __version__

project = "mpipipe"
author = "The mpipipe developers"
copyright = "The mpipipe developers, BSD-3-Clause"
release = version = __version__

extensions = [
    "myst_nb",  # Markdown pages, and the notebook, which is executed at build time
    "sphinx.ext.autodoc",
    "numpydoc",
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

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_timeout = 120
nb_execution_raise_on_error = True

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # numpydoc's sections have the types
numpydoc_show_class_members = False  # automodule lists them
numpydoc_class_members_toctree = False

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
