# make test    set up .venv with everything the tests need, then lint, type-check and test
# make format  put Python and C++ into their one layout
# make serve   set up .venv with Quire alone, then serve MODEL (a checkpoint folder or hub name, or none) over HTTP
# make test-MARKER  the slow tests of one marker: chaos, clients, fuzz, long, memory, model, models, quantize, ranks, regions,
#              scheduling, schema, simulator, speculation, web or wheels
# make test-chart  the Helm chart, rendered by Helm's own engine in an environment of its own
# make test-redis  limits of tenants and KV blocks in a real Redis, of Debian's packages, which are unpacked under build
# make test-ray  Quire on a Ray cluster of this machine, with Ray in an environment of its own
# make wheels  the wheels that need no compiler, in dist/; PYTHONS="python3.11 python3.12" names who builds them
# make docs    the documentation as a site, in build/docs
# make peers   compare with other engines; ARGS="--shape tiny --rounds 1" for a quick one
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check
CPP = $(wildcard csrc/*.cpp csrc/*.h csrc/*/*.cpp csrc/*/*.h)
NATIVE = CMakeLists.txt pyproject.toml constraints.txt $(CPP)
# A build writes a few large object files at a time; two cores are what it can count on.
export CMAKE_BUILD_PARALLEL_LEVEL ?= 2

.PHONY: test check format serve install wheels docs test-chart test-redis test-ray peers clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(NATIVE) | $(BIN)/python
	$(PIP) install -q -c constraints.txt -e .
	touch $@

$(VENV)/.dev: $(NATIVE) | $(BIN)/python
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	touch $@ $(VENV)/.installed

install: $(VENV)/.installed

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

test: check
	$(BIN)/python -m pytest -n 2 --durations 10 $(TESTS)

test-%: $(VENV)/.dev
	$(BIN)/python -m pytest -o faulthandler_timeout=3600 -m $* $(TESTS)

export PYTHONS ?= python3.11 python3.12
wheels: | $(BIN)/python
	$(BIN)/python tools/wheels.py $(PYTHONS)

# MODEL unset: the small model that ships with Quire.
MODEL ?=
serve: $(VENV)/.installed
	$(BIN)/quire serve $(MODEL) $(ARGS)

# Its packages are in an environment of their own: nothing else needs them.
build/mkdocs/.installed: mkdocs.yml
	$(PYTHON) -m venv build/mkdocs
	build/mkdocs/bin/pip install --disable-pip-version-check -q mkdocs-material==9.6.21
	touch $@
build/helm/.installed:
	$(PYTHON) -m pip install --quiet --target build/helm helm-python-sdk==0.2.2
	touch $@

test-chart: build/helm/.installed
	PYTHONPATH=build/helm $(BIN)/python -m pytest -q tests/docs/test_deployments.py

REDIS = build/redis/root/usr
build/redis/.unpacked:
	mkdir -p build/redis
	cd build/redis && apt-get download -q redis-server redis-tools libatomic1 libhiredis0.14 libjemalloc2 liblua5.1-0 liblzf1 \
	  libsystemd0 lua-bitop lua-cjson && for each in *.deb; do dpkg -x $$each root; done
	touch $@

test-redis: $(VENV)/.dev build/redis/.unpacked
	PATH="$$PWD/$(REDIS)/bin:$$PATH" LD_LIBRARY_PATH="$$PWD/$(REDIS)/lib/x86_64-linux-gnu" \
	  $(BIN)/python -m pytest -q -m redis tests/server/test_shared_limits.py tests/worker/test_redis_tier.py

# The environment sees what is in the other one, so that Ray's processes find Quire.
build/ray/.installed: $(VENV)/.dev
	$(PYTHON) -m venv build/ray
	build/ray/bin/pip install --disable-pip-version-check -q 'ray[serve,data]==2.60.0'
	$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
	  > $$(build/ray/bin/python -c 'import site; print(site.getsitepackages()[0])')/zz_quire.pth
	touch $@

test-ray: build/ray/.installed
	build/ray/bin/python -m pytest -q -m ray tests/on_ray tests/ranks/test_launchers.py

docs: build/mkdocs/.installed
	build/mkdocs/bin/mkdocs build -q --strict

# The same work on other engines, in turns: installs each under build/peers, then takes hours.
peers: $(VENV)/.installed
	$(BIN)/python -m benchmarks.peers $(ARGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
