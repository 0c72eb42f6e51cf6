"""`python -m lowtide`."""

from lowtide._cli import main

if __name__ == "__main__":
    main()
