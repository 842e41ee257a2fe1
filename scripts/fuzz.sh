#!/usr/bin/env bash
# Finds every fuzz target of the repository and runs each for FUZZTIME seconds ("30s"), or for an
# equal share of FUZZ_TOTAL seconds where that is less. Exits non-zero if any target failed.
set -euo pipefail
cd "$(dirname "$0")/.."

go=${GO:-go}
each=${FUZZTIME:-30s}
each=${each%s}
if ! [[ $each =~ ^[1-9][0-9]*$ ]]; then
	echo "fuzz: FUZZTIME is seconds, as in 30s" >&2
	exit 2
fi

mapfile -t targets < <(grep -rnE --include='*_test.go' '^func Fuzz[A-Za-z0-9_]*\(' . | sed -E 's/^([^:]*)\/[^\/:]*:[0-9]+:func (Fuzz[A-Za-z0-9_]*).*/\1 \2/' | sort)
count=${#targets[@]}
if [ "$count" -eq 0 ]; then
	echo "fuzz: no fuzz target found" >&2
	exit 1
fi
if [ -n "${FUZZ_TOTAL:-}" ] && [ $((each * count)) -gt "$FUZZ_TOTAL" ]; then
	each=$((FUZZ_TOTAL / count))
	[ "$each" -gt 0 ] || each=1
fi

passed=0 failed=0
for target in "${targets[@]}"; do
	read -r folder name <<<"$target"
	echo "fuzz: $folder $name ${each}s"
	if "$go" test -run '^$' -fuzz "^$name\$" -fuzztime "${each}s" -fuzzminimizetime 1x "$folder"; then
		passed=$((passed + 1))
	else
		failed=$((failed + 1))
	fi
done
echo "fuzz: $passed passed, $failed failed"
[ "$failed" -eq 0 ]
