# What people and CI call. Every target does the set-up first, which takes no time once it is done.

CARGO ?= cargo

.PHONY: help setup setup-cuda demo examples test stress test-cuda check check-aarch64 fmt lint doc book bench bench-generation bench-micro clean

help: ## says what there is
	@sed -n 's/^\([a-z0-9-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

setup: ## fetches libtorch into .libtorch, unless LIBTORCH names one
	@scripts/setup.sh

setup-cuda: ## NVIDIA's libraries beside libtorch, for accelerator=cuda; 2.7 GB
	@scripts/setup_cuda.sh

demo: setup ## trains LeNet on handwritten digits, then tests it
	@scripts/data.sh mnist || true # without it the digits that ship are used
	$(CARGO) build --release --bin voltaic
	target/release/voltaic fit --config recipes/mnist.yaml
	target/release/voltaic test --config recipes/mnist.yaml --ckpt_path=last

examples: setup ## runs the programs of examples/ and checks what each prints and writes
	$(CARGO) build -p voltaic --examples
	$(CARGO) test -p voltaic --test examples -- --nocapture

test: setup ## all tests, two programs of them side by side: those of the examples and of a crate of a user's own too
	scripts/test.sh

stress: setup ## long forms of tests, and a million random inputs for each parser; takes INPUTS=1000000 SECS=3600, the longest for each
	VOLTAIC_STRESS_INPUTS=$(or $(INPUTS),1000000) VOLTAIC_STRESS_SECS=$(or $(SECS),3600) \
		$(CARGO) test -p voltaic --test stress -- --nocapture
	VOLTAIC_STRESS_TRIES=$(or $(INPUTS),1000000) $(CARGO) test -p voltaic --lib -- distributed::roll_call --nocapture
	$(CARGO) test -p voltaic --lib -- distributed::scale checkpoint::shards::write --include-ignored --nocapture
	VOLTAIC_TEST_ALL=1 $(CARGO) test -p voltaic --test it -- contract extreme_values hangs kill
	VOLTAIC_TEST_ALL=1 $(CARGO) test -p voltaic --test zero -- --include-ignored --nocapture
	$(CARGO) test -p voltaic --test fp8 -- --include-ignored --nocapture
	VOLTAIC_TEST_ALL=1 $(CARGO) test -p voltaic --test hpu -- fuzz compile_random random_programs --nocapture
	VOLTAIC_TEST_ALL=1 $(CARGO) test -p voltaic --test profiler -- long --nocapture

test-cuda: setup ## what needs an NVIDIA GPU; says why it skips if there is none
	$(CARGO) test -p voltaic --test cuda -- --nocapture

check: fmt lint doc check-aarch64 ## format, clippy, documentation, aarch64, and the tests of the scripts
	scripts/test_setup.sh

check-aarch64: setup ## type-checks all Rust code for aarch64 Linux; compiles no C++
	scripts/check_aarch64.sh

fmt: setup ## fails if a file is not formatted
	$(CARGO) fmt --all --check
	cd bench/peers && $(CARGO) fmt --all --check

lint: setup ## clippy, warnings are errors
	$(CARGO) clippy --workspace --all-targets -- -D warnings

doc: setup ## documentation, warnings are errors
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps

book: ## makes a site of the pages in target/book/html, by mdBook
	@scripts/book.sh

bench: setup ## voltaic beside its peers, into docs/benchmarks; takes ROUNDS=7 THREADS=1,2 WORKLOADS=mlp,cnn PRECISIONS=32-true ACCELERATOR=cuda
	@bench/setup.sh
	target/release/bench-runner

bench-generation: setup ## text that a GPT generates, beside PyTorch, candle and llama.cpp, into docs/benchmarks; takes ROUNDS=3 THREADS=1
	@bench/setup.sh
	target/release/bench-runner generation

bench-micro: setup ## what voltaic's own parts cost, into docs/benchmarks; takes BENCHES=overhead,calls,host_pool,lengths,record,graph,hpu,profiler,swap,update,activations,kernels
	$(CARGO) run --quiet --release --package bench-runner -- micro

clean: ## removes what was built, not what was fetched
	$(CARGO) clean
