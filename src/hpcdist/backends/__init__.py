"""The libraries that carry process groups; each is imported when a group first asks for it."""
