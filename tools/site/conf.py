"""The site: ``make html`` builds it from the pages, the documents and the docstrings, offline.

The source is the whole repository (``sphinx-build -c tools/site . build/html``), so that links
between its files lead to the right pages.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(Path(__file__).parent))

project, author = "labkit", "the authors of labkit"
extensions = ["myst_nb", "autoapi.extension", "sphinx.ext.napoleon", "pages"]
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "notebooks/*.ipynb", "build/api/**"]
include_patterns += ["labkit/workload/data/*.md", "notebooks/scripts/project/*.md"]
exclude_patterns = ["AGENTS.md"]

# The pages as they are stored: nothing runs. Their links name a heading as Jupyter does.
nb_execution_mode, nb_merge_streams = "off", True
nb_ipywidgets_js = {}
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
myst_heading_slug_func = "pages.slug"

# Read, not imported: the site needs no PyTorch.
autoapi_dirs, autoapi_root = [str(ROOT / "labkit")], "build/api"
autoapi_options = ["members", "show-module-summary", "imported-members"]
suppress_warnings = ["autoapi.python_import_resolution", "ref.python"]
autoapi_add_toctree_entry, autoapi_file_patterns = False, ["*.pyi", "*.py"]

html_theme, html_title = "pydata_sphinx_theme", "labkit"
html_math_renderer, html_copy_source = "mathml", False
html_static_path, html_css_files = ["static"], ["site.css"]
# All pages are listed at the left of each, not in the bar at the top.
html_theme_options = {"navbar_center": [], "secondary_sidebar_items": ["page-toc"]}
html_sidebars = {"**": ["globaltoc.html"]}
