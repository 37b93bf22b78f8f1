"""Kernels that start in a moment, as forks of a process that has imported what pages use.

provisioner   in Jupyter: asks for a fork, and starts a kernel the ordinary way where none can be
warm          the process that has the imports, and what becomes a kernel in a fork of it
"""
