"""One file per revision of the journal's tables."""
