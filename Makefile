# Commands for people and CI. `make train` and `make test` set themselves up on a fresh machine with Python >= 3.11, a C++17
# compiler and make: they create .venv and build the extension, with CUDA if nvcc and a GPU are found.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PY     := $(BIN)/python

# --no-compile: the first import compiles only the modules in use. pip would compile all of them.
PIP_FLAGS := -q --no-input --disable-pip-version-check
INSTALL   := $(PY) -m pip install $(PIP_FLAGS) --no-compile
unexport PYTHONDONTWRITEBYTECODE

# The build reads QSHARD_CUDA, QSHARD_CUDA_ARCHITECTURES (both explained in pyproject.toml) and CUDACXX from the environment.
CPP_SOURCES := $(shell find ffi -name __pycache__ -prune -o -print)
CPP_STYLED  := $(shell find ffi -path ffi/third_party -prune -o -type f \
                     \( -name '*.cc' -o -name '*.h' -o -name '*.inc' -o -name '*.cu' -o -name '*.cuh' \) -print)

# Stamps: one per installed requirements file, and one for the package.
STAMP := $(VENV)/stamp-

# The package layout as installed, built from links, for tools that read sources. qshard/torch_bridge is a link to torch_bridge.
define LINK_TREE
rm -rf $(1) && mkdir -p $(1)/qshard
ln -s $(CURDIR)/qshard/* $(1)/qshard/
endef

.PHONY: help train test near slow nightly optimized fuzz sanitize h100 titan transformers engines vllm trainers notebooks docs cu gpu cudacheck gpufuzz bench report lint format tree cross wheel bare smoke matrix clean
.DELETE_ON_ERROR:
# Two pips must not write to one environment at the same time. The compiler still runs in parallel.
.NOTPARALLEL:

help:  ## print this list
	@awk -F ':.*## ' '/^[a-z0-9]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

TRAIN_FLAGS = $(if $(STEPS),--steps $(STEPS)) $(if $(FORMATS),--formats $(FORMATS))
train: $(STAMP)run $(STAMP)package  ## train the JAX and the PyTorch example; STEPS=n FORMATS=all
	$(PY) examples/train_jax.py $(TRAIN_FLAGS)
	$(PY) examples/train_torch.py $(TRAIN_FLAGS)

# Two cores: 9 to 12 minutes with two workers. A third made it slower, and each takes up to 5 GB.
WORKERS := 2
test: $(STAMP)test $(STAMP)package  ## run the tests, or some: ARGS="tests/cpu -k cast"; WORKERS=8 on more cores
	$(BIN)/pytest -n $(WORKERS) --dist worksteal -m "not slow$(if $(ARGS),, and not docs)" $(or $(ARGS),tests)

near: $(STAMP)test $(STAMP)package  ## run the tests nearest to a source; FILE=qshard/layout.py
	tests=$$($(PY) -P tests/near.py $(FILE)) && echo $$tests && $(BIN)/pytest -n 2 --dist worksteal -m "not slow" $$tests

slow: $(STAMP)test $(STAMP)package  ## run the tests that take minutes, which `make test` skips
	$(BIN)/pytest -n $(WORKERS) --dist worksteal -m slow $(or $(ARGS),tests)

# The H100 plugin, torchtitan and transformers come first, because tests use them.
nightly: build/jax_cuda build/titan build/transformers build/engines build/vllm optimized slow titan transformers engines vllm trainers fuzz sanitize notebooks bare  ## run everything that .ci/run skips; takes hours

optimized: export JAX_DISABLE_MOST_OPTIMIZATIONS := 0
optimized: test

FUZZ_FLAGS = $(if $(CALLS),--calls $(CALLS),--calls 100000) $(if $(SEED),--seed $(SEED))
fuzz: $(STAMP)test $(STAMP)package  ## call every op, and expert parallelism in JAX, with arguments drawn at random; CALLS=n SEED=n
	mkdir -p build
	$(PY) -P tests/fuzz/fuzz_calls.py $(FUZZ_FLAGS) --progress build/fuzz_call
	$(PY) -P tests/fuzz/fuzz_expert_parallel.py $(if $(SEED),--seed $(SEED))

# A separate build in a separate environment: the hook of the editable install would find the plain extension. Python itself has no
# sanitizers, so their runtime is preloaded, and leak detection is off because it would report Python's.
SANITIZED       := build/sanitize
SANITIZED_TESTS := $(addprefix tests/cpu/test_,calls.py kernels_simd.py adam.py ops.py program_arguments.py master.py master_torch.py torch_ops.py torch_programs.py)
SANITIZED_PYTHON = LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 $(SANITIZED)/venv/bin/python -P
sanitize: $(STAMP)test $(STAMP)package  ## run fuzz and the tests of the CPU kernels under AddressSanitizer and UBSan
	$(BIN)/cmake -S ffi -B $(SANITIZED)/cmake -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-g1 -DQSHARD_CUDA=OFF \
	    -DQSHARD_SANITIZE=address,undefined,float-cast-overflow -DPython_EXECUTABLE=$(abspath $(PY))
	$(BIN)/cmake --build $(SANITIZED)/cmake --parallel 2
	$(call LINK_TREE,$(SANITIZED)/tree)
	cp $(SANITIZED)/cmake/_ffi.*.so $(SANITIZED)/tree/qshard/
	$(PY) -m venv --without-pip $(SANITIZED)/venv
	{ echo $(CURDIR)/$(SANITIZED)/tree; $(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; } > \
	    $$($(SANITIZED)/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/qshard.pth
	$(SANITIZED_PYTHON) tests/fuzz/fuzz_calls.py --calls 20000 --progress $(SANITIZED)/fuzz_call
	$(SANITIZED_PYTHON) -m pytest -n 2 --dist worksteal -m "not slow" $(or $(ARGS),$(SANITIZED_TESTS))

# JAX's CUDA plugin compiles without a GPU. It is put beside .venv, not installed into it.
h100: $(STAMP)test $(STAMP)package build/jax_cuda  ## compile JAX programs for H100s without a GPU; downloads 0.5 GB
	$(BIN)/pytest -m "not slow" $(or $(ARGS),tests/cpu/test_jax_h100.py)

build/jax_cuda: requirements/h100.txt | $(PY)
	$(INSTALL) --no-deps --upgrade --target $@ -r $<
	touch $@

# Not part of .venv: torchtitan is much larger than the rest, and other tests do not need it.
titan: $(STAMP)test $(STAMP)package build/titan  ## train torchtitan's models, and with its trainer; downloads 0.4 GB
	$(BIN)/pytest -m "not slow" $(or $(ARGS),tests/dist/test_torchtitan.py tests/dist/test_torchtitan_trainer.py)

build/titan: requirements/titan.txt | $(PY)
	$(INSTALL) --no-deps --upgrade --target $@ -r $<
	touch $@

transformers: $(STAMP)test $(STAMP)package build/transformers  ## train models of transformers; downloads 30 MB
	$(BIN)/pytest -m "not slow" $(or $(ARGS),tests/cpu/test_transformers.py tests/cpu/test_transformers_families.py)

build/transformers: requirements/transformers.txt | $(PY)
	$(INSTALL) --no-deps --upgrade --target $@ -r $<
	touch $@

engines: $(STAMP)test $(STAMP)package build/engines  ## check files of serving engines with their own libraries; downloads 40 MB
	$(BIN)/pytest -m "not slow" $(or $(ARGS),tests/cpu/test_engine_loaders.py)

build/engines: requirements/engines.txt | $(PY)
	$(INSTALL) --no-deps --upgrade --target $@ -r $<
	touch $@

vllm: $(STAMP)test $(STAMP)package build/vllm  ## load files and streams of weights into vLLM's models, on CPUs; downloads 0.4 GB
	$(BIN)/pytest -m "not slow" $(or $(ARGS),tests/cpu/test_vllm_loader.py)

build/vllm: requirements/vllm.txt | $(PY)
	$(INSTALL) --no-deps --upgrade --target $@ -r $<
	touch $@

trainers: $(STAMP)test $(STAMP)package build/trainers  ## run docs/trainers*.md with the libraries that they name; downloads 0.2 GB
	$(BIN)/pytest $(or $(ARGS),tests/dist/test_trainers_page.py)

# flax's examples are in its source release alone.
build/trainers: requirements/trainers.txt requirements/transformers.txt | $(PY)
	$(INSTALL) --no-deps --upgrade --target $@ -r $<
	$(PY) -m pip download $(PIP_FLAGS) --no-deps --no-build-isolation --no-binary :all: --dest $@/flax_source \
	    $(filter flax==%,$(shell cat requirements/test.txt))
	mkdir -p $@/flax_examples
	tar -xf $@/flax_source/flax-*.tar.gz -C $@/flax_examples --strip-components 2 --wildcards 'flax-*/examples/*'
	touch $@

notebooks: $(STAMP)test $(STAMP)notebooks $(STAMP)package  ## execute the notebooks and compare their outputs; WRITE=1 stores them
	$(PY) -P tests/notebooks.py $(if $(WRITE),--write)

# -P: import the package as installed, and read the sources that it was built from.
docs: $(STAMP)docs $(STAMP)test $(STAMP)package tree  ## build the documentation site into build/docs, and run the code in its pages
	NO_MKDOCS_2_WARNING=1 $(PY) -P -m mkdocs build --config-file docs/site/mkdocs.yml
	$(BIN)/pytest -n 2 --dist worksteal -m "docs and not slow" tests

# In ninja, `SOURCE^` is the object that SOURCE compiles to.
cu: $(STAMP)build  ## compile one CUDA source, without a GPU; FILE=ffi/kernels/cuda/adam/adam.cu
	test -f build/cu/build.ninja || $(BIN)/cmake -G Ninja -S ffi -B build/cu -DQSHARD_CUDA=ON -DQSHARD_CUDA_ARCHITECTURES=90 \
	    -DPython_EXECUTABLE=$(abspath $(PY)) -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja)
	$(BIN)/ninja -C build/cu $(abspath $(FILE))^

gpu:  ## on a machine with CUDA: build into the CURRENT environment, run the GPU tests and the benchmarks
	QSHARD_CUDA=ON $(PYTHON) -m pip install $(PIP_FLAGS) --no-build-isolation --no-deps .
	$(PYTHON) -P -m pytest --gpu -m gpu $(or $(ARGS),tests)
	$(MAKE) bench PY=$(PYTHON) BENCH_NEEDS=

# Only kernels of qshard are instrumented. Each tensor is an allocation of its own, so that a read beside it is found. Products run
# under two tools: initcheck does not see what kernels of others write, and racecheck 2025.3 itself fails in them.
CUDACHECK = compute-sanitizer --kernel-name kernel_substring=qshard --error-exitcode 1
cudacheck: export PYTORCH_NO_CUDA_MEMORY_CACHING := 1
cudacheck:  ## on a machine with CUDA and this package: call every op under compute-sanitizer
	for tool in memcheck synccheck initcheck racecheck; do \
	    $(CUDACHECK) --tool $$tool $(PYTHON) -P tests/cpu/kernel_bits.py cuda --few || exit 1; \
	done
	for tool in memcheck synccheck; do \
	    $(CUDACHECK) --tool $$tool $(PYTHON) -P -m pytest --gpu -m gpu -k "every_combination or loop_over_experts" \
	        tests/gpu/test_gemm_gpu.py tests/gpu/test_grouped_gpu.py || exit 1; \
	done

GPUFUZZ_FLAGS = $(if $(CALLS),--calls $(CALLS)) $(if $(SEED),--seed $(SEED))
gpufuzz:  ## on a machine with CUDA and this package: compare random calls of every op with the CPU, bit for bit; CALLS=n SEED=n
	$(PYTHON) -P tests/fuzz/fuzz_devices.py $(GPUFUZZ_FLAGS)

BENCH_NEEDS := $(STAMP)run $(STAMP)package
bench: $(BENCH_NEEDS)  ## run every benchmarks/bench_*.py, then make report
	failed=; for script in $(sort $(wildcard benchmarks/bench_*.py)); do $(PY) $$script || failed="$$failed $$script"; done; \
	    $(PY) benchmarks/report.py && $(PY) benchmarks/scaling_model.py && if test "$$failed"; then echo "failed:$$failed" >&2; exit 1; fi

report:  ## write docs/results.md, and the numbers in README.md and docs/dev/scaling.md, from the rows in benchmarks/results
	$(PYTHON) benchmarks/report.py
	$(PYTHON) benchmarks/scaling_model.py

# The import checker runs under -S: the editable install's hook would point it to ./qshard, which lacks torch_bridge.
lint: $(STAMP)test $(STAMP)lint tree  ## check style, sentences, types and the import rule
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(PY) -P tests/prose.py
	$(BIN)/clang-format --dry-run -Werror $(CPP_STYLED)
	cd build/tree && $(abspath $(BIN))/mypy --config-file ../../pyproject.toml --cache-dir ../mypy -p qshard
	cd build/tree && PYTHONPATH=$$($(abspath $(PY)) -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
	    $(abspath $(PY)) -S $(abspath $(BIN))/lint-imports --no-logo --config ../../pyproject.toml --cache-dir ../imports

format: $(STAMP)lint  ## rewrite sources in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_STYLED)

tree:
	$(call LINK_TREE,build/tree)

# CMake starts this machine's Python through the "emulator" env.
cross: $(STAMP)build  ## compile ffi for aarch64, without CUDA; needs g++-aarch64-linux-gnu
	$(BIN)/cmake -G Ninja -S ffi -B build/aarch64 -DCMAKE_BUILD_TYPE=Release -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	    -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_CROSSCOMPILING_EMULATOR=env -DQSHARD_CUDA=OFF \
	    -DPython_EXECUTABLE=$(abspath $(PY)) -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja)
	$(BIN)/ninja -C build/aarch64

# One wheel for Python 3.11, and one of the stable ABI for 3.12 and newer, with CUDA if nvcc is found. They are built from the sdist, so
# their version has no label, and zig links them, so they load with any glibc since WHEEL_GLIBC. `true`: make discards the output of
# a shell that exits with 127.
PYTHONS     ?= $(shell for python in python3.11 python3.12 python3.13 python3.14; do $$python -c '' 2>/dev/null && echo $$python; done; true)
BUILDERS    := $(filter %3.11,$(PYTHONS)) $(firstword $(filter-out %3.11,$(PYTHONS)))
WHEEL_CUDA  ?= $(or $(QSHARD_CUDA),$(shell $(PYTHON) ffi/cmake/qshard_plan.py plan ON >/dev/null 2>&1 && echo ON || echo OFF))
WHEEL_GLIBC := 2.28
WHEEL_TAG   := manylinux_$(subst .,_,$(WHEEL_GLIBC))_$(shell uname -m)
# A new environment at build/$(1) for $$python, with the wheel that pip chooses for it.
define INSTALL_WHEEL
rm -rf build/$(1); $$python -m venv build/$(1); \
    build/$(1)/bin/python -m pip install $(PIP_FLAGS) --no-compile --no-deps --no-index --find-links build/dist qshard
endef

wheel: $(STAMP)build $(STAMP)wheel  ## build sdist and wheels into build/dist, and check them; PYTHONS="python3.11" QSHARD_CUDA=OFF
	rm -rf build/dist build/wheel && mkdir -p build/wheel/source
	$(PY) -m build --sdist --no-isolation --outdir build/dist .
	tar -xf build/dist/qshard-*.tar.gz -C build/wheel/source --strip-components 1
	set -e; for python in $(BUILDERS); do env=$(CURDIR)/build/wheel/$$python; \
	    $$python -m venv $$env; $$env/bin/python -m pip install $(PIP_FLAGS) --no-compile -r requirements/build.txt; \
	    QSHARD_CUDA=$(WHEEL_CUDA) PATH="$(abspath $(BIN)):$$PATH" $$env/bin/python -m pip wheel $(PIP_FLAGS) \
	        --no-build-isolation --no-deps -C build-dir=$$env/cmake -C cmake.define.QSHARD_GLIBC=$(WHEEL_GLIBC) \
	        --wheel-dir build/wheel/linux build/wheel/source; \
	done
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --plat $(WHEEL_TAG) --wheel-dir build/dist build/wheel/linux/*.whl
	$(BIN)/twine check --strict build/dist/*
	$(PY) -P tests/wheels.py build/dist
	set -e; for python in $(PYTHONS); do $(call INSTALL_WHEEL,clean); \
	    build/clean/bin/python -m pip install $(PIP_FLAGS) --no-compile --find-links build/dist qshard; \
	    build/clean/bin/python -P tests/smoke.py none; done

# -P keeps ./qshard off the path, so that the tests import the installed wheel.
bare: wheel  ## run tests/null on the wheel of each Python, in an environment without jax and torch
	set -e; for python in $(PYTHONS); do $(call INSTALL_WHEEL,bare); \
	    build/bare/bin/python -m pip install $(PIP_FLAGS) --no-compile -r requirements/bare.txt; \
	    build/bare/bin/python -P -m pytest -n 2 --dist worksteal tests/null; done

FRAMEWORKS ?= jax torch
smoke: wheel  ## run the wheel of each Python with jax and with torch as pip installs them; downloads several GB
	set -e; for python in $(PYTHONS); do for framework in $(FRAMEWORKS); do $(call INSTALL_WHEEL,smoke); \
	    build/smoke/bin/python -m pip install $(PIP_FLAGS) --no-compile "qshard[$$framework]" --find-links build/dist; \
	    build/smoke/bin/python -P tests/smoke.py $$framework; done; done

# The oldest and the newest Python found.
MATRIX_oldest = $(firstword $(PYTHONS))
MATRIX_newest = $(lastword $(PYTHONS))
matrix: matrix-oldest matrix-newest  ## run the tests on the oldest supported and the newest frameworks; needs 11 GB
matrix-%: requirements/%.txt
	rm -rf build/matrix/$* && $(MATRIX_$*) -m venv build/matrix/$*
	build/matrix/$*/bin/python -m pip install $(PIP_FLAGS) --no-compile -r requirements/build.txt -r $<
	build/matrix/$*/bin/python -m pip install $(PIP_FLAGS) --no-compile --no-build-isolation --no-deps .
	build/matrix/$*/bin/python -P -c 'import qshard; print(qshard.build_info())'
	build/matrix/$*/bin/python -P -m pytest -n 2 --dist worksteal -m "not slow" $(or $(ARGS),tests)

clean:  ## remove .venv, build and caches
	rm -rf $(VENV) build .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "qshard needs Python 3.11 or newer; found " \
	    + sys.version.split()[0] + ". Name one: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)

$(STAMP)test: requirements/build.txt requirements/run.txt requirements/bare.txt requirements/pytest.txt
$(STAMP)docs: requirements/bare.txt requirements/pytest.txt
$(STAMP)package: $(STAMP)build

$(STAMP)package: pyproject.toml $(CPP_SOURCES)
	$(INSTALL) --no-build-isolation --no-deps --editable .
	touch $@

$(STAMP)%: requirements/%.txt | $(PY)
	$(INSTALL) -r $<
	touch $@
