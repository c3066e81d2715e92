# Every target sets up what it needs (scripts/setup.sh; nothing to do when nothing changed).
# After `make setup` nothing touches the network: models are local folders.
BIN := .venv/bin
ARGS ?=
export HF_HUB_OFFLINE := 1
# OpenMP threads spin for microseconds only: see CPU_ENV in tools/kvevict_tools/launcher.py.
export GOMP_SPINCOUNT := 10000

.DEFAULT_GOAL := help
.PHONY: help setup model demo recording compare serve gallery docs lint test test-avx2 bench-smoke test-machines test-policies test-models test-sglang test-services test-peers flows \
	test-compile rehearse-gpu campaign bench-serving bench-judges bench-traces bench-quality bench-peers bench-policies

# `make help` shows the lines that begin with "##@" as headings, and every target's text after "##".

##@ Start here
help: ## show this list
	@awk '/^##@ / { printf "\n%s\n", substr($$0, 5) } \
		match($$0, /^[a-z0-9-]+:.*## /) { name = $$0; sub(/:.*/, "", name); printf "  make %-15s %s\n", name, substr($$0, RLENGTH + 1) }' \
		$(MAKEFILE_LIST)

setup: ## create or update .venv (stock SGLang on CPU, this package, test tools)
	@scripts/setup.sh

model: setup ## download and convert the demo model, once (ARGS=qwen-0.5b: another one; ARGS=--list)
	@$(BIN)/python -m kvevict_tools.models $(if $(filter model,$(MAKECMDGOALS)),$(ARGS),>/dev/null)

demo: model ## eight questions about one document at all, a fifth and a twentieth of its bytes, and all taken back: about a minute
	@$(BIN)/python examples/demo/run.py $(ARGS)

recording: model ## the demo as it was seen, drawn: docs/demo.svg, and its figures in docs/results/demo-watched.json
	@$(BIN)/python -W ignore examples/demo/record.py $(ARGS)

compare: model ## stock SGLang, ours with nothing compressed, and ours on real programs, measured in turn: about 10 minutes
	@$(BIN)/python examples/demo/compare.py $(ARGS)

serve: model ## serve the demo model with compressed prefixes (ARGS="--budget 0.1 -- --port 30001")
	@$(BIN)/sgl-kvevict serve demo $(ARGS)

gallery: model ## run all examples; writes docs/gallery.md
	@$(BIN)/python -W ignore examples/write_gallery.py

docs: ## build the documentation's site, links checked; begin at out/docs/index.html
	@scripts/setup.sh docs
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict -f tools/docs/mkdocs.yml

##@ Before every commit
lint: setup ## ruff (rules and format), mypy, and the layers of imports
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

# Two processes, a file at a time: most tests keep one core busy, and so does a server that starts. Files are taken in
# order, the longest first (tests/conftest.py).
test: model ## run the test suite (ARGS="tests/kernels -k compact"; ARGS="-m 'not slow'")
	@$(BIN)/python -m pytest --durations=25 $(if $(ARGS),$(ARGS),-n 2 --dist loadfile --no-loadscope-reorder)

test-avx2: model ## the same as on a processor without AVX-512, where that can be hidden (root, or user namespaces)
	@scripts/hide_avx512.sh $(BIN)/python -m pytest --durations=25 $(if $(ARGS),$(ARGS),-n 2 --dist loadfile --no-loadscope-reorder)

bench-smoke: model ## a few ratios to stock beside the committed ones; fails below 80 % of them, under 3 minutes
	@$(BIN)/python -W ignore benchmarks/serving/smoke.py $(ARGS)

##@ Tests of hours or of other environments
test-machines: setup ## 100,000 random operations on the tree (ARGS="20000 7 windows": so many, from this seed on, with layers of that kind; also states)
	@$(BIN)/python -W ignore tools/run_machines.py $(ARGS)

flows: setup ## count files, functions and calls that a prompt, a split, a shrink, .. pass through; writes docs/results/flows.json
	@$(BIN)/python -W ignore tools/trace_flows.py $(ARGS)
	@$(BIN)/python tools/write_tables.py

