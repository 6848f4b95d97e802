"""Features beyond c10d, on top of the facade and the backends' optional parts; only the public names import it."""
