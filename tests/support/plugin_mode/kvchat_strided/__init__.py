"""A KV mode of another package, as ``kvchat/README.md`` shows it."""
