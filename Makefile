# roofline. `make demo` and `make test` do all the set-up; `make help` lists the rest.

VERSION := 0.1.0
CC      := $(if $(filter default,$(origin CC)),gcc,$(CC))
CXX     := $(if $(filter default,$(origin CXX)),g++,$(CXX))
ARCH    ?= native
# Where objects and tests go; `make sanitize` uses another place with other flags.
B       ?= build
RUN     ?= run
PYTHON  := .venv/bin/python

# FMA must be allowed by name with -std=c11. Never finite-math: a NaN has to stay one.
# gcc tuned for Zen splits some FMAs into two instructions, by the shape of a loop: then an output's
# last bit depends on the tile that computed it, and so on the number of threads. The parameter forbids it.
CLANG    := $(findstring clang,$(shell $(CC) --version 2>/dev/null))
CONTRACT := -ffp-contract=fast $(if $(CLANG),,--param=avoid-fma-max-bits=0)
FAST     := -O3 -march=$(ARCH) $(CONTRACT) -fno-math-errno
WARNINGS := -Wall -Wextra -Wshadow -Wconversion -Werror
HARDEN   := -fstack-protector-strong -fPIE
CFLAGS   ?= $(FAST)
LIBS     := -lsentencepiece -lpcre2-8 -lutf8proc -lxxhash -lm

