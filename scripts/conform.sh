#!/usr/bin/env bash
# Runs `kvport conform` on every plugin named in PLUGINS and on the examples named in EXAMPLES, or all. What a binary must pass
# are the profiles in its fixture.json; one without profiles is left out. A plugin that needs a config keeps one that works in its
# folder's conform.json, and others to be run too in conform-NAME.json; @TMP@ in them becomes a fresh folder in every case.
# Says at the end for how long each profile ran, and how many cases were inconclusive after they had run again. Exits with 1 if a case
# failed, or more than MOST percent were inconclusive; with 3 if one of those is required by a profile; else with 0.
set -euo pipefail
cd "$(dirname "$0")/.."

AT_ONCE=${AT_ONCE:-2} # most of a run is waiting for limits to pass
MOST=2                # percent of all cases that may stay inconclusive
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
runs=0

one() { # NUMBER CONFIG BINARY WHAT PROFILE...: says what it found when it has ended, and leaves its exit code in a file
	local code=0
	echo "conform: $4: $2" >"$out/$1.txt"
	bin/kvport conform --config "$2" "${@:5}" "$3" >>"$out/$1.txt" 2>&1 || code=$?
	echo "$code" >"$out/$1.code"
	cat "$out/$1.txt"
}

# Adds up what the runs say at their ends. Exits as this script does, unless a run failed.
sums() {
	awk -v most="$MOST" '
		sub(/^Seconds of each profile: /, "") {
			n = split($0, parts, ", ")
			for (i = 1; i <= n; i++) {
				split(parts[i], p, " ")
				if (!(p[1] in total)) order[++profiles] = p[1]
				total[p[1]] += p[2]
				if (p[2] + 0 > longest[p[1]]) longest[p[1]] = p[2] + 0
			}
		}
		sub(/^These are required and have no verdict: /, "") { required = required (required == "" ? "" : ", ") $0 }
		/^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped/ {
			cases += $1 + $3 + $7 # what is skipped needs no verdict
			inconclusive += $7
		}
		END {
			for (i = 1; i <= profiles; i++)
				printf "conform: profile %s: %.1f minutes in all, %.1f in the longest run\n", order[i], total[order[i]] / 60, longest[order[i]] / 60
			share = cases ? 100 * inconclusive / cases : 0
			printf "conform: %d of %d cases were inconclusive after they had run again (%.1f %%, at most %d %%)\n", inconclusive, cases, share, most
			if (required != "") print "conform: required and without a verdict: " required
			exit (share > most || !cases ? 1 : (required != "" ? 3 : 0))
		}' "$out"/*.txt
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
code=0 passed=0 undecided=0
if [ "$runs" -gt 0 ]; then
	sums || code=$?
	passed=$(cat "$out"/*.code | grep -cx 0 || true)
	undecided=$(cat "$out"/*.code | grep -cx 3 || true)
fi
failed=$((runs - passed - undecided))
echo "conform: $passed passed, $failed failed, $undecided without all verdicts"
[ "$failed" -eq 0 ] || exit 1
exit "$code"
