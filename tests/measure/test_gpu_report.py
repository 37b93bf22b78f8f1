"""gpu-report: what it keeps, what it tells, what it leaves behind; and its page."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from ranks import wait_until

from workbook.measure import processes
from workbook.measure.gpu_report import steps as steps_of_report
from workbook.measure.gpu_report.command import Report, main
from workbook.measure.gpu_report.folder import Folder, State
from workbook.measure.gpu_report.page import write_page
from workbook.measure.gpu_report.placements import QUICK, Size, settings_of
from workbook.measure.gpu_report.steps import Step, all_steps
from workbook.measure.gpu_report.tables import BENCHES, beside
from workbook.measure.processes import run_command

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "data" / "results"


def step(name, source, budget_s=30.0, **more):
    return Step(
        name, f"The {name}", (sys.executable, "-c", textwrap.dedent(source)), budget_s, **more
    )


def report(path, steps, seconds=60.0):
    return Report(Folder(path), steps, ROOT, time.monotonic() + seconds)


def make(path, *steps, seconds=60.0):
    """Make or continue a report; its exit status, and {step: status}."""
    found = report(path, list(steps), seconds)
    with found.folder.in_use():
        status = found.make()
    return status, {state.name: state.status for state in found.states()}


def test_without_a_gpu_it_is_refused_with_the_next_step(refused, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    line = refused("gpu-report", "--out", str(tmp_path / "report"))
    assert "this machine has none that can be used" in line
    assert "python -m labkit doctor" in line
    assert not (tmp_path / "report").exists()


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="is not empty and holds no report"):
        Folder(tmp_path)
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_two_reports_do_not_share_a_folder(tmp_path):
    with (
        Folder(tmp_path / "r").in_use(),
        pytest.raises(ValueError, match="another gpu-report is writing"),
        Folder(tmp_path / "r").in_use(),
    ):
        pass


class TestSteps:
    def test_a_failed_step_is_told_and_the_others_run(self, tmp_path, capsys):
        bad = step("bad", "import sys; print('labkit: rank 1 was killed'); sys.exit('later line')")
        slow = step("slow", "import time; time.sleep(100)", budget_s=0.5)
        absent = step("absent", "", why_not="tests/gpu is not here")
        good = step("good", "print('fine')")
        status, found = make(tmp_path / "r", bad, slow, absent, good)
        assert status == 1
        assert found == {
            "bad": "failed", "slow": "out of time", "absent": "skipped", "good": "done"
        }  # fmt: skip
        states = json.loads((tmp_path / "r" / "report.json").read_text())["steps"]
        assert states[0]["told"] == "labkit: rank 1 was killed"
        page = (tmp_path / "r" / "index.html").read_text()
        assert "labkit: rank 1 was killed" in page
        assert "tests/gpu is not here" in page
        assert "bad (failed), slow (out of time)" in capsys.readouterr().out

    def test_what_is_done_is_kept_and_what_was_not_runs_first(self, tmp_path):
        counted = f"open({str(tmp_path / 'ran')!r}, 'a').write('%s ')"
        first, second, third = (step(name, counted % name) for name in "abc")
        again = "import sys, os; sys.exit(not os.path.exists({!r}))"
        failing = step("f", counted % "f" + "; " + again.format(str(tmp_path / "mended")))
        assert make(tmp_path / "r", failing, first, second)[0] == 1
        (tmp_path / "mended").touch()
        status, found = make(tmp_path / "r", failing, first, second, third)
        assert (status, set(found.values())) == (0, {"done"})
        assert (tmp_path / "ran").read_text().split() == ["f", "a", "b", "c", "f"]

    def test_other_hardware_versions_or_code_make_a_step_run_again(self, tmp_path, monkeypatch):
        one = step("one", f"open({str(tmp_path / 'ran')!r}, 'a').write('x')")
        for machine in ("here", "here", "elsewhere"):
            monkeypatch.setattr(
                "workbook.measure.gpu_report.command.machine_key", lambda m=machine: m
            )
            make(tmp_path / "r", one)
        assert (tmp_path / "ran").read_text() == "xx"
        # A step that is not reached then shows nothing of the other machine.
        monkeypatch.setattr(
            "workbook.measure.gpu_report.command.machine_key", lambda: "a third one"
        )
        assert make(tmp_path / "r", one, seconds=1)[1] == {"one": "not reached"}
        assert "What it printed" not in (tmp_path / "r" / "index.html").read_text()

    def test_changed_files_make_a_step_run_again(self, tmp_path):
        notebook = tmp_path / "a.ipynb"
        notebook.write_text("{}")
        one = replace(step("one", ""), files=(notebook,))
        before = one.key("here")
        assert one.key("here") == before
        notebook.write_text("{} ")
        assert one.key("here") != before

    def test_when_the_time_is_up_the_rest_is_not_reached(self, tmp_path):
        status, found = make(tmp_path / "r", step("one", ""), seconds=5)
        assert (status, found) == (1, {"one": "not reached"})

    def test_the_most_valuable_steps_come_first_and_fit_into_half_an_hour(self):
        found = all_steps(ROOT, 2)
        names = [one.name for one in found]
        assert names[:4] == ["doctor", "placements", "all-reduce", "tests"]
        pages = len(list((ROOT / "notebooks").glob("*.ipynb")))
        assert sum(name.startswith("notebook-") for name in names) == pages
        assert len(names) == len(set(names))
        assert sum(one.budget_s for one in found[:6]) <= 30 * 60
        # Without the workbook's folder there are no tests and no notebooks.
        alone = {one.name: one.why_not for one in all_steps(None, 1)}
        assert "is not here" in alone["tests"]
        assert not any(name.startswith("notebook-") for name in alone)

    def test_the_commands_are_those_of_the_command_line(self, monkeypatch, tmp_path):
        from labkit.__main__ import make_parser

        for gpus, quick in ((1, False), (2, True), (8, False)):
            for one in all_steps(ROOT, gpus, quick):
                program, _, module, *words = one.command(tmp_path, 100.0)
                assert program == sys.executable
                assert "{" not in " ".join(words)
                if module == "labkit":
                    make_parser().parse_args(words)

    def test_the_own_placements_of_the_experiment_are_measured_first(self):
        found = settings_of(Size())
        assert [one.placement for one in found[:4]] == [
            "1 device", "2 devices", "3 devices", "4 devices"
        ]  # fmt: skip
        assert {(one.batch_size, one.frozen) for one in found} == {
            (32, 0), (32, 31), (64, 0), (64, 31)
        }  # fmt: skip
        assert Size().pixels == 299
        assert len(settings_of(QUICK)) * 2 == len(found)


class TestNothingIsLeft:
    # A process with a session of its own, as a notebook's kernel has; what a killed NCCL leaves.
    STARTS = """
        import os, pathlib, signal, subprocess, sys, tempfile, time
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        pathlib.Path("/dev/shm/nccl-labkit-test-%d" % os.getpid()).write_text("x")
        pathlib.Path(tempfile.mkdtemp(), "file").write_text("x")
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        print(child.pid, os.getpid(), tempfile.gettempdir(), flush=True)
        time.sleep(1000)
    """

    def test_after_a_step_whose_time_is_up(self, tmp_path, monkeypatch):
        monkeypatch.setattr(processes, "_GRACE_S", 0.2)
        words = [sys.executable, "-c", textwrap.dedent(self.STARTS)]
        ended = run_command(words, tmp_path / "log", 1.5, tmp_path, {})
        assert ended.timed_out
        child, own, folder = (tmp_path / "log").read_text().split()
        for pid in (child, own):
            assert (
                not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text()
            )
        assert not Path(folder).exists()
        assert not Path(f"/dev/shm/nccl-labkit-test-{own}").exists()

    def test_shared_memory_of_others_stays(self, tmp_path):
        other = Path(f"/dev/shm/nccl-labkit-other-{os.getpid()}")
        other.write_text("x")
        try:
            run_command([sys.executable, "-c", ""], tmp_path / "log", 10, tmp_path, {})
            assert other.exists()
        finally:
            other.unlink()

    @pytest.mark.fresh
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
    def test_stopped_at_any_moment_it_leaves_what_is_done_and_goes_on_later(
        self, number, tmp_path
    ):
        program = tmp_path / "program.py"
        program.write_text(
            textwrap.dedent(f"""
            import sys, time
            from pathlib import Path
            from workbook.measure.gpu_report import command
            from workbook.measure.gpu_report.steps import Step

            command.num_gpus = lambda: 1
            run = sys.executable, "-c"
            sleeps = "import os, time; print(os.getpid(), flush=True); time.sleep(float(%r))"
            command.all_steps = lambda *_: [
                Step("first", "First", (*run, "pass"), 30),
                Step("second", "Second", (*run, sleeps % sys.argv[1]), 30),
            ]
            sys.exit(command.main({str(tmp_path / "r")!r}, root=Path({str(ROOT)!r})))
            """)
        )
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}

        def started(seconds):
            command = [sys.executable, program, seconds]
            return subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )

        folder = tmp_path / "r"
        with started("1000") as process:

            def logs():
                return [p.read_text() for p in folder.glob(".unfinished-*/log.txt")]

            assert wait_until(lambda: any(logs()), 60)
            pid = int(next(filter(None, logs())))
            process.send_signal(number)
            out, err = process.communicate(timeout=240)
        assert process.returncode == 130, err
        assert "no process of the report remains" in err
        assert wait_until(lambda: not Path(f"/proc/{pid}").exists(), 10)
        assert sorted(p.name for p in folder.iterdir()) == ["index.html", "report.json", "steps"]
        assert [p.name for p in (folder / "steps").iterdir()] == ["first"]
        assert "Second" in (folder / "index.html").read_text()
        if number != signal.SIGINT:
            return
        with started("0") as process:
            out, err = process.communicate(timeout=240)
        # The step that was cut off has other words now; the first is kept.
        assert process.returncode == 0, err
        assert "kept from an earlier call: first" in out

    def test_what_a_killed_report_has_left_is_removed_by_the_next(self, tmp_path):
        left = tmp_path / "r" / ".unfinished-abc"
        (tmp_path / "r" / "steps").mkdir(parents=True)
        left.mkdir()
        (left / "result.json").write_text('{"half": ')
        assert make(tmp_path / "r", step("one", ""))[0] == 0
        assert not left.exists()


class Values(HTMLParser):
    """The numbers of a page, and what it would load from elsewhere."""

    def __init__(self, page):
        super().__init__()
        self.numbers, self.loads = [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if "data-value" in found:
            self.numbers.append(float(found["data-value"]))
        if tag in ("img", "script", "link", "iframe"):
            self.loads.append((tag, found.get("src", "")[:10]))
        assert tag != "img" or found["alt"]


def medians_in(record):
    """All numbers of a record, and the medians of its lists of numbers."""
    import statistics

    if isinstance(record, dict):
        return [one for value in record.values() for one in medians_in(value)]
    if isinstance(record, list):
        plain = [one for one in record if isinstance(one, (int, float))]
        own = [statistics.median(plain)] if plain else []
        return own + [one for value in record for one in medians_in(value)]
    return [record] if isinstance(record, (int, float)) else []


class TestPage:
    @pytest.fixture
    def folder(self, tmp_path):
        """A report whose benches are the CPU records themselves."""
        folder = Folder(tmp_path / "r")
        for name, bench in BENCHES.items():
            place = folder.steps / name
            place.mkdir(parents=True)
            shutil.copy(RESULTS / bench.cpu_file, place / "result.json")
            (place / "log.txt").write_text("<b>printed</b>")
        shutil.copy(RESULTS / "all_reduce_2_ranks.png", folder.steps / "all-reduce" / "a.png")
        return folder

    def test_its_numbers_are_those_of_the_json_beside_the_cpu_records(self, folder):
        states = [State(name, f"The {name}", "done", 1.0) for name in BENCHES]
        write_page(folder, states, ROOT)
        page = Values((folder.path / "index.html").read_text())
        assert page.loads == [("img", "data:image")]
        records = [
            json.loads((RESULTS / bench.cpu_file).read_text()) for bench in BENCHES.values()
        ]
        known = {round(one, 12) for one in medians_in(records)}
        for name in BENCHES:
            record = folder.result(name)
            table = beside(name, record, record)
            assert len(table.rows) > 3
            ratios = [row[-1].value for row in table.rows]
            assert ratios == pytest.approx([1.0] * len(ratios))
        if "compare" in BENCHES:
            # Its epochs are divided by their number first, see ``compare.summary``.
            folder.steps.joinpath("compare", "result.json").unlink()
            write_page(folder, states, ROOT)
            page = Values((folder.path / "index.html").read_text())
        assert len(page.numbers) > 300
        assert all(round(one, 12) in known or one == 1.0 for one in page.numbers)

    def test_what_was_printed_is_text(self, folder):
        write_page(folder, [State("ddp", "<DDP>", "failed", told="<it>")], ROOT)
        page = (folder.path / "index.html").read_text()
        assert "&lt;b&gt;printed&lt;/b&gt;" in page
        assert "&lt;DDP&gt;" in page
        assert "failed: &lt;it&gt;" in page

    def test_a_damaged_result_is_no_end(self, folder):
        (folder.steps / "ddp" / "result.json").write_text('{"rows": [')
        write_page(folder, [State("ddp", "DDP", "done")], ROOT)
        assert "Beside" not in (folder.path / "index.html").read_text()


@pytest.mark.slow
@pytest.mark.fresh
def test_with_pretended_gpus_it_makes_its_folder(tmp_path):
    """The placements, in ranks that believe in two GPUs; the page shows what the JSON holds."""
    environment = {**os.environ, "LABKIT_PRETEND_GPUS": "2", "LABKIT_PROGRESS": "off"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests" / "pretended"), str(ROOT)])
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    command = [sys.executable, "-m", "labkit", "gpu-report", "--quick"]
    command += ["--steps", "placements,pipeline"]
    done = subprocess.run(
        [*command, "--out", tmp_path / "r"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "r" / "steps" / "placements" / "result.json").read_text())
    placements = {row["placement"]: row for row in record["rows"] if row["trained"] == "all"}
    two = placements["2 devices"]
    assert two["devices"] == ["cuda:0", "cuda:1"]
    assert [(hop["cut"], hop["direction"]) for hop in two["hops"]] == [
        (0, "forward"), (0, "backward")
    ]  # fmt: skip
    assert max(row["loss_difference"] for row in record["rows"]) < 1e-5
    reasons = {row["placement"]: row["reason"] for row in record["not_measured"]}
    assert reasons["4 devices"] == "needs 4 devices, and there are 2: cuda:0, cuda:1"
    assert {(row["source"], row["target"]) for row in record["copies"]} >= {
        ("cuda:0", "cuda:1"), ("cuda:1", "cuda:0"), ("cpu", "cuda:1")
    }  # fmt: skip
    pipeline = json.loads((tmp_path / "r" / "steps" / "pipeline" / "result.json").read_text())
    assert pipeline["ranks"][0]["devices"] == ["cuda:0", "cuda:1"]
    assert {duel["schedule"] for duel in pipeline["duels"]} == {"gpipe", "1f1b"}
    page = (tmp_path / "r" / "index.html").read_text()
    assert re.search("<h1>labkit on ", page)
    numbers = Values(page).numbers
    assert len(numbers) > 20
    for row in record["rows"]:
        assert row["step_s"]["median"] in numbers
        assert all(hop["median_s"] in numbers for hop in row["hops"])


def test_the_steps_are_named_when_one_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr("workbook.measure.gpu_report.command.num_gpus", lambda: 1)
    with pytest.raises(ValueError, match="unknown step 'docter'"):
        main(str(tmp_path / "r"), steps=("docter",))
    assert steps_of_report.all_steps(None, 1)[0].name == "doctor"
