#!/usr/bin/env bash
# Runs `kvport conform` on every plugin named in PLUGINS and on the examples. A plugin that
# needs a config keeps one that works in its folder's conform.json, and others to be run too in
# conform-NAME.json; @TMP@ in them becomes a fresh folder in every case. The plugins that we ship must pass PROFILES, and those that their folder's
# conform.profiles names; if that begins with "only", no others. Exits non-zero if any failed.
set -euo pipefail
cd "$(dirname "$0")/.."

PROFILES=${PROFILES:-store lifecycle multirank groups fault}
passed=0 failed=0
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
		echo "conform: kvport-$name: ${*:4}: $config"
		if bin/kvport conform --config "$config" "${profiles[@]}" "$binary"; then
			passed=$((passed + 1))
		else
			failed=$((failed + 1))
		fi
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
conform minimal examples/minimal bin/kvport-minimal store lifecycle multirank
conform pystore examples/python examples/python/kvport-pystore store multirank
echo "conform: $passed passed, $failed failed"
[ "$failed" -eq 0 ]
