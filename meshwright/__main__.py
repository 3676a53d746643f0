"""`python -m meshwright` is the `meshwright` command, which is `plan` by another name."""

from .executor.cli import main

if __name__ == "__main__":
    main()
