"""What a few minutes on a machine with a GPU must show, packed and rehearsed: README.md has the two commands."""
