# Two commands on a fresh machine: `make demo` and `make test`. Each sets itself up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Tests wait for processes and links as much as they compute: three keep two cores busy.
WORKERS ?= 3
# Links under test are on this machine; a proxy must not stand between them.
export no_proxy := localhost,127.0.0.1
export NO_PROXY := $(no_proxy)

.PHONY: install demo test lint bench clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml src/thinwire/__init__.py lab/pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "thinwire needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' -e ./lab
	touch $@

demo: install
	$(BIN)/thinwire demo

lint: install
	$(BIN)/ruff check src tests examples tools lab
	$(BIN)/ruff format --check src tests examples tools lab
	$(BIN)/mypy

test: install lint
	$(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --dist loadfile --no-loadscope-reorder

bench: install
	$(BIN)/python -m thinwire_lab.bench
	$(BIN)/python -m thinwire_lab.deaths
	$(BIN)/python -m pytest -m slow

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
