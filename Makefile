# make test, make tables: on a fresh machine each creates .venv, installs and builds first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NATIVE := CMakeLists.txt setup.py pyproject.toml $(shell find csrc -path csrc/tests -prune -o -type f -print)

# The C++ tests, built in the directory $(1) with the options $(2), and run.
define BUILD_CTEST
$(BIN)/cmake -S . -B $(1) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DMAGEP_BUILD_TESTS=ON $(2)
$(BIN)/cmake --build $(1)
endef
define RUN_CTEST
$(BUILD_CTEST)
$(BIN)/ctest --test-dir $(1) --output-on-failure
endef

# The package in $(1)/package as it is installed, with the libraries built in $(1).
define PACKAGE
set -e; rm -rf $(1)/package; mkdir -p $(1)/package; cp -r magep_fast $(1)/package; \
  cp -r triton_kernels $(1)/package/magep_fast; cp $(1)/*.so $(1)/package/magep_fast
endef

.PHONY: install test gpu sanitize sanitize-python valgrind soak cuda tables lint format docs wheel release-check clean

install: $(STAMP)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The torch that the wheel is built against comes first, so that nothing later asks for another.
$(VENV)/.requirements: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet "setuptools>=77" "pybind11>=2.13" "cmake>=3.24" ninja wheel build
	touch $@

$(STAMP): $(NATIVE) $(VENV)/.requirements
	PATH="$(CURDIR)/$(BIN):$$PATH" CMAKE_ARGS="-DMAGEP_WERROR=ON" $(BIN)/pip install --quiet --no-build-isolation --editable ".[test,bench,data,dev,triton,docs]"
	touch $@

# One process per core, each with one thread but where a test sets more: two OpenMP teams on the same cores crawl, and less
# so if threads sleep while they wait.
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest --numprocesses auto --dist loadgroup

# Tracing makes Python slower by half and more, so only the tests that reach most of magep_fast/ between them are traced.
# Lines that none of them runs are listed; fewer than 90 % is a failure.
TRACED := $(patsubst %,tests/test_%.py,backends chain convert cuda info layers library models permutation ragged spaces \
  swap symmetry terms training_step triton_backend)

test: $(STAMP)
	$(PYTEST) $(TRACED:%=--ignore=%)
	$(PYTEST) --cov --cov-report= --cov-fail-under=0 $(TRACED)
	$(BIN)/coverage report
	TRITON_INTERPRET=1 $(PYTEST) -m gpu
	$(call RUN_CTEST,build/ctest,)

# On a machine with a GPU: the kernels against the reference, then the layers timed.
gpu: $(STAMP)
	$(BIN)/python -m magep_fast.info
	$(BIN)/python -m pytest -m gpu
	$(BIN)/python -m benchmarks layers --device cuda

sanitize: $(STAMP)
	$(call RUN_CTEST,build/sanitize,-DMAGEP_SANITIZE=ON)

# The operators under the same sanitizers, called from Python, into which the sanitizer's library has to be loaded first.
# It sees no leaks: Python and torch have too many of their own. Tests that trace and compile take long there and call the
# same kernels.
SANITIZED := build/sanitize-python
sanitize-python: $(STAMP)
	$(BIN)/cmake -S . -B $(SANITIZED) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python \
	  -DMAGEP_SANITIZE=ON -DMAGEP_WITH_CUDA=OFF
	$(BIN)/cmake --build $(SANITIZED) --target magep_fast_ops
	$(call PACKAGE,$(SANITIZED)); cp -r tests benchmarks pyproject.toml $(SANITIZED)/package
	cd $(SANITIZED)/package; OMP_NUM_THREADS=1 ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	  LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libstdc++.so)" \
	  $(CURDIR)/$(BIN)/python -m pytest tests/test_fuzz.py tests/test_stack.py tests/test_native.py tests/test_training_step.py \
	  -k "not TestOperators and not operators_with and not compiled and not exported"

# The C++ tests under valgrind, which knows AVX2 but not AVX-512, nor the threads that stand in for a GPU's.
valgrind: $(STAMP)
	$(call BUILD_CTEST,build/ctest,)
	for test in build/ctest/csrc/tests/test_*_portable build/ctest/csrc/tests/test_*_avx2; do \
	  echo "valgrind $$test"; valgrind --quiet --error-exitcode=1 --leak-check=full --errors-for-leak-kinds=definite $$test || exit 1; \
	done

# Training with ever other shapes and numbers of threads: memory must not grow.
SOAK_MINUTES := 30
soak: $(STAMP)
	$(BIN)/python -m tests.soak --minutes $(SOAK_MINUTES)

# The CUDA library for every architecture, warnings as errors. Its kernels need what csrc/cuda/resources.csv says, it keeps
# within a size and a time, and a package with it works, also where there is no CUDA driver.
CUDA_MOST_BYTES := 8000000
CUDA_MOST_SECONDS := 1800
cuda: $(STAMP)
	@command -v nvcc > /dev/null || { echo "make cuda: SKIPPED, nvcc is not installed: the CUDA kernels were not compiled"; exit 0; }; \
	set -e; started=$$(date +%s); \
	$(BIN)/cmake -S . -B build/cuda -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python \
	  -DMAGEP_WITH_CUDA=ON -DMAGEP_WERROR=ON -DCMAKE_CUDA_FLAGS=-Xptxas=-v; \
	$(BIN)/cmake --build build/cuda --clean-first --target magep_fast_cuda _native > build/cuda/build.log 2>&1 || { cat build/cuda/build.log; exit 1; }; \
	seconds=$$(($$(date +%s) - started)); bytes=$$(wc -c < build/cuda/libmagep_fast_cuda.so); \
	echo "make cuda: compiled in $$seconds s (at most $(CUDA_MOST_SECONDS)), $$bytes bytes (at most $(CUDA_MOST_BYTES))"; \
	$(BIN)/python csrc/cuda/resources.py --check build/cuda/build.log; \
	$(call PACKAGE,build/cuda); \
	PYTHONPATH=build/cuda/package $(BIN)/python csrc/cuda/smoke.py; \
	test $$bytes -le $(CUDA_MOST_BYTES); test $$seconds -le $(CUDA_MOST_SECONDS)

tables: $(STAMP)
	$(BIN)/python -m benchmarks tables
	$(BIN)/python -m benchmarks layers --repeats 10

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files 'csrc/*.cpp' 'csrc/*.h' 'csrc/*.cu' 'csrc/*.cuh')

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files 'csrc/*.cpp' 'csrc/*.h' 'csrc/*.cu' 'csrc/*.cuh')

# The site of docs/ in build/site; a broken link or reference is an error.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

wheel: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m build --wheel --no-isolation --outdir dist .

# Source distribution and wheel, each installed in an environment of its own and tested there.
release-check: $(STAMP)
	$(BIN)/python -m tests.release

clean:
	rm -rf build dist *.egg-info magep_fast/*.so
