"""``python -m mcore_cli`` is ``mcore``."""

from mcore_cli.main import main

if __name__ == "__main__":
    main()
