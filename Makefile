# Two commands are enough: `make lab` to read the course, `make test` to check it.
PYTHON ?= python3
VENV   := .venv
ifeq ($(OS),Windows_NT)
BIN    := $(VENV)/Scripts
else
BIN    := $(VENV)/bin
endif
# Readers' copies: without the answers under the questions. Any Python will do.
COPY   = $(firstword $(wildcard $(BIN)/python $(BIN)/python.exe) $(PYTHON)) -m book.copy chapters my_chapters

.PHONY: help lab test chapters reset clean

help:
	@echo "make lab          set up and open JupyterLab on chapter 0, in your copy my_chapters/"
	@echo "make test         set up and run every test, and every chapter twice"
	@echo "make chapters     write the chapters' outputs (CH=00 for one; FRESH=1 renews timings too)"
	@echo "make reset CH=00  bring one chapter of my_chapters/ back to the original"
	@echo "make clean        remove .venv; your my_chapters/ stays"

lab: $(VENV)/lab my_chapters
	cd my_chapters && "$(abspath $(BIN))/jupyter" lab 00_start_here.ipynb

.PHONY: my_chapters
my_chapters:
	@$(COPY)

test: $(VENV)/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -n 2 --dist loadscope

chapters: $(VENV)/test
	$(BIN)/python tests/write_chapters.py $(CH)

reset:
	@[ -n "$(CH)" ] && ls chapters/$(CH)_*.ipynb >/dev/null 2>&1 || \
		{ echo "Say which chapter: make reset CH=00"; exit 1; }
	@$(COPY) --reset $(CH)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis

$(VENV)/lab $(VENV)/test: pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and \
		'Python 3.11 or newer is needed; name one: make $(notdir $@) PYTHON=python3.12')"
	@echo "Setting up $(VENV): a few minutes, once."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e ".[$(notdir $@)]"
	@touch $@
