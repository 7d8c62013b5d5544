# Every target sets up what it needs: `make demo` is enough in a fresh clone.
# Another interpreter: make demo PYTHON=python3.12 (after `make clean`, if .venv exists).

PYTHON ?= python3
PYTEST_ARGS ?=
WORKERS ?= 3
ROWS ?=
MATRIX_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# DEMO: what the demo needs is installed. READY: tools and tests, too. Compiling all packages would take longer than
# installing them, so only modules that nearly every process imports are compiled: once, and not by several processes at the
# same time.
DEMO := $(VENV)/.demo
READY := $(VENV)/.ready
# The classes of Spark, laid out for the many JVMs that tests start: see tests/jvm.py.
CLASSES := build/spark.jsa

# Most of the tests' time is waiting, so more processes than cores run them; tests/conftest.py says which stay together.
# Some of the slow ones run alone: they make hosts out of network namespaces, two clusters of which fit on a machine.
PARALLEL := -n $(WORKERS)
ALONE := tests/multihost
SLOW := slow and not gpu and not night

# Demo and tests stay on this machine's loopback interface; two ranks on two cores get one thread each.
export SPARK_LOCAL_IP ?= 127.0.0.1
export OMP_NUM_THREADS ?= 1
# Tests start hundreds of processes: without compiled files each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test night gpu test-slow slow-alone slow-together all-together ahead matrix lint docs format bench setup java clean

demo: $(DEMO) java
	$(BIN)/python examples/flights.py
	$(BIN)/python examples/flights_estimator.py --rows 100000 --epochs 5

test: setup java $(CLASSES)
	$(BIN)/python -m pytest -m "not slow and not gpu and not night" $(PARALLEL) $(PYTEST_ARGS)

test-slow: slow-alone slow-together

slow-alone: setup java $(CLASSES)
	$(BIN)/python -m pytest -m "$(SLOW)" -n 2 $(ALONE) $(PYTEST_ARGS)

# Long searches, and what CI covers at a smaller size.
night: setup java $(CLASSES)
	SPARK_HVD_NIGHT=20000 $(BIN)/python -m pytest -m "not gpu" --timeout 3600 $(PYTEST_ARGS)

# On a machine with GPUs, whose torch is built for CUDA: half an hour, and a table of what has passed.
gpu: setup
	$(BIN)/python -m tests.gpu

slow-together: setup java $(CLASSES)
	$(BIN)/python -m pytest -m "$(SLOW)" $(PARALLEL) $(ALONE:%=--ignore=%) $(PYTEST_ARGS)

# What CI runs, of both sets at once: a process starts Spark and ranks once for the tests of both.
all-together: setup java $(CLASSES)
	$(BIN)/python -m pytest -m "not gpu and not night" $(PARALLEL) $(ALONE:%=--ignore=%) $(PYTEST_ARGS)

# Rows by name: make matrix ROWS="lowest py3.12"; .ci/run gives MATRIX_ARGS=--smoke
matrix: setup java
	$(BIN)/python tests/matrix.py $(MATRIX_ARGS) $(ROWS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p spark_hvd -p benchmarks
	$(BIN)/lint-imports

# What tests find made: the site of the documentation, and the simulated devices.
ahead: docs
	$(BIN)/python -m tests.gpu_sim.library

docs: setup
	@mkdir -p build
	@# --quiet would hide warnings from --strict
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir out/new >build/docs.log 2>&1 || { cat build/docs.log; exit 1; }
	@rm -rf out/site && mv out/new out/site
	@echo "Open out/site/index.html"

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup java
	$(BIN)/python -m benchmarks all

setup: $(READY)

$(DEMO): EXTRA := examples
$(READY): EXTRA := dev
# constraints.txt is what [dev] needs, no more and no less: four pips with a part each download and unpack at the same time.
# They are quieter: each warns of packages that another one is installing. If nothing is missing then, as .ci/missing says in
# two seconds, only spark_hvd itself is installed. Otherwise pip looks for all that [dev] needs: on some systems a part has a
# package of another system.
$(READY): BESIDE = awk '!/^\#/ {print > ("$(VENV)/part" NR % 4)}' constraints.txt && \
	ls $(VENV)/part? | xargs -P 4 -n 1 $(BIN)/python -m pip install $(PIP) --quiet --no-deps -r
$(READY): THERE = $(BIN)/python -m pip install $(PIP) --no-index --no-deps --no-build-isolation --check-build-dependencies -e . && \
	$(BIN)/python .ci/missing $(EXTRA) ||
PIP := --quiet --disable-pip-version-check --no-compile

$(DEMO) $(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "Creating $(VENV) with $(PYTHON)"; $(PYTHON) -m venv $(VENV); }
	@echo "Installing spark_hvd[$(EXTRA)] into $(VENV) (minutes the first time)"
	-@$(BESIDE)
	@$(THERE) $(BIN)/python -m pip install $(PIP) -e '.[$(EXTRA)]' -c constraints.txt
	@$(BIN)/python -c "import pyspark.sql, spark_hvd.estimators, spark_hvd.torch, torch._dynamo"
	@touch $(DEMO) $@

java:
	@.ci/java

$(CLASSES): $(READY) | java
	@mkdir -p build
	@$(BIN)/python -m tests.jvm >build/classes.log 2>&1 || { cat build/classes.log; exit 1; }

clean:
	rm -rf $(VENV) build dist out *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
