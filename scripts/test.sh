#!/usr/bin/env bash
# Runs a command, which tests the Go packages, and beside it the tests of python/ and of failpoints. These leave a
# processor idle now and then; what they print comes at the end.
set -euo pipefail
cd "$(dirname "$0")/.."

beside=$(mktemp)
trap 'rm -f "$beside"' EXIT
make --no-print-directory --keep-going pytest test-faults >"$beside" 2>&1 &
failed=0
"$@" || failed=1
wait $! || failed=1
cat "$beside"
exit "$failed"
