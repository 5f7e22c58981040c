#!/usr/bin/env bash
# A SLURM of one node on this machine, to test job scripts with. It needs root on Debian 12 or a relative of it, but no
# systemd, and it leaves nothing behind: all its files are in one folder, and `stop` ends what `start` has started.
#
#   export $(bash jobs/slurm_local.sh start)      prints SLURM_CONF=...; srun, sbatch and the others find it by that
#   sbatch jobs/train.sbatch --steps 20
#   bash jobs/slurm_local.sh stop                 cancels its jobs, ends its daemons, removes the folder
#
# SLURM_LOCAL is that folder (mpipipe-slurm in TMPDIR by default): several of them can run beside each other, each with
# a folder of its own. SLURM_LOCAL_CPUS is how many CPUs the node claims to have (4 by default), whatever the machine
# has; tasks are bound to cores where the machine has so many. It claims four GPUs too, so that headers which ask for
# them are accepted. No job finds any.
# Packages that are missing are installed by apt-get: slurm-wlm, munge, and libpmix-dev for `srun --mpi=pmix`.
set -euo pipefail

home=${SLURM_LOCAL:-${TMPDIR:-/tmp}/mpipipe-slurm}
conf=$home/slurm.conf
mark="# made by jobs/slurm_local.sh"
daemons="slurmd slurmctld munged"  # in the order in which they end
patience=30                        # seconds for a daemon to answer, and for jobs to end
PATH="$PATH:${SBIN:-/usr/sbin}"

say() { echo "slurm_local.sh: $*" >&2; }

fail() {
    say "$*"
    exit 2
}

# alive DAEMON: whether the process that `start` noted for it still runs, and is that program
alive() {
    local pid
    pid=$(cat "$home/$1.pid" 2> /dev/null) && [ "$(ps -o comm= -p "$pid")" = "$1" ]
}

# until_it COMMAND...: try it again and again, for as long as our patience lasts
until_it() {
    local stop=$((SECONDS + patience))
    until "$@" > "$home/last.txt" 2>&1; do
        [ "$SECONDS" -lt "$stop" ] || return 1
        sleep 0.1
    done
}

install_packages() {
    local package missing=()
    for package in "slurm-wlm slurmctld" "slurm-wlm slurmd" "slurm-wlm sbatch" "munge munged"; do
        command -v "${package#* }" > /dev/null || missing+=("${package#* }")
    done
    [ "$(id -u)" = 0 ] || fail "needs root, to run jobs as SLURM does; this is user $(id -un)." \
        "${missing[*]:+Missing too: ${missing[*]}}"
    [ "${#missing[@]}" -gt 0 ] || return 0
    command -v apt-get > /dev/null || fail "missing: ${missing[*]}. Install SLURM and munge with this system's" \
        "packages; there is no apt-get, with which this script would do it"
    say "installing slurm-wlm, munge and libpmix-dev, since there is no ${missing[*]}"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends \
        slurm-wlm munge libpmix-dev; } >&2 || fail "apt-get could not install slurm-wlm, munge and libpmix-dev"
}

