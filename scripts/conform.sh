#!/usr/bin/env bash
# Runs `kvport conform` on every plugin named in PLUGINS and on the examples. A plugin that
# needs a config keeps one that works in its folder's conform.json, and others to be run too in
# conform-NAME.json; @TMP@ in them becomes a fresh folder in every case. The plugins that we ship must pass PROFILES, and those that their folder's
# conform.profiles names; if that begins with "only", no others. Exits non-zero if any failed.
set -euo pipefail
cd "$(dirname "$0")/.."

PROFILES=${PROFILES:-store lifecycle multirank groups fault}
EXAMPLE_PROFILES="store lifecycle multirank fault" # authors copy the examples
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

conform() { # NAME FOLDER BINARY PROFILE...
	local name=$1 config configs=('{}') binary=$3 profiles=()
	[ ! -f "$2/conform.json" ] || configs=("@$2/conform.json")
	for config in "$2"/conform-*.json; do
		[ ! -f "$config" ] || configs+=("@$config")
	done
	for profile in "${@:4}"; do
		profiles+=(--profile "$profile")
	done
	for config in "${configs[@]}"; do
		while [ "$(jobs -rp | wc -l)" -ge "$AT_ONCE" ]; do
			wait -n
		done
		runs=$((runs + 1))
		one "$runs" "$config" "$binary" "kvport-$name: ${*:4}" "${profiles[@]}" &
	done
}

for name in ${PLUGINS:-}; do
	more=
	[ ! -f "plugins/$name/conform.profiles" ] || more=$(cat "plugins/$name/conform.profiles")
	case $more in
	only) echo "conform: kvport-$name: NO PROFILE FITS" && continue ;;
	only*) more=${more#only} ;;
	*) more="$PROFILES $more" ;;
	esac
	# shellcheck disable=SC2086 # one word a profile
	conform "$name" "plugins/$name" "bin/kvport-$name" $more
done
# shellcheck disable=SC2086
conform minimal examples/minimal bin/kvport-minimal $EXAMPLE_PROFILES
go build -buildvcs=false -o "$out/kvport-custom" ./examples/custom
# shellcheck disable=SC2086
conform custom examples/custom "$out/kvport-custom" $EXAMPLE_PROFILES
conform pystore examples/python examples/python/kvport-pystore store multirank
wait
passed=$(find "$out" -name '*.passed' | wc -l)
echo "conform: $passed passed, $((runs - passed)) failed"
[ "$passed" -eq "$runs" ]
