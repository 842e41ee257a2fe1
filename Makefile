# Works with Go, Python 3 with pip, gcc and make; `make help` lists the targets.

SHELL       := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

GO        ?= go
PYTHON    ?= python3
TOOL      := $(GO) tool -modfile=tools/go.mod
VERSION   ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
BUILD     := $(GO) build -ldflags '-X main.version=$(VERSION)'
# Everything is compiled alike, so that tests, and what they build, find in the cache what make build has compiled.
export GOFLAGS := $(strip -trimpath -buildvcs=false $(GOFLAGS))
# What protocol v1 was when it was last generated: messages may only grow from there.
GOLDEN    := proto/kvport/v1/v1.binpb
PLUGINS   := $(patsubst plugins/%/,%,$(sort $(wildcard plugins/*/)))

# So many packages' tests run at once. Many of them mostly wait, so that is two more than the cores that CI has.
TEST_P    ?= 4
# After so long a package's tests end with the stacks of what hangs.
TEST_LIMIT ?= 60m
# Tests are green beside other work: a conformance case that a busy machine keeps from a verdict is skipped.
export KVPORT_MAY_BE_INCONCLUSIVE ?= 1
FUZZTIME  ?= 30s
BENCH     ?= .
# Where make vllm-test puts vLLM, and make sglang-test SGLang.
VLLM_DIR  ?= .deps/vllm
SGLANG_DIR ?= .deps/sglang
# The part of the full counts that make soak runs: PART=n/N.
PART      ?= 1/1

# What takes longest begins first, beside everything else: in make test, and in make race.
LONGEST   := ./verify/acceptance ./conformance/mutants ./plugins/multi ./plugins/nixl ./connectors/offload ./cmd/kvport ./host ./verify/simulate ./plugins/p2p ./engine ./verify/simulate/fleet
RACED     := ./conformance/mutants ./host ./engine ./host/agent ./pipe/tcp
# What has no goroutines of ours that share memory, or only those that other packages' tests start too: tests that
# run processes, read files, or play everything in one goroutine.
UNRACED   := ./internal/sandbox ./verify/bench/... ./cmd/... ./docs ./examples/... ./verify/acceptance/... ./internal/archtest ./verify/names/... ./verify/protocol/... ./verify/simulate/... ./verify/attack/... ./plugins/...
# Packages that have no goroutines at all, nor have their tests, so that there is nothing to detect. Package archtest keeps that true.
ALONE     := ./conformance/internal/model ./connector ./engine/gguf ./engine/kvcache ./engine/router/admission ./engine/router/internal/fairlru ./engine/router/policy ./engine/sample ./engine/sched ./engine/tokenizer ./internal/fault ./internal/pairid ./internal/strictjson ./internal/tracker ./internal/wire
# What is built and tested in a copy of the repository, so nothing else needs a processor as much: CI runs it as a stage of its own.
PLANTED   := ./verify/acceptance/planted
# What tests leave out, since it takes long: go vet, which make lint runs, and debuggers' symbols, also in the programs that they build.
LEAN      := GOFLAGS='$(GOFLAGS) -vet=off -ldflags=-s'
# The packages whose tests need failpoints.
FAULTED   := ./internal/fault ./verify/faultsuite

.DEFAULT_GOAL := help
PY        := $(CURDIR)/.deps/venv/bin

.PHONY: deps build wheel wheel-test demo test test-faults test-planted pytest pylint native-test native-abi native-abi-gpu native-asan soak soak-sample race fuzz conform attack bench bench-serve lint vllm-test sglang-test generate clean help

deps: ## fetch the demo model (93 MB), a Valkey server (2 MB), NIXL (69 MB) and Python packages (62 MB) of tests, all pinned by hash, and the Go modules
	@$(PYTHON) scripts/deps.py
	@$(GO) mod download

build: ## build bin/kvport and every plugin as bin/kvport-NAME
	@mkdir -p bin
	$(BUILD) -o bin/kvport ./cmd/kvport
	@for name in $(PLUGINS); do \
		echo "$(BUILD) -o bin/kvport-$$name ./plugins/$$name"; \
		$(BUILD) -o "bin/kvport-$$name" "./plugins/$$name"; \
	done
	$(BUILD) -o bin/kvport-minimal ./examples/minimal

wheel: ## build dist/kvport_vllm-*.whl and dist/kvport_sglang-*.whl: the shims for vLLM and SGLang, each with kvport and its plugins inside, stripped
	@GO="$(GO)" $(PYTHON) scripts/wheel.py

wheel-test: deps wheel ## install each into a fresh environment and use it
	@$(PYTHON) scripts/wheel_test.py

demo: deps build ## single node against prefill + decode + router; CONNECTOR=NAME and DEMO_ARGS='...' are passed on
	@$(GO) run ./examples/demo $(if $(CONNECTOR),--connector $(CONNECTOR)) $(DEMO_ARGS)

test: deps build ## the tests, short counts, except those that need failpoints (test-faults) or a copy of the repository (test-planted); what runs beside the Go tests is printed after them (18 minutes on 2 quiet cores)
	@$(LEAN) scripts/test.sh $(GO) test -p $(TEST_P) -timeout $(TEST_LIMIT) $(LONGEST) $$($(GO) list ./... | grep -vxF "$$($(GO) list $(PLANTED))")

test-planted: deps build ## the test that a new connector takes its folder, its plugin and its page, and nothing else: in a copy of the repository
	$(LEAN) $(GO) test -count 1 -timeout $(TEST_LIMIT) $(PLANTED)

test-faults: ## the tests that need failpoints: a kill and an error at each; CI runs them as a stage of their own
	$(LEAN) $(GO) test -tags kvport_fault -v -timeout $(TEST_LIMIT) $(FAULTED)

pytest: pylint ## the tests of python/, without vLLM; needs make deps build
	cd python && GO="$(GO)" $(PY)/python -m pytest

pylint: ## ruff and mypy on python/; needs make deps
	cd python && $(PY)/ruff check . && $(PY)/ruff format --check . && $(PY)/mypy

native-test: deps ## the tests of native/ and of what is built on it, none skipped for want of a library
	KVPORT_NATIVE_TEST=1 $(GO) test -count 1 -timeout 10m ./native/... ./pipe/ucx ./connectors/nixl ./connectors/p2pnccl

native-abi: ## compile native/'s C declarations against NIXL's and UCX's headers (43 MB, once); needs gcc and cargo, which fetches one
	@$(PYTHON) scripts/abi.py

native-abi-gpu: ## the same for CUDA and NCCL (220 MB, once), which are then tested as far as that goes without a GPU
	@$(PYTHON) scripts/abi.py --gpu
	$(GO) test -count 1 ./native/cuda ./native/nccl

native-asan: deps ## the tests of native/ under the address sanitizer; without its leak checker, which dies of UCX's threads
	ASAN_OPTIONS=detect_leaks=0 KVPORT_NATIVE_TEST=1 CGO_ENABLED=1 $(GO) test -asan -count 1 -timeout 10m ./native/...

soak: deps build ## the tests with their full counts, a part at a time: PART=3/12 runs the third of twelve, at most 45 minutes a call; a call goes on where the last one stopped
	@$(LEAN) $(PYTHON) scripts/soak.py --part $(PART)

soak-sample: deps build ## some of them, picked by the commit, for at most SAMPLE (120) seconds
	@$(LEAN) $(PYTHON) scripts/soak.py --sample $(or $(SAMPLE),120)

race: deps build ## the tests under the race detector, shorter, but those of UNRACED and ALONE
	$(LEAN) CGO_ENABLED=1 $(GO) test -race -short -p $(TEST_P) -timeout $(TEST_LIMIT) $(RACED) $$($(GO) list ./... | grep -vxFf <($(GO) list $(UNRACED) $(ALONE)))

fuzz: ## run each fuzz target for FUZZTIME (30s); FUZZ_TOTAL=SECONDS caps them all together
	@$(LEAN) GO="$(GO)" FUZZTIME="$(FUZZTIME)" scripts/fuzz.sh

conform: deps build ## run the conformance suite against every plugin
	@$(LEAN) PLUGINS="$(PLUGINS)" scripts/conform.sh

attack: deps build ## attack the binaries as clients, strangers, servers and plugins would (docs/attacks.md), for SAMPLE seconds if given, picked by the commit; ATTACK_ARGS='-run plugin/' is passed on
	@$(GO) run ./verify/attack $(if $(SAMPLE),-sample $(SAMPLE)s -seed 0x$(shell git rev-parse --short=15 HEAD 2>/dev/null || echo 1)) $(ATTACK_ARGS)

bench: deps ## run the Go benchmarks; BENCH=REGEXP picks
	$(GO) test -run '^$$' -bench '$(BENCH)' -benchmem ./...

SERVED    := docs/benchmarks/serve
TRAFFIC   := --plugin-path bin --threads 2 --workload docs/benchmarks/serve-workload.json --format json
SIMULATED := docs/benchmarks/simulated

bench-serve: deps build ## compare prefill and decode apart with whole engines: 100 minutes of real traffic, for docs/benchmarks/serve*.jsonl, and the simulation
	bin/kvport bench serve $(TRAFFIC) --setups chunked,chunked-128,whole-prefix_aware,pd,pd-turns --rate 0.5 --rounds 10 > $(SERVED).jsonl.new
	bin/kvport bench serve $(TRAFFIC) --setups chunked,pd,pd-turns,pd-offload --rate 0.3 --rounds 6 > $(SERVED)-turns.jsonl.new
	bin/kvport bench serve $(TRAFFIC) --setups whole-round_robin,whole-least_loaded,whole-prefix_aware,whole-session,pd-aware --rate 0.4 > $(SERVED)-policies.jsonl.new
	bin/kvport sim serve --format json > $(SIMULATED).jsonl.new
	bin/kvport sim serve --measured-short-steps --rate 2,6 --format json > $(SIMULATED)-measured-steps.jsonl.new
	for name in $(SERVED) $(SERVED)-turns $(SERVED)-policies $(SIMULATED) $(SIMULATED)-measured-steps; do mv "$$name.jsonl.new" "$$name.jsonl"; done
	$(GO) generate ./verify/bench/report

vllm-test: deps build ## from nothing a real vLLM in .deps/vllm (6 GB), then kvport's promises under it; VLLM_ARGS='--only ttft' is passed on
	@$(PYTHON) scripts/vllm_setup.py --dir $(VLLM_DIR)
	$(VLLM_DIR)/venv/bin/python tests/vllm/run.py --deps $(VLLM_DIR) $(VLLM_ARGS)

sglang-test: deps build ## from nothing a real SGLang in .deps/sglang, beside the environment of vllm-test, then the five lines equal, damage, engines, kills and store with small counts; SGLANG_ARGS='--all' or '--only equal' is passed on
	@$(PYTHON) scripts/sglang_setup.py --dir $(SGLANG_DIR) --vllm $(VLLM_DIR)
	$(VLLM_DIR)/venv/bin/python tests/sglang/run.py --deps $(SGLANG_DIR) --vllm $(VLLM_DIR) $(SGLANG_ARGS)

lint: ## golangci-lint, buf lint and buf breaking, at the versions of tools/go.mod (the first run compiles them)
	$(TOOL) golangci-lint config verify
	$(TOOL) golangci-lint run --allow-parallel-runners --timeout 10m ./...
	$(TOOL) buf lint proto
	$(TOOL) buf breaking proto --against $(GOLDEN)

generate: ## write generated code again: protobuf (which may only grow), kernels
	$(TOOL) buf breaking proto --against $(GOLDEN)
	$(TOOL) buf generate proto --template proto/buf.gen.yaml
	$(TOOL) buf build proto --as-file-descriptor-set --exclude-source-info -o $(GOLDEN)
	$(GO) generate ./...

clean: ## remove what build and demo wrote; the model in .deps/model stays
	rm -rf bin dist
	rm -f .deps/*.json

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
