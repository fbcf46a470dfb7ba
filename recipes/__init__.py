"""The recipes that ship with qserve, one YAML file a model."""
