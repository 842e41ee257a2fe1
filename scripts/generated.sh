#!/usr/bin/env bash
# Fails unless generated code is what its sources give: running the generators changes nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

# changes is a digest of everything that differs from the last commit.
changes() { { git status --porcelain && git diff HEAD; } | sha256sum; }

before=$(changes)
make generate
if [ "$before" != "$(changes)" ]; then
	echo "make generate changed files; commit what it writes:" >&2
	git status --short >&2
	exit 1
fi
