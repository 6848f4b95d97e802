"""What c10d does not have, on top of the facade and the backends' optional parts; only the public names import it."""
