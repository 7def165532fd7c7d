# Each recipe is a command that also works when it is pasted; `just --list` shows them.

# Install everything that work on agl-lite needs into .venv
setup:
    uv sync --extra dev

# Format the code and sort imports
format:
    uv run --extra dev ruff check --select I --fix .
    uv run --extra dev ruff format .

# Lint, formatting, types, and who may import whom
check: lint types imports

lint:
    uv run --extra dev ruff check .
    uv run --extra dev ruff format --check .

types:
    uv run --extra dev mypy

imports:
    uv run --extra dev lint-imports

# Run the tests; arguments go to pytest
test *arguments:
    uv run --extra dev pytest {{arguments}}

# Train a tiny policy through the service, every part real
demo *arguments:
    uv run --extra demo agl demo {{arguments}}

# Show what the changelog of the next release would say
changelog version:
    uvx towncrier build --draft --version {{version}}

# Write down the versions that are installed, as constraints for pip
constraints:
    uv pip freeze --exclude-editable > constraints.txt

# All that CI checks
ci:
    .ci/run