# ---- what this machine has ----
try_c     = $(shell printf '$(1)\n' | $(CC) $(2) -x c -fsyntax-only - 2>/dev/null && echo yes)
HASH     := \#
ifeq ($(origin NVCC),undefined) # NVCC= builds without CUDA
NVCC     := $(shell command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
endif
override NVCC := $(if $(NVCC),$(realpath $(shell command -v $(NVCC))))
CUDA     := $(if $(NVCC),$(shell $(NVCC) --version | sed -n 's/.*release \([0-9]*\).*/\1/p'))
ifeq ($(shell [ "0$(CUDA)" -ge 12 ] && echo yes),) # older ones do not know Hopper
override NVCC :=
endif
MISSING  := $(if $(call try_c,$(HASH)include <xxhash.h>),,libxxhash-dev) \
            $(if $(call try_c,$(HASH)include <utf8proc.h>),,libutf8proc-dev) \
            $(if $(call try_c,$(HASH)include <pcre2.h>,-DPCRE2_CODE_UNIT_WIDTH=8),,libpcre2-dev) \
            $(if $(shell printf '$(HASH)include <sentencepiece_processor.h>\n' | $(CXX) -x c++ -fsyntax-only - 2>/dev/null && echo yes),,libsentencepiece-dev)
MISSING  := $(strip $(MISSING))

FLAGS    := $(CFLAGS) $(WARNINGS) $(HARDEN) $(EXTRA) $(if $(NVCC),-DWITH_CUDA) -I. -MMD -MP -g

# Machine code for every GPU from Ampere to Hopper, and PTX for later ones; `make CUDA_ARCHS=90a` is
# quicker. The files of Hopper's own path hold no code for older ones.
CUDA_ARCHS    ?= 80 86 89 90a
CUDA_GENCODE  := $(foreach a,$(CUDA_ARCHS),-gencode arch=compute_$(a),code=sm_$(a)) -gencode arch=compute_90,code=compute_90
HOPPER_SOURCE := kernels/cuda_decode.cu kernels/cuda_attention_near.cu kernels/cuda_attention_far.cu \
                 kernels/cuda_attention_rows.cu
HOPPER_ARCHS  := -gencode arch=compute_90a,code=sm_90a -gencode arch=compute_90,code=compute_90
# wgmma is in sm_90a alone: later devices have no code for it, nor does PTX.
WGMMA_SOURCE  := kernels/cuda_matmul_hopper.cu kernels/cuda_matmul_few.cu kernels/cuda_attention_hopper.cu
WGMMA_ARCHS   := -gencode arch=compute_90a,code=sm_90a
NVCCFLAGS     ?= -O3
CUDA_FLAGS    := -std=c++17 $(NVCCFLAGS) -lineinfo -DWITH_CUDA -I. -MMD -MP -Werror all-warnings -Xcompiler -Wall,-Wextra,-Werror,-fPIC
CUDA_LIBS     := $(if $(NVCC),-L$(dir $(NVCC))../lib64 -lcudart_static -ldl -lrt)

ifeq ($(MAKELEVEL)$(filter help clean deps demo test test-gpu bench-gpu lint,$(MAKECMDGOALS)),0)
$(info compiler   $(CC) $(shell $(CC) -dumpfullversion -dumpversion 2>/dev/null || echo "NOT FOUND: make deps"), -march=$(ARCH))
$(info CUDA       $(if $(NVCC),$(CUDA) for sm_ $(CUDA_ARCHS),no nvcc of CUDA 12 or later: the program will run on the CPU))
$(info libraries  $(if $(MISSING),MISSING $(MISSING): make deps,all found))
endif

# ---- the program ----
SOURCES  := $(wildcard model/*.c kernels/*.c tokenizer/*.c cli/*.c)
CUDA_SOURCES := $(if $(NVCC),$(wildcard kernels/*.cu))
# What the GPU programs link: no tokenizer, so no library but xxhash.
ENGINE_C := $(filter model/% kernels/% %/utf8.c %/threads.c,$(SOURCES))
ENGINE   := $(ENGINE_C:%.c=$(B)/%.o) $(CUDA_SOURCES:%.cu=$(B)/%.o)
OBJECTS  := $(ENGINE) $(patsubst %.c,$(B)/%.o,$(filter-out $(ENGINE_C),$(SOURCES))) $(patsubst %.cc,$(B)/%.o,$(wildcard tokenizer/*.cc))

MAKEFLAGS += -r
.DEFAULT_GOAL := $(RUN)
.PHONY: deps demo test test-gpu bench bench-gpu lint sanitize fuzz clean help FORCE
.DELETE_ON_ERROR:

$(RUN): $(B)/run.o $(OBJECTS)
	@echo '$(CXX) -o $@'
	@$(CXX) -pthread $(EXTRA) -pie -o $@ $^ $(LIBS) $(CUDA_LIBS)

$(B)/%.o: %.c $(B)/flags
	@mkdir -p $(@D)
	@echo '$(CC) $<'
	@$(CC) -std=c11 -pthread $(FLAGS) $(DEFINES) -c $< -o $@

$(B)/%.o: %.cc $(B)/flags
	@mkdir -p $(@D)
	@echo '$(CXX) $<'
	@$(CXX) -std=c++17 $(FLAGS) -c $< -o $@

# The assembler says it in passing when registers spill, or when it makes wgmma wait for each product
# (C7510 and the like): kernels are written so that neither happens.
$(B)/%.o: %.cu $(B)/flags
	@mkdir -p $(@D)
	@echo 'nvcc $<'
	@$(NVCC) $(CUDA_FLAGS) -Xptxas -v $(if $(filter $<,$(WGMMA_SOURCE)),$(WGMMA_ARCHS),$(if $(filter $<,$(HOPPER_SOURCE)),$(HOPPER_ARCHS),$(CUDA_GENCODE))) -c $< -o $@ > $@.log 2>&1 || { cat $@.log; exit 1; }
	@! grep -E 'C75[0-9]{2}|[1-9][0-9]* bytes spill' $@.log

$(B)/cli/options.o: DEFINES := -DVERSION='"$(VERSION)"'
$(B)/cli/bench.o $(B)/tests/bench_gpu.o: DEFINES = -DCOMMIT='"$(shell cat $(B)/commit)"'
$(B)/cli/bench.o $(B)/tests/bench_gpu.o: $(B)/commit

BUILD := $(CC) $(CXX) -pthread $(FLAGS) $(VERSION) $(NVCC) $(CUDA_FLAGS) $(CUDA_GENCODE)
# Files that change when what they record changes: other flags or another commit rebuild.
$(B)/flags: FORCE
	@mkdir -p $(B)
	@echo '$(BUILD)' | cmp -s - $@ || echo '$(BUILD)' > $@
$(B)/commit: FORCE
	@mkdir -p $(B)
	@id=$$(git describe --always --dirty 2>/dev/null || echo unknown); echo $$id | cmp -s - $@ || echo $$id > $@

# ---- set-up ----
PACKAGES      := gcc g++ libsentencepiece-dev libpcre2-dev libutf8proc-dev libxxhash-dev libcmocka-dev python3-venv
LINT_PACKAGES := clang clang-format clang-tidy cppcheck libclang-rt-dev
SUDO          := $(if $(filter 0,$(shell id -u)),,sudo)

# $(call install,packages): through apt what dpkg does not know as installed.
define install
@missing=$$(for p in $(1); do dpkg-query -W -f '$${Status}' $$p 2>/dev/null | grep -q ' installed' || echo $$p; done); \
if [ -n "$$missing" ]; then \
    echo "installing $$(echo $$missing)"; \
    command -v apt-get >/dev/null || { echo "no apt-get here: install $$(echo $$missing) by hand"; exit 1; }; \
    $(SUDO) apt-get update -qq && DEBIAN_FRONTEND=noninteractive $(SUDO) apt-get install -qq -y --no-install-recommends $$missing >/dev/null || \
        { echo "apt-get failed: install $$(echo $$missing) by hand"; exit 1; }; \
fi
endef

deps:
	$(call install,$(PACKAGES))
	@$(MAKE) --no-print-directory .venv/ready

.venv/ready: export/requirements.txt
	python3 -m venv .venv
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps -r export/requirements.txt
	@touch $@

# ---- the demo ----
GGUF  := weights/SmolLM2-135M-Instruct.Q4_1.gguf
MODEL := weights/SmolLM2-135M-Instruct.bin

$(GGUF): export/demo.txt | .venv/ready
	$(PYTHON) -m export.fetch_demo weights
$(MODEL): $(GGUF) | .venv/ready
	$(PYTHON) -m export $< -o $@ --name SmolLM2-135M-Instruct
weights/SmolLM2-135M-Instruct-f32.bin: $(GGUF) | .venv/ready
	$(PYTHON) -m export $< -o $@ --name SmolLM2-135M-Instruct --dtype f32

demo: deps
	@$(MAKE) --no-print-directory run $(MODEL)
	@echo; echo '> What is gravity? Answer in one sentence.'; echo
	@./run $(MODEL) --chat -y 'You are a helpful assistant.' -p 'What is gravity? Answer in one sentence.' -t 0

# ---- tests ----
C_TESTS  := $(patsubst tests/%.c,$(B)/tests/%,$(filter-out tests/test_gpu.c,$(wildcard tests/test_*.c)))
PROGRAMS := $(B)/tests/tokenize $(B)/tests/bench_kernels
GPU_PROGRAMS := $(if $(NVCC),$(B)/tests/test_gpu $(B)/tests/bench_gpu)
# Our products and prefill attention, and cuBLAS, as Python can call them.
PEERS        := $(if $(NVCC),$(if $(wildcard $(dir $(NVCC))../include/cublasLt.h /usr/include/cublasLt.h),$(B)/tests/peers.so))
PEER_KERNELS := matmul_hopper matmul_few matmul attention_hopper attention attention_decode tensor_map

$(C_TESTS) $(PROGRAMS): $(B)/tests/%: $(B)/tests/%.o $(OBJECTS)
	@echo '$(CXX) -o $@'
	@$(CXX) -pthread $(EXTRA) -pie -o $@ $^ $(LIBS) $(CUDA_LIBS) $(if $(findstring /test_,$@),-lcmocka)

$(GPU_PROGRAMS): $(B)/tests/%: $(B)/tests/%.o $(ENGINE)
	@echo '$(CXX) -o $@'
	@$(CXX) -pthread $(EXTRA) -pie -o $@ $^ -lxxhash -lm $(CUDA_LIBS)

# Its CUDA runtime is its own, whatever PyTorch has loaded.
$(B)/tests/peers.so: $(B)/tests/peers.o $(PEER_KERNELS:%=$(B)/kernels/cuda_%.o) | $(B)/commit
	@echo '$(CXX) -o $@'
	@$(CXX) -pthread -shared -Wl,-Bsymbolic,-z,defs,--exclude-libs,ALL -o $@ $^ $(CUDA_LIBS)

test: deps
	@$(MAKE) --no-print-directory run-tests

.PHONY: run-tests
run-tests: $(RUN) $(C_TESTS) $(PROGRAMS) $(GPU_PROGRAMS) $(MODEL) weights/SmolLM2-135M-Instruct-f32.bin
	@for t in $(C_TESTS); do $$t || exit 1; done
	ROOFLINE_RUN=$(abspath $(RUN)) ROOFLINE_BUILD=$(abspath $(B)) $(PYTHON) -m pytest -q tests $(PYTEST)

# On a machine with a GPU; elsewhere it says that it skips. CASES picks tests by a part of their name.
test-gpu: $(GPU_PROGRAMS)
	$(if $(NVCC),$(B)/tests/test_gpu $(CASES),@echo 'skipped: no nvcc, so no CUDA kernels to test')

sanitize: deps
	@ASAN_OPTIONS=detect_leaks=1:allocator_may_return_null=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	$(MAKE) --no-print-directory run-tests B=build/sanitize RUN=build/sanitize/run NVCC= \
	    CFLAGS='-O1 -march=$(ARCH) $(CONTRACT)' EXTRA='-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer'

# ---- measuring ----
bench: deps
	@$(MAKE) --no-print-directory run $(MODEL) weights/SmolLM2-135M-Instruct-f32.bin
	./run $(MODEL) --bench
	./run weights/SmolLM2-135M-Instruct-f32.bin --bench

# The libraries on the same work follow where a PyTorch is installed.
bench-gpu: $(GPU_PROGRAMS) $(PEERS)
	$(if $(NVCC),$(B)/tests/bench_gpu $(CASES),@echo 'skipped: no nvcc, so no CUDA kernels to time')
	@if python3 -c 'import torch' 2>/dev/null; then ROOFLINE_BUILD=$(abspath $(B)) python3 tests/bench_peers.py; else echo 'no PyTorch: nothing to compare with'; fi

# ---- reading ----
C_FILES  := $(SOURCES) run.c $(wildcard tests/*.c)
FORMATTED := $(C_FILES) $(wildcard tokenizer/*.cc model/*.h kernels/*.h kernels/*.cu kernels/*.cuh tokenizer/*.h cli/*.h tests/*.h tests/*.cu)
CHECKS   := -std=c11 -I. -DWITH_CUDA -DVERSION='""' -DCOMMIT='""' -march=$(ARCH)

lint: deps
	$(call install,$(LINT_PACKAGES))
	clang-format --dry-run --Werror $(FORMATTED)
	cppcheck --quiet --enable=warning,performance,portability --inline-suppr --error-exitcode=1 --std=c11 -I. \
	    -DWITH_CUDA -DVERSION='""' -DCOMMIT='""' --suppress=missingIncludeSystem --suppress=invalidPointerCast $(SOURCES) run.c
	clang-tidy --quiet --warnings-as-errors='*' $(SOURCES) run.c -- $(CHECKS)
	@$(MAKE) --no-print-directory build/clang/run CC=clang CXX=clang++ B=build/clang RUN=build/clang/run NVCC=
	.venv/bin/ruff check export tests
	.venv/bin/ruff format --check export tests

FUZZERS := $(patsubst tests/%.c,build/fuzz/%,$(wildcard tests/fuzz_*.c))
SECONDS ?= 30
fuzz: deps
	$(call install,$(LINT_PACKAGES))
	@$(MAKE) --no-print-directory run-fuzzers CC=clang CXX=clang++ B=build/fuzz CFLAGS='-O1 -march=$(ARCH) -ffp-contract=fast' \
	    EXTRA='-fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all'
.PHONY: run-fuzzers
run-fuzzers: $(FUZZERS)
	@for f in $(FUZZERS); do mkdir -p $$f.corpus; $$f -max_total_time=$(SECONDS) -timeout=10 -max_len=65536 -print_final_stats=1 $$f.corpus || exit 1; done
$(FUZZERS): build/fuzz/%: $(B)/tests/%.o $(OBJECTS)
	$(CXX) -pthread -fsanitize=fuzzer,address,undefined -pie -o $@ $^ $(LIBS) $(CUDA_LIBS)

clean:
	rm -rf build run

help:
	@echo 'make            builds ./run (ARCH=haswell etc. for another machine; the default is this one)'
	@echo 'make demo       installs what is missing, builds, fetches and exports SmolLM2-135M-Instruct, asks it'
	@echo 'make test       installs what is missing, builds, runs every test'
	@echo 'make test-gpu   every operator on the GPU against the CPU (CASES= picks some)'
	@echo 'make bench-gpu  tokens per second, operators and their share of the roof, on the GPU'
	@echo 'make deps       installs what is missing: Debian packages, and Python packages into .venv'
	@echo 'make bench      tokens per second of the demo model, bf16 and f32'
	@echo 'make lint       clang-format, clang-tidy, cppcheck, clang, ruff'
	@echo 'make sanitize   every test under AddressSanitizer and UndefinedBehaviorSanitizer'
	@echo 'make fuzz       the fuzzers, SECONDS=30 each'
	@echo 'make clean      removes what was built (not .venv, not weights)'

-include $(shell find $(B) -name '*.d' 2>/dev/null)
