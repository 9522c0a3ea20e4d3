# Every recipe is one script in tools/. The two that do everything on a fresh machine: make train, make test.
# Variables: PYTHON (interpreter to start from), CUDA=ON|OFF|AUTO, JOBS, ARGS (passed on).
ARGS ?=
export PYTHON CUDA JOBS

help:        ## this list
	@sed -n 's/^\([a-z-]*\): *##/\1\t/p' Makefile | expand -t 14

train:       ## set up, build, and train the tiny preset on real text (about 3 minutes of training)
	@tools/train.sh $(ARGS)
test:        ## set up, build, and run every C++ and Python test
	@tools/test.sh $(ARGS)
setup:       ## install what is missing: system packages, .venv, torch, Python packages
	@tools/setup.sh
build:       ## set up and build the library, the command-line tool, the tests and the torch operators
	@tools/build.sh
bench:       ## build and run the benchmarks of the stages and of the layer
	@tools/bench.sh $(ARGS)
lint:        ## check formatting, shell syntax, Python and docs
	@tools/lint.sh
format:      ## format C++ and Python in place
	@tools/lint.sh --fix
asan:        ## the C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer
	@tools/asan.sh
docs-check:  ## check that every link and path in the docs exists
	@python3 tools/check_docs.py
test-gpu:    ## on this machine's GPU: C++ suites, sanitizers, benchmarks, Python suite
	@tools/gpu_round.sh $(ARGS)
clean:       ## remove what builds made (.venv stays)
	rm -rf build build-*

.PHONY: help train test setup build bench lint format asan docs-check test-gpu clean
