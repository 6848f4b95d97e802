"""FileStore: its file format and the users of a file."""
