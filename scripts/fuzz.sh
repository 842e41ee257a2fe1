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

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
log=$work/log

# Compiles the tests of a folder once for all of its targets. What a target finds interesting is kept where go test -fuzz keeps it.
compile() { # FOLDER
	[ "$1" = "$compiled" ] && return
	compiled=
	"$go" test -c -vet=off -fuzz . -o "$work/tests" "$1" && corpus=$("$go" env GOCACHE)/fuzz/$("$go" list "$1") && compiled=$1
}

# Runs one target. Go's fuzzing sometimes takes its own end of time for an error: "context deadline
# exceeded", and no input was written that fails. Such a run has found nothing; it is repeated.
run() { # FOLDER NAME
	local try
	for try in 1 2 3; do
		if (cd "$1" && "$work/tests" -test.run '^$' -test.paniconexit0 -test.fuzz "^$2\$" -test.fuzztime "${each}s" -test.fuzzminimizetime 1x \
			-test.fuzzcachedir "$corpus") >"$log" 2>&1; then
			tail -n 2 "$log"
			return 0
		fi
		if grep -q 'Failing input written' "$log" || ! grep -qx ' *context deadline exceeded' "$log"; then
			break
		fi
		echo "fuzz: $1 $2 ran out of its time in Go's own shutdown (try $try)"
	done
	cat "$log"
	return 1
}

passed=0 failed=0 compiled=
for target in "${targets[@]}"; do
	read -r folder name <<<"$target"
	echo "fuzz: $folder $name ${each}s"
	if compile "$folder" && run "$folder" "$name"; then
		passed=$((passed + 1))
	else
		failed=$((failed + 1))
	fi
done
echo "fuzz: $passed passed, $failed failed"
[ "$failed" -eq 0 ]
