"""Plugin of pytest, loaded before the others (``-p tests.lean_imports``): quicker imports.

nbval imports nbformat, and this jsonschema, which spends two seconds on making parsers of
internet addresses if it can. No notebook has an address that it would check.
"""

import sys

# As if it were not installed, which jsonschema allows.
sys.modules.setdefault("rfc3987_syntax", None)
