"""TCPStore: its client, the wire format, and the server. Imports nothing: the server loads it without torch."""
