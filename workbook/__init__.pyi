# isort: skip_file
# "X as X" hands a name on (PEP 484); workbook/__init__.py reads this list, too.
from . import check as check, plots as plots, widgets as widgets
from .notebook import verdict as verdict
from .notebook.display import show_source as show_source
from .notebook.prediction import predict as predict, predict_row as predict_row
from .notebook.progress import progress as progress
