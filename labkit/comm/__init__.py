"""Communication between ranks: ``Comm``, its transports, the status board, deadlock reports."""
