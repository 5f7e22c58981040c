#!/usr/bin/env bash
# Two hosts on this machine, to see what a job does when the network between its hosts is slow, loses packets or breaks.
# They are two network namespaces with a link between them that can be spoilt, and with host names of their own. All
# else, such as files, they share. It needs root, iproute2, util-linux and python3; `stop` leaves nothing behind.
#
#   bash jobs/two_hosts.sh start              makes the hosts mpipipe-a (10.77.0.1) and mpipipe-b (10.77.0.2)
#   bash jobs/two_hosts.sh run 4 python -m mpipipe train --pipe 4
#                                             starts so many ranks, half of them on each host, which talk by TCP
#   bash jobs/two_hosts.sh delay 50           from now on each packet takes 50 ms
#   bash jobs/two_hosts.sh lose 1             ... and 1 % of them are lost
#   bash jobs/two_hosts.sh cut                nothing comes through
#   bash jobs/two_hosts.sh mend               the link is as at the start
#   bash jobs/two_hosts.sh stop
#
# MPIEXEC is the launcher, with its options: by default that of the Python on PATH. Open MPI and MPICH are told apart by
# what it says of itself.
set -euo pipefail

home=${TWO_HOSTS:-${TMPDIR:-/tmp}/mpipipe-two-hosts}
declare -A address=([a]=10.77.0.1 [b]=10.77.0.2)

fail() {
    echo "two_hosts.sh: $*" >&2
    exit 2
}

start() {
    local tool host
    [ "$(id -u)" = 0 ] || fail "needs root, to make network namespaces"
    for tool in ip unshare python3; do
        command -v "$tool" > /dev/null || fail "there is no $tool: install iproute2, util-linux and python3"
    done
    [ ! -e "$home" ] || fail "$home is there already: stop it first"
    mkdir -p "$home"
    echo "0 0" > "$home/settings"
    ip netns add mpipipe-link
    for host in a b; do
        ip netns add "mpipipe-$host"
        ip link add "link-$host" netns mpipipe-link type veth peer name eth0 netns "mpipipe-$host"
        ip -n mpipipe-link link set "link-$host" up
        ip -n "mpipipe-$host" address add "${address[$host]}/24" dev eth0
        ip -n "mpipipe-$host" link set eth0 up
        ip -n "mpipipe-$host" link set lo up
        ip netns exec "mpipipe-$host" python3 -c "$(offload)" eth0
    done
    ip netns exec mpipipe-link python3 "$(dirname "$(realpath "$0")")/two_hosts_link.py" link-a link-b "$home/settings" \
        > "$home/link.log" 2>&1 &
    echo $! > "$home/link.pid"
    on a python3 -c "$(reach)" "${address[b]}" || fail "the hosts do not reach each other: $(cat "$home/link.log")"
}

# Python that switches the offload of checksums off: frames that a process carries must be whole
offload() {
    echo "import sys; sys.path.insert(0, '$(dirname "$(realpath "$0")")')"
    echo "import two_hosts_link; two_hosts_link.switch_offload_off(sys.argv[1])"
}

# Python that asks the other host for a connection: that it is refused shows that packets come and go
reach() {
    cat << 'END'
import socket, sys, time
for _ in range(50):
    try:
        socket.create_connection((sys.argv[1], 9), 0.5)
    except ConnectionRefusedError:
        sys.exit(0)
    except OSError:
        time.sleep(0.1)
sys.exit(1)
END
}

stop() {
    local host pid
    if pid=$(cat "$home/link.pid" 2> /dev/null); then
        kill "$pid" 2> /dev/null || true
    fi
    for host in a b link; do
        ip netns del "mpipipe-$host" 2> /dev/null || true
    done
    rm -rf "$home"
}

# on HOST COMMAND...: run it there, under the host's name
on() {
    local host=$1
    shift
    exec_there=(ip netns exec "mpipipe-$host" unshare --uts bash -c 'hostname "$0" && exec "$@"' "mpipipe-$host")
    "${exec_there[@]}" "$@"
}

# what launchers take for ssh: options, the address of a host, and a command for a shell there
agent() {
    while [ $# -gt 0 ] && [[ $1 == -* ]]; do shift; done
    local there=$1
    shift
    if [ "$there" = "${address[b]}" ]; then on b bash -c "$*"; else on a bash -c "$*"; fi
}

run() {
    local ranks=$1 half=$(($1 / 2)) mpiexec here
    shift
    [ -e "$home/link.pid" ] || fail "there are no hosts: start them first"
    [ $((ranks % 2)) = 0 ] || fail "run: an even number of ranks, not $ranks"
    here=$(realpath "$0")
    read -r -a mpiexec <<< "${MPIEXEC:-$(dirname "$(command -v python)")/mpiexec}"
    printf '#!/bin/bash\nexec bash %q agent "$@"\n' "$here" > "$home/agent"
    chmod +x "$home/agent"
    if "${mpiexec[0]}" --version 2>&1 | grep -q -i "open mpi\|openrte\|prrte"; then
        unset PRTE_MCA_rmaps_default_mapping_policy
        # else the launcher waits for minutes for a host that is cut off
        export PRTE_MCA_oob_tcp_keepalive_time=3 PRTE_MCA_oob_tcp_keepalive_intvl=1 PRTE_MCA_oob_tcp_keepalive_probes=3
        export OMPI_MCA_btl=tcp,self OMPI_MCA_btl_tcp_if_include=10.77.0.0/24 OMPI_MCA_pml=ob1
        on a "${mpiexec[@]}" --prtemca plm_ssh_agent "$home/agent" --prtemca prte_if_include 10.77.0.0/24 \
            --host "${address[a]}:$half,${address[b]}:$half" --map-by "ppr:$half:node:oversubscribe" -n "$ranks" "$@"
    else
        export FI_PROVIDER=tcp FI_TCP_IFACE=eth0 UCX_TLS=tcp,self UCX_NET_DEVICES=eth0
        unset HYDRA_LAUNCHER
        on a "${mpiexec[@]}" -launcher ssh -launcher-exec "$home/agent" -hosts "${address[a]}:$half,${address[b]}:$half" \
            -iface eth0 -n "$ranks" "$@"
    fi
}

spoil() {
    [ -e "$home/link.pid" ] || fail "there are no hosts: start them first"
    echo "$1" > "$home/settings"
}

command=${1:-}
[ $# -eq 0 ] || shift
case $command in
    start | stop | run | agent) "$command" "$@" ;;
    on) on "$@" ;;
    delay) spoil "$1 0" ;;
    lose) spoil "0 $1" ;;
    cut) spoil "0 100" ;;
    mend) spoil "0 0" ;;
    *) fail "start, run RANKS COMMAND, delay MS, lose PERCENT, cut, mend or stop; not '$command'" ;;
esac
