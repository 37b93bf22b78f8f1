"""How ranks talk: ``Comm``, its transports, the status board, and the deadlock that it shows."""
