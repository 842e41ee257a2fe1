#!/usr/bin/env bash
# Runs a command, which tests the Go packages, and beside it the tests of python/. These leave a processor idle now and
# then; what they print comes at the end.
set -euo pipefail
cd "$(dirname "$0")/.."

disk=${TMPDIR:-/tmp}
beside=$(mktemp)
trap 'rm -rf "$beside" ${memory:+"$memory"}' EXIT
# The tests make and remove tens of thousands of small files, and ext4 takes long to find an inode for each. Where there
# is room in memory, what they and the processes they start make in TMPDIR is there, and so are the folders of
# testing's TempDir, which are in GOTMPDIR. The folder's short name leaves room for those of sockets. What Go links is on the disk.
shm=/dev/shm
if [ "$(df --output=avail -k "$shm" 2>/dev/null | tail -n 1)" -ge $((4 << 20)) ] 2>/dev/null && memory=$(mktemp -d "$shm/kvXXXX"); then
	if printf '#!/bin/sh\nGOTMPDIR=%s exec "$@"\n' "$memory" >"$memory/runs" && chmod +x "$memory/runs" && "$memory/runs" true 2>/dev/null; then
		export GOTMPDIR=${GOTMPDIR:-$disk} TMPDIR=$memory GOFLAGS="${GOFLAGS:-} -exec=$memory/runs"
	fi
fi
TMPDIR=$disk make --no-print-directory pytest >"$beside" 2>&1 &
failed=0
"$@" || failed=1
wait $! || failed=1
cat "$beside"
exit "$failed"
