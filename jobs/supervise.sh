#!/usr/bin/env bash
# Start a training again and again until it is done, where the scheduler cannot do it. After a failure
# it goes on from its newest checkpoint.
#
#   bash jobs/supervise.sh mpiexec -n 4 python -m mpipipe train --out runs/long --save-every 50 --resume auto ...
#   CHECKPOINTS=folder bash jobs/supervise.sh mpiexec -n 4 python -m mpipipe run own_loop.py
#
# CHECKPOINTS is where they appear, by default `checkpoints` in the folder that --out names. It ends with the exit code of
# the last start: 0 once the training is done; 2 where it is refused; 75 where it was asked to leave; else that of the
# failure, after MPIPIPE_RESTARTS starts in a row without a new checkpoint (3 by default). A 0 without a new file `finished`
# in that folder, which a training leaves once all ranks have ended well, is a failure. With CHECKPOINTS a 0 is believed.
# INT, TERM, USR1 and USR2 end the training, and nothing is started again. All but INT let it save: it gets the signal
# that its launcher hands on, USR2 for Open MPI's mpiexec, TERM for the others, and for a script of your own around them.
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/restarts.sh"

[ "$#" -gt 0 ] || { echo "usage: bash jobs/supervise.sh COMMAND..." >&2; exit 2; }
out=$(option_of out "" "$@")
checkpoints=${CHECKPOINTS:-${out:+$out/checkpoints}}
[ -n "$checkpoints" ] || { echo "supervise.sh: name the folder with --out, or with CHECKPOINTS" >&2; exit 2; }
if [ -z "${CHECKPOINTS:-}" ] && [ "$(option_of resume no "$@")" != auto ]; then
    echo "supervise.sh: without --resume auto each start would begin anew" >&2
    exit 2
fi
before=$(end_in "$out")
notes=$(mktemp)
trap 'rm -f "$notes"' EXIT

# of_open_mpi COMMAND: whether it is Open MPI's launcher, as its name and its neighbours say: it is not run to find out
of_open_mpi() {
    local file
    file=$(readlink -f -- "$(type -P -- "$1")") || return 1
    case ${file##*/} in
        orterun | prterun | *openmpi*) ;;
        mpiexec | mpirun) [ -x "$(dirname -- "$file")/prterun" ] ;;
        *) return 1 ;;
    esac
}
polite=TERM
if of_open_mpi "$1"; then polite=USR2; fi

asked="" child="" signals=0
pass_on() {
    asked=$1 signals=$((signals + 1))
    [ "$1" = INT ] || set -- "$polite"
    [ -z "$child" ] || kill -s "$1" "$child" 2> /dev/null || true
}
for name in INT TERM USR1 USR2; do trap "pass_on $name" "$name"; done

start=1
while [ -z "$asked" ]; do
    set -m  # a process group of its own: Ctrl-C comes here alone, and is passed on once
    "$@" < /dev/null &
    child=$!
    set +m
    while seen=$signals status=0; do
        wait "$child" || status=$?
        [ "$seen" != "$signals" ] || break  # else a signal has cut the waiting short
    done
    if [ "$status" = 0 ]; then
        if [ -n "${CHECKPOINTS:-}" ] || is_finished "$out" "$before" "$1"; then exit 0; fi
        status=1
    fi
    [ "$status" != "$preempted" ] && [ -z "$asked" ] || break
    worth_another_start "$status" "$checkpoints" "$notes" || break
    start=$((start + 1)) newest=$(newest_checkpoint "$checkpoints")
    echo "mpipipe: exit code $status; start $start $([ -n "$newest" ] && echo "goes on from $newest" || echo "begins anew")" >&2
    sleep 1
done
echo "mpipipe: supervised job ended exit=$status${asked:+ on SIG$asked}" >&2
exit "$status"
