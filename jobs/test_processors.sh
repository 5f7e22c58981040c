#!/usr/bin/env bash
# Run the tests that compare numbers as other processors compute: with the kernels that OpenBLAS has for them, and those
# loops of numpy that they can run. The last digits differ, and no test may depend on them.
#
#   bash jobs/test_processors.sh [options of pytest]         in short: without SLOW, each set of kernels once, and not
#                                                            as this processor computes (jobs/test.sh does that)
#   WHOLE=1 RANKS=4 bash jobs/test_processors.sh             all tests, for each processor
#   ONLY="Haswell Zen" bash jobs/test_processors.sh          these of them   (more variables: see jobs/common.sh)
#
# Ends with exit code 0 where all passed, and 1 where a test failed or nothing could be set.
set -euo pipefail
. "$(dirname "$0")/common.sh"
choose_mpi
install_package test
configure_mpi
keep_bytecode
export MPIEXEC_TIMEOUT="${MPIEXEC_TIMEOUT:-2400}"
unset OPENBLAS_CORETYPE NPY_DISABLE_CPU_FEATURES  # what is told here would show in what this processor can do

# most of the time for what shorter tests compute too, or for equality of bits, which WHOLE=1 tests
SLOW="test_lengths_on_real_ranks or test_4096_positions or test_rings_in_one_process or test_messages_of_a_megabyte"
SLOW+=" or test_memory or test_example or long_runs or test_gradients_have_the_same_bits or test_half_precision_reaches"
SLOW+=" or test_rings_of_any_size or test_resume"

tests=(tests)
if [ "${WHOLE:-0}" = 0 ]; then  # what imports bounds of rounding compares numbers
    mapfile -t tests < <(grep -rlE '^from support.(tolerance|gradcheck|reference_attention) import' \
        tests/{arrays,attention,language,nn,optim,pipeline,train} --include='test_*.py')
    tests+=(tests/jobs/test_processor.py -m "not long and not jobs" -k "not ($SLOW)")
fi

log=$(mktemp)
trap 'rm -f "$log"' EXIT
own=$("$python" tests/support/processors.py architecture)
ran=0 failed=0 seen=" "
while read -r -u 3 name kernels settings; do
    case " ${ONLY:-$name} " in *" $name "*) ;; *) continue ;; esac
    if [ "${WHOLE:-0}" = 0 ] && [ "$kernels" != - ] && [ "${seen/ $kernels /}" != "$seen" ]; then
        echo "mpipipe: processors skipped setting=$name kernels=$kernels (ran already)"
        continue
    fi
    if [ "${WHOLE:-0}" = 0 ] && [ "$kernels" = "$own" ] && [[ "$settings" != *NPY_DISABLE* ]]; then
        echo "mpipipe: processors skipped setting=$name kernels=$kernels (as all other jobs compute here)"
        continue
    fi
    seen+="$kernels "
    status=0
    # shellcheck disable=SC2086  # words without blanks: VARIABLE=value ...
    env $settings "$mpiexec" -n "${RANKS:=2}" "$python" -m pytest -q "${tests[@]}" "$@" > "$log" 2>&1 || status=$?
    passed=$(grep -aoE '[0-9]+ passed' "$log" | tail -n 1 | cut -d ' ' -f 1) || true
    if [ "$status" = 0 ]; then
        verdict=ok
    else
        verdict=failed failed=$((failed + 1))
        grep -aE '^(FAILED|ERROR|E  )' "$log" || tail -n 20 "$log"
    fi
    echo "mpipipe: processors $verdict setting=$name kernels=$kernels passed=${passed:-0} exit=$status"
    ran=$((ran + 1))
done 3< <("$python" tests/support/processors.py)

if [ "$ran" -gt 0 ] && [ "$failed" = 0 ]; then verdict=ok; else verdict=failed; fi
echo "mpipipe: processors $verdict mpi=$MPI ranks=${RANKS:-2} settings=$ran failed=$failed"
[ "$verdict" = ok ]
