"""``python -m loopinterp`` is the command line."""

from loopinterp.cli import main

if __name__ == "__main__":
    main()
