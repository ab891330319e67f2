# `make demo` trains a small model; `make test` runs the tests; `make check` is everything that is checked without them.
# All of them make .venv first when it is missing or out of date.
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.up-to-date
# Tests and checks start hundreds of interpreters: where the environment forbids files of bytecode, each would compile
# what it imports of src and tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv demo test test-gpu smoke matrix gpu dist check check-format check-lint check-types check-layers check-attributes check-words check-docs format clean docs validate bench lab FORCE

help:
	@echo "make venv    .venv with everything in it (PYTHON=... names the interpreter, >= 3.11)"
	@echo "make demo    train a small Llama on 4 local processes and compare predicted with measured"
	@echo "make test    the tests (TESTS=tests/pure for a part of them)"
	@echo "make test-gpu  the tests that need a CUDA device"
	@echo "make gpu     all that this machine's devices can show, in one result file and one page (docs/first-day.md)"
	@echo "make smoke   the short set of tests (tests/smoke.txt), of this environment's versions"
	@echo "make matrix  the short set under other versions, written into docs/support.md (SETS=\"oldest newest\")"
	@echo "make dist    an sdist and a wheel in dist/, checked and tried in a new environment"
	@echo "make check   format, lint, types, import layers, owners of attributes, words, documentation examples"
	@echo "make docs    the documentation as a site, in build/site"
	@echo "make validate  predictions beside published measurements, into docs/validation.md (ARGS=internevo for one source)"
	@echo "make bench   measured steps beside predicted ones (bench/README.md; ARGS=... for its options, as of the next)"
	@echo "make lab     a command on the ranks of an emulated cluster (lab/README.md)"
	@echo "make bench-NAME  run benchmarks/NAME.py, by hand on a quiet machine (ARGS=... for its options)"
	@echo "make format  rewrite the sources in the project's format"
	@echo "make clean   remove what the other targets made"

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt tools/venv.sh tools/torchtitan.txt
	@tools/venv.sh $(VENV)
	@touch $@

demo: $(STAMP)
	@$(BIN)/zeromesh train examples/demo.toml

# Three processes for two cores, as some tests wait. Each takes a third of all files, and then from those that others have
# left. A thread each: those of one process would wait for a core that another has. Tests on emulated clusters are timed,
# and so run by themselves.
test: export OMP_NUM_THREADS = 1
test: $(STAMP)
ifdef TESTS
	@$(BIN)/python -m pytest $(TESTS)
else
	@$(BIN)/python -m pytest --numprocesses 3 --dist worksteal --ignore tests/netlab tests; others=$$?; \
	$(BIN)/python -m pytest tests/netlab && exit $$others
endif

test-gpu: $(STAMP)
	@$(BIN)/python -m pytest tests/gpu

smoke: $(STAMP)
	@$(BIN)/python -m pytest @tests/smoke.txt

matrix: $(STAMP)
	@$(BIN)/python tools/matrix.py $(or $(SETS),pinned oldest before newest) $(ARGS)

gpu: $(STAMP)
	@$(BIN)/python tools/first_day.py $(ARGS)

dist: $(STAMP)
	@$(BIN)/python -m tools.dist

docs: $(STAMP)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "build/site/index.html"

check: check-format check-lint check-types check-layers check-attributes check-words check-docs

check-format: $(STAMP)
	$(BIN)/ruff format --check .

check-lint: $(STAMP)
	$(BIN)/ruff check .

check-types: $(STAMP)
	$(BIN)/mypy

check-layers: $(STAMP)
	$(BIN)/lint-imports

check-attributes: $(STAMP)
	$(BIN)/python tools/check_attributes.py

check-words: $(STAMP)
	$(BIN)/python tools/check_words.py

check-docs: $(STAMP)
	$(BIN)/python tools/check_docs.py
	$(BIN)/python -m pytest --collect-only --quiet @tests/smoke.txt

validate: $(STAMP)
	@$(BIN)/python -m validation $(ARGS)

bench lab: $(STAMP)
	@$(BIN)/python -m $@ $(ARGS)

bench-%: $(STAMP) FORCE
	@$(BIN)/python -m benchmarks.$* $(ARGS)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache runs dist build
