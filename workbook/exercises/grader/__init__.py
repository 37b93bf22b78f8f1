"""What all checks share: run a learner's function, judge values and traffic, say what is wrong.

``exercise`` holds what a learner's function is called with; ``on_ranks`` and ``in_process`` call
it, ``watched`` for the library's functions and within ``limits``; ``judge_values`` (with
``compare`` and ``wrong_tensor``) and ``judge_traffic`` (with ``critical_path``) judge; ``score``
compares a puzzle's answer with the best known; ``stub`` tells an answer that has not begun from
one that still contains the stub's raise; ``words`` has the sentence of every mistake, and
``report`` the table. ``grader`` puts them together. ``own_run`` (with ``held_memory``) draws what
the learner's function does.
"""

from workbook.exercises.grader.exercise import Case, Exercise, Target
from workbook.exercises.grader.grader import WORLD_SIZES, grade, returns
from workbook.exercises.grader.in_process import answers
from workbook.exercises.grader.report import Verdict
from workbook.exercises.grader.words import Mistake

__all__ = ["WORLD_SIZES", "Case", "Exercise", "Mistake", "Target", "Verdict"]
__all__ += ["answers", "grade", "returns"]
