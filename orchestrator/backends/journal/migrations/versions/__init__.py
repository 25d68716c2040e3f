"""The revisions of the journal's tables, one file each."""
