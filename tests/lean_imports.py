"""Plugin of pytest, loaded before the others (``-p tests.lean_imports``): quicker imports.

The kernels of nbval are forks of a process that has the imports, see ``workbook.kernels``.

nbval imports nbformat, and this jsonschema, which spends two seconds on making parsers of
internet addresses if it can. No notebook has an address that it would check.
"""

import os
import sys

# As if it were not installed, which jsonschema allows.
sys.modules.setdefault("rfc3987_syntax", None)
os.environ["JUPYTER_DEFAULT_PROVISIONER_NAME"] = "labkit-warm"
