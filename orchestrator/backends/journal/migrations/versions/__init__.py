"""The revisions of the journal's tables, a file for each."""
