"""The frozen nouns of the project, their units, and its one tree of errors."""
