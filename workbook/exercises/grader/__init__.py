"""The part that all checks share: run a learner's function, judge it, say what is wrong.

``exercise`` holds what a learner's function is called with; ``on_ranks`` and ``in_process`` call
it, ``watched`` for its messages and arguments; ``judge_values`` and
``judge_traffic`` judge; ``report`` shows the verdict; ``own_run`` draws what the function does.
"""

from workbook.exercises.grader.exercise import Case, Exercise, Target, Wrong
from workbook.exercises.grader.grader import WORLD_SIZES, Check, grade
from workbook.exercises.grader.in_process import judged, solved
from workbook.exercises.grader.report import Verdict

__all__ = ["WORLD_SIZES", "Case", "Check", "Exercise", "Target", "Verdict", "Wrong"]
__all__ += ["grade", "judged", "solved"]
