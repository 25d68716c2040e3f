"""Five projects' own training scripts, driven unmodified from the checkouts in the folder that SEEDS names.

Nothing of the projects is here: each module makes tiny weights and data, and edits its job file in paths and sizes.
"""
