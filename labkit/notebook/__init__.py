"""For notebook cells, besides figures: predictions, progress, verdicts, live runs, sources.

predict          asks for a prediction (prediction; its field, form; the numbers, typed), and
                 compares it with the model and the measurement (row)
progress         what is passed on the workbook's pages, and how predictions turned out
record           stores both in the progress_file (record_format)
verdict          sentences made from measurements, with the likely reason (ratio: comparisons)
live             what ranks do while they run
display          the library's source code
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submodules={"verdict"})
