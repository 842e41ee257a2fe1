#!/usr/bin/env bash
# Runs `kvport conform` on every plugin named in PLUGINS and on the examples. A plugin that
# needs a config keeps one that works in plugins/NAME/conform.json; @TMP@ in it becomes a fresh
# folder. Exits non-zero if any plugin failed.
set -euo pipefail
cd "$(dirname "$0")/.."

tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
passed=0 failed=0
conform() { # NAME FOLDER [BINARY]
	local config='{}' scratch="$tmp/$1"
	mkdir "$scratch"
	if [ -f "$2/conform.json" ]; then
		config=$(sed "s|@TMP@|$scratch|g" "$2/conform.json")
	fi
	echo "conform: kvport-$1"
	if bin/kvport conform --config "$config" "${3:-bin/kvport-$1}"; then
		passed=$((passed + 1))
	else
		failed=$((failed + 1))
	fi
}

for name in ${PLUGINS:-}; do
	conform "$name" "plugins/$name"
done
conform minimal examples/minimal
conform pystore examples/python examples/python/kvport-pystore
echo "conform: $passed passed, $failed failed"
[ "$failed" -eq 0 ]
