"""For notebook cells, besides figures: predictions, progress, and the library's source code.

``predict`` asks for a prediction (``prediction``, its field ``form``, the numbers ``typed``);
``predict_row`` compares it (``row``). ``progress`` shows what is passed on the workbook's
``pages`` and how predictions turned out, from the ``record``, whose ``record_format`` is stored in
the ``progress_file``. ``display`` shows sources.
"""
