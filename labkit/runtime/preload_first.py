"""The first import of the forkserver: it leaves its caller's process group.

A signal to the whole group (a terminal that closes, a job scheduler) ends the caller. The server
survives it just long enough to clean up, and then ends by itself.
"""

import os

os.setpgid(0, 0)
