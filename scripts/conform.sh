#!/usr/bin/env bash
# Runs `kvport conform` on every plugin named in PLUGINS and on the examples named in EXAMPLES, or all. What a binary must pass
# are the profiles in its fixture.json; one without profiles is left out. A plugin that needs a config keeps one that works in its
# folder's conform.json, and others to be run too in conform-NAME.json; @TMP@ in them becomes a fresh folder in every case.
# Exits non-zero if any failed.
set -euo pipefail
cd "$(dirname "$0")/.."

AT_ONCE=${AT_ONCE:-2} # most of a run is waiting for limits to pass
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
runs=0

one() { # NUMBER CONFIG BINARY WHAT PROFILE...: says what it found when it has ended, and leaves a file if that is well
	{
		echo "conform: $4: $2"
		bin/kvport conform --config "$2" "${@:5}" "$3" && touch "$out/$1.passed"
	} >"$out/$1.txt" 2>&1 || true
	cat "$out/$1.txt"
}

conform() { # FOLDER BINARY
	local config configs=('{}') profile profiles=() names program
	names=$(python3 -c 'import json, sys; print(*json.load(open(sys.argv[1])).get("profiles", []))' "$1/fixture.json")
	[ -n "$names" ] || return 0
	program=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1])).get("program", ""))' "$1/fixture.json")
	if [ -n "$program" ] && ! env -i "$2" --manifest >/dev/null 2>&1; then # as a host starts it
		echo "conform: $1 IS NOT TESTED: there is no $program in the system's folders"
		return 0
	fi
	[ -f "$2" ] || go build -buildvcs=false -o "$2" "./$1"
	[ ! -f "$1/conform.json" ] || configs=("@$1/conform.json")
	for config in "$1"/conform-*.json; do
		[ ! -f "$config" ] || configs+=("@$config")
	done
	for profile in $names; do
		profiles+=(--profile "$profile")
	done
	for config in "${configs[@]}"; do
		while [ "$(jobs -rp | wc -l)" -ge "$AT_ONCE" ]; do
			wait -n
		done
		runs=$((runs + 1))
		one "$runs" "$config" "$2" "$1: $names" "${profiles[@]}" &
	done
}

for name in ${PLUGINS:-}; do
	conform "plugins/$name" "bin/kvport-$name"
done
for name in ${EXAMPLES-$(cd examples && dirname -- */fixture.json)}; do
	binary=$(find "examples/$name" -name 'kvport-*' -type f) # a program that needs no build
	conform "examples/$name" "${binary:-$out/kvport-$name}"
done
wait
passed=$(find "$out" -name '*.passed' | wc -l)
echo "conform: $passed passed, $((runs - passed)) failed"
[ "$passed" -eq "$runs" ]
