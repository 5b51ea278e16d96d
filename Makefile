# plansmith: every command a person or CI needs. `make help` lists them.
#
# Variables
#   PYTHON       the interpreter the environment is made from (3.10 to 3.13)
#   VENV         where the environment lies
#   TRITON_VENV  where that of tritonserver lies
#   CROSS_VENV   where that lies which compiles for other processors and emulates them
#   TORCH        the torch that tests compare with; a CPU build serves
#   TORCH_INDEX  where CPU builds of torch are; used beside the default index, so it may be out of reach
#   JOBS         parallel C++ compile jobs
#   BENCH_FLAGS  of bench-peers, bench-peers-install and bench-smoke, e.g. --rounds 3 --variants plansmith,llama_cpp:q8_0
#   HTTP_PORT, GRPC_PORT, METRICS_PORT   of `make triton`: 8000, 8001, 8002; 0 = a free one
#   CHECKPOINT, ENGINE, REPOSITORY, PRECISION   of `make triton`: what it serves, and where it writes that

PYTHON ?= python3
VENV ?= .venv
TRITON_VENV ?= $(VENV)-triton
CROSS_VENV ?= $(VENV)-cross
CROSS ?= ziglang==0.17.1 unicorn==2.1.4
TORCH ?= torch==2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
JOBS ?= $(shell nproc)

BIN := $(VENV)/bin
PY := $(BIN)/python
PIP := $(PY) -m pip --disable-pip-version-check -q
TRITON_PIP := $(TRITON_VENV)/bin/python -m pip --disable-pip-version-check -q
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)
# One thread a library: the tests run tiny models, where more threads only wait for each other.
TEST_ENV := OMP_NUM_THREADS=2 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

SOURCES := $(shell find builder runtime plugins calibration serving triton_repo cli sizing fleet -type f -not -path '*/__pycache__/*')
CXX_FILES := $(shell find builder runtime tests plugins bench -name '*.cc' -o -name '*.h' -o -name '*.c')

.PHONY: help demo build triton-env triton triton-stop test test-cpp test-py test-gpu test-slow test-asan test-tsan test-cross lint format typecheck \
	bench kernels bench-gpu bench-kernels bench-accuracy bench-peers bench-peers-install bench-peer-quality bench-plan-size bench-smoke bench-build-memory bench-cold-start bench-fleet bench-quantization bench-runtime bench-scaling bench-serving soak-serving wheel clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 20

