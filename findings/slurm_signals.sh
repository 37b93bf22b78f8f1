#!/usr/bin/env bash
# Slurm 22.05.8 (Debian 12): the way to the tasks of a batch job decides what SIGTERM does to them.
#
# 1. SIGTERM to srun is not passed on. srun says "forcing job termination" and the task gets SIGKILL:
#    its handler of SIGTERM never runs, and srun ends with 137. (SIGUSR1 and others are passed on.)
# 2. "scancel --signal=TERM JOB", with the number of a whole job, reaches the tasks that srun has
#    started, and not the batch script. The task's handler runs, and srun ends with its status.
# 3. "scancel JOB" sends SIGTERM to the batch script, to srun and to the tasks. srun says again
#    "forcing job termination", but this time the task's handler runs, for up to KillWait seconds.
#    And a "scontrol requeue" of the script, as some have it at the end of a trap, is accepted
#    though the job has been cancelled: it waits in the queue again.
#
# A batch script that wants its tasks to save their work before the time limit thus needs a signal
# of its own (--signal=B:USR1@120), and has to tell the tasks by 2.
#
# Needs Debian 12, root (for namespaces of its own) and iproute2. Nothing is installed: the packages
# are unpacked in a temporary folder. Seen:
#
#    1, kill -TERM srun: srun ends with 137
#    2, scancel --signal=TERM: task got SIGTERM; srun ends with 3
#    3, scancel: task got SIGTERM; script got SIGTERM; requeue accepted; JobState=PENDING Restarts=1
set -euo pipefail

if [[ ${1:-} != inside ]]; then
    script=$(realpath "$0")
    folder=$(mktemp -d)
    inside=
    trap 'kill -KILL ${inside:+"$inside"} 2> /dev/null || true; rm -rf "$folder"' EXIT
    chmod 755 "$folder"
    cd "$folder"
    packages=()
    for package in slurmctld slurmd slurm-client slurm-wlm-basic-plugins; do
        packages+=("$package=22.05.8-*")
    done
    packages+=(munge libmunge2 libhwloc15 liblua5.1-0 libnuma1)
    apt-get download -qq "${packages[@]}" 2> apt.log || { cat apt.log >&2; exit 1; }
    for file in *.deb; do
        dpkg -x "$file" unpacked
    done
    unshare --net --pid --mount --uts --ipc --fork --kill-child=KILL --mount-proc \
        timeout 300 bash "$script" inside "$folder" &
    inside=$!
    wait "$inside"
    exit
fi

folder=$2
cd "$folder"
libraries=$(echo "$folder"/unpacked/usr/lib/*-linux-gnu)
export LD_LIBRARY_PATH=$libraries/slurm-wlm:$libraries
export PATH=$folder/unpacked/usr/sbin:$folder/unpacked/usr/bin:$PATH
export SLURM_CONF=$folder/slurm.conf
ip link set lo up
ip address add 10.77.0.1/32 dev lo
echo n1 > /proc/sys/kernel/hostname
cat > slurm.conf << CONF
ClusterName=finding
SlurmctldHost=n1(10.77.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
PluginDir=$libraries/slurm-wlm
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
KillWait=30
NodeName=n1 NodeAddr=10.77.0.1 CPUs=2
PartitionName=main Nodes=n1 Default=YES State=UP
CONF
mkdir state spool
(umask 077 && head -c 64 /dev/urandom > munge.key)
munged --origin=10.77.0.1 --key-file="$folder/munge.key" --socket="$folder/munge.socket" \
    --pid-file="$folder/munge.pid" --log-file="$folder/munge.log" --seed-file="$folder/munge.seed"
slurmctld-wlm
slurmd-wlm -N n1 -d "$folder/unpacked/usr/sbin/slurmstepd-wlm"
for _ in {1..60}; do
    [[ $(sinfo --noheader --format=%T) == idle ]] && break
    sleep 1
done

cat > task << 'TASK'
trap 'echo "task got SIGTERM" >> told; sleep 3; exit 3' TERM
touch begun
sleep 300 &
wait
TASK
cat > job << 'JOB'
#!/bin/bash
#SBATCH --requeue --output=job.out --open-mode=append
trap 'echo "script got SIGTERM" >> told' TERM
srun bash task &
step=$!
until [[ -e begun ]]; do sleep 0.1; done
case $1 in
    1) kill -TERM "$step" ;;
    2) scancel --signal=TERM "$SLURM_JOB_ID" ;;
esac
wait "$step"
status=$?
if [[ $1 == 3 ]]; then
    wait "$step"
    scontrol requeue "$SLURM_JOB_ID" && echo "requeue accepted" >> told
else
    echo "srun ends with $status" >> told
fi
JOB

# Prints what task and script have said.
run() {
    rm -f begun told
    number=$(sbatch --parsable job "$1")
    until [[ -e begun ]]; do sleep 0.1; done
    if (($1 == 3)); then
        sleep 1
        scancel "$number"
    fi
    until grep -qE 'ends with|accepted' told 2> /dev/null; do sleep 0.2; done
    sed -z 's/\n/; /g; s/; $//' told
}
state() { scontrol show job "$number" | grep -oE '(JobState|Restarts)=\w+' | sed -z 's/\n/ /g'; }

first=$(run 1)
second=$(run 2)
run 3 > third
third=$(< third)
for _ in {1..60}; do
    [[ $(state) == *PENDING* ]] && break
    sleep 1
done
echo "1, kill -TERM srun: $first"
echo "2, scancel --signal=TERM: $second"
echo "3, scancel: $third; $(state)"
[[ $first == "srun ends with 137" ]]
[[ $second == "task got SIGTERM; srun ends with 3" ]]
[[ $third == *"script got SIGTERM"* && $third == *"task got SIGTERM"* ]]
[[ $third == *"requeue accepted" && $(state) == *"Restarts=1"* ]]
# By the srun of 1, and by that of 3.
[[ $(grep -c "forcing job termination" job.out) == 2 ]]
