"""``python -m floatplan``."""

from floatplan.cli import main

if __name__ == "__main__":
    main()