test-policies: model ## every policy in a real server with the demo's programs, two budgets; half an hour
	@rm -f docs/results/policies-served.md
	@KVEVICT_ALL_POLICIES=docs/results/policies-served.md $(BIN)/python -m pytest tests/e2e/test_policies.py $(ARGS)

test-models: setup ## every family of docs/models.md in real servers, tiny random models; half an hour
	@$(BIN)/python -m pytest tools/models/check_served.py tools/models/check_recurrent.py $(ARGS)

test-sglang: ## what we rely on, in another version of SGLang (VERSION=0.5.24)
	@scripts/test_sglang.sh "$(VERSION)" $(ARGS)

test-services: model ## the store in services of other people, as they are: S3 (moto), Mooncake; replicas behind smg
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .venv-services -r requirements/services.txt
	@PYTHONPATH=.venv-services PATH="$(CURDIR)/.venv-services/bin:$$PATH" $(BIN)/python -m pytest tests/store/test_services.py tests/e2e/test_replicas.py -rs $(ARGS)

# Threads that wait asleep: several times faster where cores are shared.
test-peers: export OMP_WAIT_POLICY := passive
test-peers: model ## compare kept positions with kvpress, in an environment of its own
	@scripts/setup.sh peers
	@PYTHONPATH=tools .venv-peers/bin/python -m peers.record_kvpress "$$($(BIN)/python -m kvevict_tools.models)"
	@$(BIN)/python -m pytest tools/peers/check_kvpress.py $(ARGS)

test-compile: setup ## compile every kernel for four GPU architectures with two Tritons; writes docs/results/gpu/compiled.md
	@scripts/setup.sh compile
	@$(BIN)/python -m pytest tools/check_compiled.py $(ARGS)

rehearse-gpu: setup ## the calls of tools/gpu_kit/run.py with tiny models on a faked GPU, beside what is expected
	@scripts/rehearse_gpu.sh $(ARGS)

campaign: model ## random operations, input, requests, faults and a soak; many hours, resumable (ARGS="machine fuzz"); writes docs/reliability.md
	@PYTHONPATH=tools:tests $(BIN)/python -W ignore -m campaign.run $(ARGS)

##@ Benchmarks: each writes its page and its raw figures below docs/
bench-serving: model ## a serving benchmark (ARGS="decode"; also shared_prefix, pressure, hot, multi_turn, store, prefill, speculation, insertion, generation, agents)
	@$(BIN)/python -W ignore benchmarks/serving/bench_$(firstword $(ARGS)).py $(wordlist 2,99,$(ARGS))

bench-judges: model ## foreign programs against stock and ours: cache-pressure, SGLang's bench_serving; writes docs/results/serving/judges.md
	@scripts/setup.sh cache-pressure
	@$(BIN)/python -W ignore benchmarks/serving/bench_judges.py $(ARGS)

bench-traces: setup ## conversations of coding agents through SGLang's tree and ours, over memory; no model; writes docs/results/traces
	@nice $(BIN)/python -W ignore benchmarks/traces/run.py $(ARGS)

bench-quality: model ## what answers are worth after compression (ARGS="--policies distilled --budgets 0.2 0.1"; --aware)
	@$(BIN)/python benchmarks/quality/run.py $(ARGS)
	@$(BIN)/python benchmarks/quality/plot.py
	@$(BIN)/python tools/write_tables.py

bench-peers: export OMP_WAIT_POLICY := passive
bench-peers: model ## the same contexts and questions with kvpress, in an environment of its own
	@scripts/setup.sh peers
	@.venv-peers/bin/python benchmarks/quality/peers.py "$$($(BIN)/python -m kvevict_tools.models)" $(ARGS)
	@$(BIN)/python benchmarks/quality/plot.py
	@$(BIN)/python tools/write_tables.py

bench-policies: model ## what each policy costs and what it keeps; writes docs/results/policies-* and docs/policies.md
	@$(BIN)/python benchmarks/policies/run.py $(ARGS)
	@$(BIN)/python benchmarks/policies/draw_kept.py
	@$(BIN)/python benchmarks/policies/write_tables.py
