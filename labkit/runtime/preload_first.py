"""The first import of the forkserver: the server leaves its caller's process group.

A signal to the whole group (a terminal that closes, a job scheduler) ends the caller. The server
survives the signal just long enough to clean up, and then ends by itself.
"""

import gc
import os

os.setpgid(0, 0)
# Imported modules are not garbage, and searching them for garbage would take a fifth of the time
# until ``preload_last``.
gc.disable()
