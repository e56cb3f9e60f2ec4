"""``python -m pdhub``."""

from pdhub.cli import main

if __name__ == "__main__":
    main()
