"""The scheduler: which job runs where and when, and what happens after a failure."""
