#!/usr/bin/env bash
# Unpack AMD's run-time compiler (hipRTC, of Debian's ROCm, about 20 MB) into .rocm, where the tests find it, so that they
# compile every GPU source for AMD's GPUs. Needs apt, and neither root nor a GPU; installs nothing.
#
#   bash jobs/rocm_compiler.sh
#
# Without it, and without a ROCm of the machine's own, those tests are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$PWD/.rocm
if [ -e "$folder/complete" ]; then
    echo "mpipipe: ROCm compiler ok, it is there already"
    exit 0
fi
command -v apt-get > /dev/null && command -v dpkg-deb > /dev/null || { echo "$0: needs apt and dpkg" >&2; exit 2; }
rm -rf "$folder" && mkdir -p "$folder/packages"
apt-cache show libamdhip64-5 > /dev/null 2>&1 || apt-get update --quiet --quiet || true  # a new machine has no lists
# the library, its built-in headers, and what of all that they need this machine does not have
wanted=(libamdhip64-5 libhiprtc-builtins5)
mapfile -t missing < <(apt-get install --simulate --no-install-recommends "${wanted[@]}" | sed -n 's/^Inst \([^ ]*\).*/\1/p')
cd "$folder/packages"
for package in "${missing[@]:-${wanted[@]}}"; do
    apt-get download --quiet --quiet "$package" 2> /dev/null || { echo "$0: apt cannot download $package" >&2; exit 1; }
done
for package in *.deb; do dpkg-deb --extract "$package" "$folder"; done
rm -rf "$folder/packages"
touch "$folder/complete"
echo "mpipipe: ROCm compiler ok packages=${missing[*]:-${wanted[*]}}"
