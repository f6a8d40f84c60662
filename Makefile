# make demo   convert a real small model and compare it with its original
# make test   the tests (tiny models, a few minutes);  make test-slow adds those on the real model
# make check  format, lint, types, tests
# make bench  time and memory of the demo conversion;  make bench-quality the method without each ingredient, and baselines
PYTHON ?= python
MODELS ?= models
WORKERS ?= 2

.PHONY: demo test test-slow check types bench bench-quality

demo: $(MODELS)/smollm2-135m/config.json
	latentfold convert $(MODELS)/smollm2-135m $(MODELS)/smollm2-135m-mla --kv-rank 96 --rope-dim 32 --overwrite
	latentfold eval $(MODELS)/smollm2-135m $(MODELS)/smollm2-135m-mla --html $(MODELS)/report.html

$(MODELS)/smollm2-135m/config.json:
	$(PYTHON) benchmarks/fetch_smollm2.py $(MODELS)/smollm2-135m

test:
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q -n $(WORKERS)

test-slow: $(MODELS)/smollm2-135m/config.json
	LATENTFOLD_SMOLLM2=$(MODELS)/smollm2-135m $(PYTHON) -m pytest -q -m slow

check:
	ruff format --check .
	ruff check .
	$(MAKE) types
	$(MAKE) test

# mypy has to find the folders under the names that they are imported by
types:
	mkdir -p build/types/latentfold
	ln -sfn ../../../convert build/types/latentfold/convert
	ln -sfn ../../../eval build/types/latentfold/eval
	MYPYPATH=build/types mypy -p latentfold.convert -p latentfold.eval
	MYPYPATH=build/types mypy benchmarks
	mypy tests

bench: $(MODELS)/smollm2-135m/config.json
	$(PYTHON) benchmarks/convert_cost.py $(MODELS)/smollm2-135m

bench-quality: $(MODELS)/smollm2-135m/config.json
	$(PYTHON) -m benchmarks.quality $(MODELS)/smollm2-135m --ablate --baselines --json $(MODELS)/quality.json