# ---------------------------------------------------------------- environment

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo "plansmith needs Python 3.10 to 3.13, $(PYTHON) is `$(PYTHON) -V`; run make PYTHON=python3.12"; exit 1; }
	@command -v c++ >/dev/null || command -v g++ >/dev/null || \
		{ echo "plansmith needs a C++17 compiler and found none; install one, e.g. apt-get install g++"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip
	$(PIP) install 'scikit-build-core>=1.0' 'cffi>=1.16' 'cmake>=3.18' ninja
	@touch $@

# The package itself, as a wheel would install it, with what building and comparing engines takes.
$(VENV)/.deps: $(VENV)/.made pyproject.toml
	$(PIP) install `$(PY) tools/requirements.py rtx verify guided serve triton fleet`
	@touch $@

build/wheel/.made: $(VENV)/.made pyproject.toml CMakeLists.txt $(SOURCES)
	rm -rf build/wheel
	$(PIP) wheel --no-build-isolation --no-deps -w build/wheel .
	@touch $@

$(VENV)/.installed: $(VENV)/.deps build/wheel/.made
	$(PIP) install --no-deps --force-reinstall build/wheel/*.whl
	@touch $@

# A tritonserver and the Python that its models run in.
$(TRITON_VENV)/.deps: $(VENV)/.made pyproject.toml
	$(PYTHON) -m venv $(TRITON_VENV)
	$(TRITON_PIP) install --upgrade pip
	$(TRITON_PIP) install `$(PY) tools/requirements.py guided tritonserver`
	@touch $@

$(TRITON_VENV)/.installed: $(TRITON_VENV)/.deps build/wheel/.made
	$(TRITON_PIP) install --no-deps --force-reinstall build/wheel/*.whl
	@touch $@

$(VENV)/.test-deps: $(VENV)/.deps
	$(PIP) install --retries 1 --timeout 60 --extra-index-url $(TORCH_INDEX) $(TORCH)
	$(PIP) install `$(PY) tools/requirements.py test`
	@touch $@

$(VENV)/.dev-deps: $(VENV)/.made pyproject.toml
	$(PIP) install `$(PY) tools/requirements.py dev`
	@touch $@

# A compiler for aarch64 and macOS with their C and C++ libraries, and QEMU's processors as a library: 500 MB.
$(CROSS_VENV)/.deps: $(VENV)/.made Makefile
	$(PYTHON) -m venv $(CROSS_VENV)
	$(CROSS_VENV)/bin/python -m pip --disable-pip-version-check -q install $(CROSS)
	@touch $@

triton-env: $(TRITON_VENV)/.installed  ## make the environment of a real tritonserver

build: $(VENV)/.installed  ## make the environment and install plansmith into it

# ---------------------------------------------------------------- the main job

demo: build  ## checkpoint -> engine for CPU and an sm89 GPU -> checked -> text
	bash tools/demo.sh $(BIN)

triton: build triton-env  ## a tritonserver with a real model on this machine's CPU, and calls to try
	PLANSMITH_TRITON_ENV=$(abspath $(TRITON_VENV)) bash tools/triton.sh $(BIN)

triton-stop:  ## let its requests finish and stop it
	$(BIN)/plansmith triton stop $(or $(REPOSITORY),demo/triton)

# ---------------------------------------------------------------- tests

build/test/build.ninja: $(VENV)/.made
	$(BIN)/cmake -S . -B build/test -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DPLANSMITH_BUILD_TESTS=ON

test: test-cpp test-py  ## everything that runs without a GPU

test-cpp: build/test/build.ninja
	$(BIN)/cmake --build build/test
	$(BIN)/ctest --test-dir build/test --output-on-failure

test-py: build triton-env $(VENV)/.test-deps
	$(TEST_ENV) PLANSMITH_TRITON_ENV=$(abspath $(TRITON_VENV)) $(PY) -m pytest -m "not gpu and not slow"

test-slow: build triton-env $(VENV)/.test-deps  ## full-size compiles and long property tests
	$(TEST_ENV) PLANSMITH_TRITON_ENV=$(abspath $(TRITON_VENV)) $(PY) -m pytest -m slow

test-gpu: build $(VENV)/.test-deps  ## what needs a CUDA device
	$(TEST_ENV) $(PY) -m pytest -m gpu

test-asan: $(VENV)/.made  ## the C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer
	$(BIN)/cmake -S . -B build/asan -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DPLANSMITH_BUILD_TESTS=ON \
		-DPLANSMITH_SANITIZE=address,undefined
	$(BIN)/cmake --build build/asan
	UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 $(BIN)/ctest --test-dir build/asan --output-on-failure

test-tsan: $(VENV)/.made  ## the C++ tests under ThreadSanitizer
	$(BIN)/cmake -S . -B build/tsan -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DPLANSMITH_BUILD_TESTS=ON \
		-DPLANSMITH_SANITIZE=thread
	$(BIN)/cmake --build build/tsan
	TSAN_OPTIONS=halt_on_error=1 $(BIN)/ctest --test-dir build/tsan --output-on-failure

test-cross: $(CROSS_VENV)/.deps  ## the kernels' tests for aarch64, run in an emulated processor; and kernels compiled for macOS
	PLANSMITH_CROSS_VENV=$(abspath $(CROSS_VENV)) PYTHON_BIN=$(abspath $(BIN)) bash tools/test_cross.sh

# ---------------------------------------------------------------- style

lint: $(VENV)/.dev-deps  ## ruff and clang-format, nothing changed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)

format: $(VENV)/.dev-deps  ## ruff and clang-format, in place
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

# mypy sees the sources through a tree of links: on an installed package it would check only part of them.
typecheck: $(VENV)/.dev-deps $(VENV)/.deps  ## mypy --strict
	@mkdir -p build/pytree/plansmith && touch build/pytree/plansmith/py.typed
	@printf '"""plansmith."""\n\n__version__ = "0"\n' > build/pytree/plansmith/__init__.py
	@for d in builder runtime plugins calibration serving triton_repo cli sizing fleet; do ln -sfn ../../../$$d build/pytree/plansmith/$$d; done
	MYPYPATH=build/pytree $(PY) -m mypy --strict -p plansmith

# ---------------------------------------------------------------- measurements

bench: bench-accuracy bench-quantization bench-peers bench-scaling bench-runtime  ## all measurements that docs/benchmarks.md shows

bench-accuracy: build $(VENV)/.test-deps  ## logits, tokens and KL against transformers; batch invariance, memory, start, KV waste
	$(PY) bench/accuracy.py
	$(PY) bench/batch_invariance.py
	$(PY) bench/footprint.py
	$(PY) bench/kv_waste.py

bench-quantization: build $(VENV)/.test-deps  ## every recipe: its cost, and the engine beside ModelOpt's simulation (half an hour)
	$(PY) bench/quantization.py

bench-peers: build $(VENV)/.test-deps  ## the cpu target beside llama.cpp, OpenVINO, ONNX Runtime, CTranslate2, vLLM, transformers
	$(PY) bench/peers.py $(BENCH_FLAGS)

bench-peers-install: build $(VENV)/.test-deps  ## only make the peers' environments and models (build/peers)
	$(PY) bench/peers.py --install $(BENCH_FLAGS)

bench-peer-quality: build $(VENV)/.test-deps  ## what rounding costs plansmith and its peers: KL to the float32 model
	$(PY) bench/peer_quality.py --store $(BENCH_FLAGS)

bench-smoke: build $(VENV)/.test-deps  ## two quick rounds of the cpu target beside the last ones recorded (BENCH_FLAGS=--record)
	$(PY) bench/smoke.py $(BENCH_FLAGS)

bench-fleet: build  ## a fleet's build beside its compilers: time, an unchanged fleet, memory, the same bytes twice
	$(PY) bench/fleet.py --output docs/results/fleet.json

bench-build-memory: build  ## the memory of compiles beside what is predicted
	$(PY) bench/build_memory.py --checkpoint demo/smollm2 --shape wide --shape deep --shape llama1b \
		--output docs/results/build_memory.json

bench-plan-size: build  ## what GPU plans hold beside what is predicted
	$(PY) bench/plan_size.py --output docs/results/plan_size.json

bench-cold-start: build  ## from a process' start to its first token, with cold and warm caches
	$(PY) bench/cold_start.py

bench-scaling: build $(VENV)/.test-deps  ## a decode step's time against batch and context, beside the roofline (five minutes)
	$(PY) bench/scaling.py --store

bench-runtime: build $(VENV)/.test-deps  ## prefix reuse, speculation, structured output, scheduler cost and policies
	$(PY) bench/prefix_reuse.py
	$(PY) bench/speculation.py
	$(PY) bench/guided.py
	$(PY) bench/scheduler.py

bench-serving: build triton-env $(VENV)/.test-deps  ## what Triton and the OpenAI server cost beside the in-process engine
	PLANSMITH_TRITON_ENV=$(abspath $(TRITON_VENV)) $(PY) bench/serving.py

soak-serving: build triton-env $(VENV)/.test-deps  ## ten minutes of 200 streams that leave early, against each server
	PLANSMITH_TRITON_ENV=$(abspath $(TRITON_VENV)) $(PY) bench/serving_soak.py

kernels: build $(VENV)/.test-deps  ## compile every GPU kernel for every SM; registers, shared memory, spills
	$(PY) -m plansmith.plugins.aot --output build/kernels
	$(PY) tools/kernel_tables.py --from build/kernels/resources.json

bench-gpu:  ## check and measure the device kernels on this machine's GPU (docs/gpu.md)
	bash bench/gpu_check.sh

bench-kernels: $(VENV)/.made  ## GB/s and GFLOP/s of the CPU kernels
	$(BIN)/cmake -S . -B build/bench -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DPLANSMITH_BUILD_BENCH=ON
	$(BIN)/cmake --build build/bench
	build/bench/bench_kernels

# ---------------------------------------------------------------- the rest

wheel: $(VENV)/.made  ## a wheel in dist/
	$(PIP) wheel --no-build-isolation --no-deps -w dist .

clean:  ## remove what was built; keeps the environment and the demo
	rm -rf build dist
	rm -f $(VENV)/.installed
