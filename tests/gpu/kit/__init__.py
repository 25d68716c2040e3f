"""The kit of checks for a few minutes on a machine with a GPU, packed and rehearsed: README.md has both commands."""
