"""Launch: the launcher of this process, its node, and the connection to the other processes."""
