"""``python -m train`` runs the ``fnet`` command."""

from train.cli import main

if __name__ == "__main__":
    main()
