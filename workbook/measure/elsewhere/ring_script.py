"""Horovod's script with its one changed import, as a program: on one host, or on two.

    torchrun ... -m workbook.measure.elsewhere.ring_script rank SCRIPT OPTIONS
    python -m workbook.measure.elsewhere.ring_script hosts SCRIPT OPTIONS

On one host labkit's ranks share memory. Of two hosts, which this machine plays, their messages
travel over TCP. The script knows nothing of this: labkit's count of bytes is read beside what the
script measures, and added to its report.
"""

import runpy
import sys
from pathlib import Path

import labkit.horovod
from labkit.runtime.agents import start_agents
from workbook.measure.elsewhere.turns import Counting, module_of

_LIMIT_S = 3600.0


def main(words: list[str]) -> int:
    """Be a rank that runs the script, or the launcher of two hosts. Returns the exit status."""
    role, *arguments = words
    return _start_hosts(arguments) if role == "hosts" else _run(arguments)


def _start_hosts(arguments: list[str]) -> int:
    program = ["-m", "workbook.measure.elsewhere.ring_script", "rank", *arguments]
    with start_agents(program, hosts=2, ranks_per_host=1) as agents:
        agents.follow(_LIMIT_S)
        return max(code or 0 for code in agents.returncodes)


def _run(arguments: list[str]) -> int:
    script = Path(arguments[0])
    module = module_of(script.parent)
    measured = Counting(lambda: labkit.horovod.engine().comm, module.Measured())

    def report(path: str, *, worker: int, **told: object) -> None:
        counted = {f"worker {worker}": measured.counted_bytes}
        write_report(path, worker=worker, **told, counted_bytes=counted)

    write_report, module.report = module.report, report
    module.Measured, sys.modules["experiment"] = lambda: measured, module
    sys.argv = arguments
    runpy.run_path(str(script), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
