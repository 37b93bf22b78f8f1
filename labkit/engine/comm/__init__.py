"""Communication between ranks: ``Comm``, its transports, the status board, deadlock reports.

comm               the operations of a rank: send, recv, exchange, barrier; some ranks alone
session            posts each operation on the board and records its span
transport          the interface of what moves the bytes, and counts them where they leave
torch_transport, shared_transport (shared_memory)   implement it
emulated_link      makes messages as slow as on a link with a given latency and bandwidth
board              what every rank is doing, for all processes of a run to read
deadlock           what the board tells: what does not fit, who can never continue, and why
work               operations that go on in a separate thread
peak_memory        the most memory that a rank took
rendezvous         how ranks without a common launcher share memory; a Comm for one kind of traffic
source_lines       which lines are the learner's
"""
