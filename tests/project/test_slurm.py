"""The script for Slurm: its decisions with stand-ins, and all of it on a real two-node Slurm."""

import os
import re
import shutil
import signal
import textwrap

import pytest
import slurm
from agents import SCRIPTS, WORK, Agents, check_result, newest

# A job of one node. As the real srun does, this one answers SIGTERM by killing the task.
FAKES = {
    "scontrol": """
        if [[ $1 == show ]]; then echo 127.0.0.1; else echo "$@" >> scontrol.log; fi
        """,
    "srun": """
        shift 2
        "$@" & task=$!
        echo "$task" > task
        trap 'kill -KILL "$task"' TERM
        wait "$task"
        """,
    "scancel": """
        [[ $* == "--signal=TERM 7" ]] && kill -TERM "$(cat task)"
        """,
    "torchrun": """
        trap '[[ -z $STEP ]] || mkdir -p "$DIR/step-0000000$STEP"; exit 1' TERM
        echo "$@" > torchrun.log
        for ((tenths = 0; tenths < 600; tenths++)); do sleep 0.1; done
        """,
}


@pytest.mark.skipif(shutil.which("ip") is None, reason="no ip: not on Linux")
@pytest.mark.parametrize(
    ("number", "saved", "is_queued_again"),
    [
        pytest.param(signal.SIGUSR1, "2", True, id="time over"),
        pytest.param(signal.SIGUSR1, "1", False, id="time over, no further"),
        pytest.param(signal.SIGUSR1, "", False, id="time over, nothing saved"),
        pytest.param(signal.SIGTERM, "2", False, id="cancelled"),
    ],
)
def test_a_slurm_job_is_queued_again_when_its_time_is_over(
    tmp_path, number, saved, is_queued_again
):
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for name, text in FAKES.items():
        (bin_folder / name).write_text("#!/usr/bin/env bash\n" + textwrap.dedent(text))
        (bin_folder / name).chmod(0o755)
    shutil.copy(SCRIPTS / "many_nodes.sh", tmp_path)
    if saved:
        (tmp_path / "runs" / "7" / "step-00000001").mkdir(parents=True)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n1"}
    job |= {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_CPUS_PER_TASK": "3", "STEP": saved}
    job["PATH"] = os.pathsep.join([str(bin_folder), os.environ["PATH"]])
    with Agents(tmp_path, **job) as agents:
        agents.start("job", "slurm.sbatch")
        agents.wait_until((tmp_path / "torchrun.log").exists)
        if number == signal.SIGTERM:
            # scancel sends it to all.
            os.kill(int((tmp_path / "task").read_text()), number)
        agents.started["job"].send_signal(number)
        assert agents.wait("job") != 0
    assert "--nproc-per-node 3" in (tmp_path / "torchrun.log").read_text()
    log = tmp_path / "scontrol.log"
    assert (log.exists() and log.read_text()) == (is_queued_again and "requeue 7\n")


@pytest.fixture(scope="module")
def cluster():
    if missing := slurm.why_not():
        pytest.skip(missing)
    with slurm.cluster() as started:
        yield started


def job_of(cluster, epochs, *options, pace_s=0.0):
    words = [*WORK, "--epochs", str(epochs), "--checkpoint-every", "1", "--device", "cpu"]
    words += ["--json", "out.json", "--save", "end"]
    return slurm.Job(cluster, list(options), words, pace_s=pace_s)


def stopped_after(job):
    """The step after which the ranks have said that they end; its checkpoint is the newest."""
    (step,) = re.findall(r"stopped by SIGTERM after (\d+) of", job.told())
    assert newest(job.checkpoints) == int(step)
    return int(step)


@pytest.mark.more
@pytest.mark.parametrize(
    ("options", "world_size"), [(["--nodes=1", "--gpus-per-node=1"], 1), (["--nodes=2"], 4)]
)
def test_a_rank_per_gpu_or_else_per_cpu(cluster, options, world_size):
    job = job_of(cluster, 2, *options)
    job.wait_for("COMPLETED")
    check_result(job.folder, 2, job.checkpoints, world_size)


@pytest.mark.more
def test_a_cancelled_job_ends_for_good_with_a_checkpoint(cluster):
    # A step takes longer than all other work, and less than KillWait.
    job = job_of(cluster, 1, pace_s=6)
    job.wait_until(lambda: newest(job.checkpoints) > 0)
    job.as_user("scancel", job.number)
    job.wait_for("CANCELLED")
    assert stopped_after(job) > 1
    assert job.facts()["Restarts"] == "0"
    assert cluster.users_processes() == 0


@pytest.mark.more
def test_a_job_whose_time_is_over_is_queued_again_and_goes_on(cluster):
    # Slurm looks every 30 s, and at most 30 s too early: after a minute here.
    job = job_of(cluster, 30, "--time=2", "--signal=B:USR1@30", pace_s=0.4)
    job.wait_until(lambda: job.facts()["Restarts"] == "1")
    step = stopped_after(job)
    (job.folder / "hurry").touch()
    job.wait_for("COMPLETED")
    assert f"continues from step-{step:08d}" in job.told()
    check_result(job.folder, 30, job.checkpoints, 4)
    assert cluster.users_processes() == 0


@pytest.mark.more
def test_a_job_that_comes_no_further_is_not_queued_again(cluster):
    """Its time is over while the first step is under way, or before."""
    job = job_of(cluster, 1, "--nodes=1", pace_s=600)
    job.wait_until(lambda: (job.folder / "begun-1").exists())
    job.as_user("scancel", "--signal=USR1", "--batch", job.number)
    job.wait_for("FAILED")
    assert "slurm.sbatch: no checkpoint" in job.told()
    assert job.facts()["Restarts"] == "0"
    assert cluster.users_processes() == 0
