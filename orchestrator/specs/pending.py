"""Codes for why a job waits. Sentences are made of them where they are shown, and never parsed."""

from __future__ import annotations

from orchestrator.specs.str_enum import StrEnum

# Names and values beside a code, which a sentence about it is made of.
Facts = tuple[tuple[str, str | int], ...]


class Pending(StrEnum):
    """Why a queued job waits."""

    HELD = "held"  # by a person
    DEPENDENCY = "dependency"
    BACK_OFF = "back_off"  # after a failure
    CLUSTER_UNSEEN = "cluster_unseen"
    ARRAY_LIMIT = "array_limit"  # for others of its array, or of its comparison
    FOREIGN_MEMORY = "foreign_memory"  # that processes of others hold
    UNREADABLE = "unreadable"  # by the driver
    NODES_AWAY = "nodes_away"
    DRAIN = "drain"  # nodes that take nothing new
    MAINTENANCE = "maintenance"  # it would not end before one
    START_WINDOW = "start_window"
    DEVICES = "devices"  # that others hold, or that are kept for others
