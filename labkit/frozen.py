"""The last import of the forkserver: what it has loaded by then, all ranks share.

A rank is a fork: a page of memory is copied when one of the two writes to it. Python's garbage
collection writes to every object it looks at, and it leaves alone what is frozen. With this, a
rank starts in about half the processor time.
"""

import atexit
import gc

gc.collect()
gc.freeze()
# The server's own end is an ordinary one: some libraries call what is still frozen then a leak.
atexit.register(gc.unfreeze)
