"""Server of a TCPStore. Imports nothing: the server process loads it without torch."""
