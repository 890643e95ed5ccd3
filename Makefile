# Each job does all its own set-up, once: scripts/setup.sh prepares the environment and prints where its programs are.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: demo test bench lint format clean help

# More words for the command: make demo ARGS="--epochs 3", make test ARGS="-k buckets"
ARGS ?=
env = bin=$$(scripts/setup.sh); export PATH="$$bin:$$PATH"

demo: ## train on real data over 2 processes x 2 partitions, and compare with the plain model
	@$(env); exec python -m torchrelay demo $(ARGS)

test: ## the tests of the Rust core and of the Python package
	@$(env); set -x; cargo test; python -m pytest $(ARGS)

bench: ## the benchmarks: criterion's, then the side-by-side scripts
	@$(env); set -x; cargo bench; for script in benches/python/*.py; do python "$$script"; done

lint: ## everything that reads the sources without running them
	@$(env); set -x; \
	cargo fmt --all --check; \
	cargo clippy --locked --workspace --all-targets -- -D warnings; \
	ruff check .; \
	ruff format --check .; \
	python -m mypy; \
	python -m mypy.stubtest torchrelay._core

format: ## format the sources, and mend what can be mended
	@$(env); set -x; cargo fmt --all; ruff check --fix .; ruff format .

clean: ## remove what the jobs made, except for the environment
	rm -rf target dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis python/torchrelay/_core.*.so
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

help: ## this list
	@sed -n 's/^\([a-z]*\): ## \(.*\)/make \1	\2/p' Makefile
