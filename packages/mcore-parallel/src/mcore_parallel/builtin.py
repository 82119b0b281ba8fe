"""Built-in plugins of mcore-parallel, registered through the same hooks as anybody's."""
