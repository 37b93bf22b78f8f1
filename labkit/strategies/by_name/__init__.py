"""Data parallelism by name, as in Horovod: what ``labkit.horovod`` offers is made here."""
