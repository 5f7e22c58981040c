# Sourced by jobs/batch.sh and jobs/supervise.sh: whether a training has ended well, and is worth another start.
#
#   MPIPIPE_RESTARTS     starts in a row that may end without a new checkpoint, 1 to 999999, 3 by default

case ${MPIPIPE_RESTARTS:=3} in
    0* | *[!0123456789]* | ???????*)
        echo "mpipipe: MPIPIPE_RESTARTS is no number of starts" >&2
        echo "  found: '$MPIPIPE_RESTARTS'" >&2
        echo "  expected: a whole number from 1 to 999999, or no such variable, which is 3" >&2
        exit 2
        ;;
esac
refused=2     # exit code of a job that all ranks refuse alike, as for a wrong option: it would be refused again
preempted=75  # exit code of a job that was asked to leave, and has saved

# end_in FOLDER: which file `finished` is there; nothing where there is none
end_in() {
    ls -- "$1" > /dev/null 2>&1 || true  # lets a network file system look anew
    stat --format="%i %y" -- "$1/finished" 2> /dev/null || true
}

# is_finished FOLDER BEFORE COMMAND: whether the training there has ended well on all ranks, after COMMAND has returned 0:
# it has left another `finished` than the one BEFORE, that of an earlier training. No launcher knows that: that of MPICH
# returns 0 where a library in C ends one rank by exit(0).
is_finished() {
    local look end
    for look in 1 2 3; do
        end=$(end_in "$1")
        [ -z "$end" ] || [ "$end" = "$2" ] || return 0
        [ "$look" = 3 ] || sleep 1
    done
    echo "mpipipe: $3 returned 0, but $1/finished is not there, or an old one: not all ranks have ended well" >&2
    return 1
}

# option_of NAME DEFAULT OPTIONS...: the value of the last --NAME among the options
option_of() {
    local name=--$1 value=$2 previous="" option
    shift 2
    for option in "$@"; do
        [ "$previous" != "$name" ] || value=$option
        [ "${option#"$name="}" = "$option" ] || value=${option#"$name="}
        previous=$option
    done
    echo "$value"
}

# newest_checkpoint FOLDER: the name of the newest whole one; nothing where there is none
newest_checkpoint() {
    local manifest found=""
    for manifest in "$1"/step-*/manifest.json; do
        [ ! -e "$manifest" ] || found=$manifest
    done
    [ -z "$found" ] || basename -- "$(dirname -- "$found")"
}

# worth_another_start STATUS FOLDER NOTES: after an end with that status; checkpoints are in FOLDER. The file NOTES
# remembers, from one start to the next, the newest checkpoint and how many starts have ended without a newer one.
worth_another_start() {
    local status=$1 newest before="" idle=0
    [ "$status" != "$refused" ] || return 1
    newest=$(newest_checkpoint "$2")
    [ ! -e "$3" ] || read -r before idle < "$3"
    if [ "${newest:-none}" = "$before" ] || [ -z "$newest" ]; then idle=$((idle + 1)); else idle=0; fi
    mkdir -p -- "$(dirname -- "$3")"
    echo "${newest:-none} $idle" > "$3"
    if [ "$idle" -ge "$MPIPIPE_RESTARTS" ]; then
        echo "mpipipe: $idle starts in a row have ended without a new checkpoint (newest: ${newest:-none}): no other one" >&2
        return 1
    fi
}
