"""Loads tables that are part of the package: YAML files beside the module that reads them."""

from __future__ import annotations

from importlib.resources import files

from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.yaml_text import read_document


def load_table(package: str | None, table_name: str) -> JsonObject:
    """Return the content of the YAML file `TABLE_NAME.yaml` in a package; each call reads the file
    anew.
    """
    assert package is not None, "a script, not a module of a package"
    path = files(package) / f"{table_name}.yaml"
    return read_document(path.read_text(), str(path)).data
