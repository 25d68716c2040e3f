"""A program that never answers, in the place of the one that decides."""

while True:
    pass
