"""Parts of notebook cells besides figures: predictions, progress, verdicts, live runs, sources.

prediction       asks for a prediction (its field: form; its numbers: typed), and compares it
                 with the formula and the measurement (row)
progress         what is passed on the workbook's pages, and how predictions turned out
record           stores both in one file
verdict          sentences made from measurements
live             a cell while ranks run: its lanes (lanes, lane_picture), losses and rates
display          the library's source code
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submodules={"verdict"})
