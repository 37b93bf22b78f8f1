"""For notebook cells, besides figures: predictions, sentences from measurements, source code.

predict   prediction, model and measurement of one quantity side by side
verdict   sentences made from measurements, with the likely reason (ratio: comparisons)
display   the library's source code
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submodules={"verdict"})
