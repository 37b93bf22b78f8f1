"""The first import of the forkserver: it leaves its caller's process group.

A signal to the whole group (a terminal that closes, a job scheduler) ends the caller. The server
survives it just long enough to clean up, and then ends by itself.
"""

import gc
import os

os.setpgid(0, 0)
# What is imported stays: looking for garbage in it takes a fifth of the time until
# ``preload_last``.
gc.disable()