# two ports on which nobody listens
free_ports() {
    local port found=()
    for ((port = 20000 + $$ % 10000; ${#found[@]} < 2; port++)); do
        (exec 3<> "/dev/tcp/127.0.0.1/$port") 2> /dev/null || found+=("$port")
    done
    echo "${found[@]}"
}

write_conf() {
    local host ports binding=none
    [ "$cpus" -gt "$(getconf _NPROCESSORS_ONLN)" ] || binding=affinity  # cores that are not there cannot be bound
    host=$(hostname -s)
    read -r -a ports <<< "$(free_ports)"
    touch "$home/gpu"{0..3}
    echo "Name=gpu File=$home/gpu[0-3]" > "$home/gres.conf"
    # A job id that an earlier SLURM gave away would find what its job has left: runs/slurm-ID, and MPICH's shared memory.
    # A credential that lives for ten seconds lets a requeued job start again after ten, and not after two minutes.
    cat > "$conf" << CONF
$mark
ClusterName=local${ports[0]}
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=${ports[0]}
SlurmdPort=${ports[1]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$home/munge.socket,cred_expire=10
CredType=cred/munge
FirstJobId=$(($(date +%s) % 60000000 + 1))
StateSaveLocation=$home/state
SlurmdSpoolDir=$home/spool
SlurmctldPidFile=$home/slurmctld.own
SlurmdPidFile=$home/slurmd.own
SlurmctldLogFile=$home/slurmctld.log
SlurmdLogFile=$home/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/$binding
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1
MpiDefault=pmi2
MinJobAge=86400
KillWait=5
ReturnToService=2
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=$host NodeAddr=127.0.0.1 CPUs=$cpus Boards=1 SocketsPerBoard=1 CoresPerSocket=$cpus ThreadsPerCore=1 \
RealMemory=8000 Gres=gpu:4 State=UNKNOWN
PartitionName=debug Nodes=$host Default=YES MaxTime=INFINITE State=UP
CONF
}

# launch DAEMON ARGUMENTS...: in the foreground of a session of its own, so that $! is its process id
launch() {
    command -v "$1" > /dev/null || fail "there is no $1"
    setsid "$@" > "$home/$1.out" 2>&1 < /dev/null &
    echo "$!" > "$home/$1.pid"
}

# answers DAEMON COMMAND...: wait until it does; else show what it wrote, end what was started, and fail
answers() {
    until_it "${@:2}" && return
    say "$1 does not answer: $(tail -n 3 "$home/last.txt" | tr '\n' ' ')"
    tail -n 20 "$home/$1.out" "$home/$1.log" >&2 2> /dev/null || true
    end_daemons
    fail "could not start $1; its files are in $home"
}

node_is_idle() { [ "$(sinfo --noheader --format=%T)" = idle ]; }

start() {
    local cpus=${SLURM_LOCAL_CPUS:-4} daemon
    [[ $cpus =~ ^[1-9][0-9]*$ ]] || fail "SLURM_LOCAL_CPUS=$cpus is no number of CPUs"
    install_packages
    for daemon in $daemons; do
        ! alive "$daemon" || fail "$daemon of $home runs already: SLURM_CONF=$conf; end it with 'stop'"
    done
    remove_folder
    install -d -m 0755 "$home" "$home/state" "$home/spool"
    write_conf
    export SLURM_CONF=$conf
    (umask 077 && head -c 1024 "${RANDOM_SOURCE:-/dev/urandom}" > "$home/munge.key")
    launch munged --foreground --key-file="$home/munge.key" --socket="$home/munge.socket" --seed-file="$home/munge.seed" \
        --log-file="$home/munged.log" --pid-file="$home/munged.own" --force
    answers munged munge --no-input --socket="$home/munge.socket"
    launch slurmctld -D
    answers slurmctld scontrol ping
    launch slurmd -D
    answers slurmd node_is_idle
    echo "SLURM_CONF=$conf"
}

no_jobs() { [ -z "$(squeue --noheader)" ]; }

no_steps() { [ -z "$(compgen -G "$home/spool/*_[0-9]*.[0-9]*")" ]; }  # each step of a job has a socket there

# end what jobs have left: SLURM loses sight of a process whose parent has died. Each has the name of this cluster.
end_processes_of_jobs() {
    local cluster pids
    cluster=$(sed -n 's/^ClusterName=//p' "$conf")
    while
        # grep fails where one of all processes ends meanwhile
        pids=$({ grep -slzx "SLURM_CLUSTER_NAME=$cluster" "/proc/"[0-9]*/environ || true; } | cut -d / -f 3)
        [ -n "$pids" ]
    do
        kill -KILL $pids 2> /dev/null || true
    done
}

end_daemons() {
    local daemon
    for daemon in $daemons; do
        alive "$daemon" || continue
        kill "$(cat "$home/$daemon.pid")"
    done
    for daemon in $daemons; do
        while alive "$daemon"; do sleep 0.05; done
    done
}

remove_folder() {
    [ -e "$home" ] || return 0
    [ "$(head -n 1 "$conf" 2> /dev/null)" = "$mark" ] || fail "$home is not a folder of this script: it stays as it is"
    rm -r -- "$home"
}

stop() {
    [ -e "$conf" ] || fail "nothing to stop: there is no $conf"
    export SLURM_CONF=$conf
    if alive slurmctld && alive slurmd && alive munged; then
        scancel --user="$(id -un)"
        until_it no_jobs || say "jobs do not end: $(squeue --noheader --format='%i %T' | tr '\n' ' ')"
        end_processes_of_jobs
        until_it no_steps || fail "steps of jobs do not end: $(compgen -G "$home/spool/*_[0-9]*.[0-9]*")"
    fi
    end_daemons
    end_processes_of_jobs
    remove_folder
}

case "${1:-}" in
    start) start ;;
    stop) stop ;;
    *) fail "start or stop" ;;
esac
