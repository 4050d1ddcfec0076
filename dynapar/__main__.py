"""`python -m dynapar`, which torchrun needs: the same program as `dynapar`."""

from dynapar.cli import main

if __name__ == "__main__":
    main()
