"""``python -m agl_core.cli``: the same as ``agl``, where no script is on the path."""

from agl_core.cli import main

if __name__ == "__main__":
    main()
